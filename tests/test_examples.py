"""Every python and console block of every README and page of the docs runs, each in a fresh interpreter.

A package whose own tests run its README (test_<package>_readme.py: several files, or arguments) is left to them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
    and not list(page.parent.glob("tests/test_*_readme.py"))
)
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES = [
    pytest.param(kind, text, id=f"{page.relative_to(ROOT)}-{index}")
    for page in PAGES
    for index, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
]


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
@pytest.mark.timeout(180)
def test_example(kind: str, text: str, tmp_path: Path) -> None:
    if kind == "python":
        script = tmp_path / "example.py"
        script.write_text(text)
        command = [sys.executable, str(script)]
    else:
        commands = "\n".join(line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
        command = ["bash", "-euo", "pipefail", "-c", commands]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
