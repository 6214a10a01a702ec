"""The README's example, run as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("in_place", [False, True])
def test_the_example_runs_as_two_processes(tmp_path: Path, in_place: bool) -> None:
    example, instead = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    if in_place:
        example, count = re.subn(r" *channel\.put\(.*\n", instead, example)
        assert count == 1
    program = tmp_path / "example.py"
    program.write_text(example)
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
