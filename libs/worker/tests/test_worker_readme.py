"""The README's example does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.medium
def test_the_example_runs(tmp_path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S):
        name = re.match(r"# (\w+\.py)", block)
        assert name is not None
        (tmp_path / name[1]).write_text(block)
    answer = subprocess.run(
        [sys.executable, "driver.py"], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=True
    )
    assert answer.stdout.splitlines() == [f"hello m2flow, from rank {rank} on cpu:0" for rank in range(2)]
