"""The README's example, run as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_as_two_processes(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    program = tmp_path / "example.py"
    program.write_text(found.group(1))
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(program)]
    with (
        subprocess.Popen([*command, "consumer"], env=environment, stdout=subprocess.PIPE, text=True) as consumer,
        subprocess.Popen([*command, "producer"], env=environment) as producer,
    ):
        assert producer.wait(50) == 0
        output, _ = consumer.communicate(timeout=50)
    assert consumer.returncode == 0
    assert output.split() == ["0", "0", "1", "1000000", "2", "2000000"]
