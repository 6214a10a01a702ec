"""The README's example runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.medium
def test_the_example_runs_and_both_plans_give_the_same(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    temporal, spatial = done.stdout.splitlines()
    assert temporal.split(" ", 1)[0] == "temporal_plan"
    assert temporal.split(" ", 1)[1] == spatial.split(" ", 1)[1]
