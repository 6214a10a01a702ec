"""Checkpoints: complete or absent, the newest kept, and refused when they do not fit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from m2flow.apps.checkpoint import ResumeState, latest_checkpoint, read_resume_state, write_checkpoint
from m2flow.apps.errors import CheckpointError


def _state(step: int) -> ResumeState:
    return ResumeState(step=step, seed=0, items_drawn=8 * step, policy_version=step, package_version="0.1.0")


def _write(root: Path, step: int, keep: int = 2) -> Path:
    return write_checkpoint(root, _state(step), lambda path: (path / "weights").write_text(str(step)), keep=keep)


def test_the_newest_are_kept_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        _write(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]
    newest = latest_checkpoint(tmp_path)
    assert newest == tmp_path / "step_11"
    assert read_resume_state(newest) == replace(_state(11), files={"weights": 2})


def test_there_is_none_before_the_first(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None


def test_another_format_and_an_incomplete_one_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    state = json.loads((path / "resume.json").read_text())
    (path / "resume.json").write_text(json.dumps({**state, "format": 7}))
    with pytest.raises(CheckpointError, match="got format 7, want 2"):
        read_resume_state(path)
    (path / "resume.json").write_text(json.dumps({**state, "colour": "red"}))
    with pytest.raises(CheckpointError, match="does not fit"):
        read_resume_state(path)
    with pytest.raises(CheckpointError, match="no readable resume"):
        read_resume_state(tmp_path)


def test_one_that_lost_a_part_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    (path / "weights").write_text("")
    with pytest.raises(CheckpointError, match="got 0 bytes of weights, want 1 bytes: remove this directory"):
        read_resume_state(path)
    (path / "weights").unlink()
    with pytest.raises(CheckpointError, match="got no weights, want 1 bytes"):
        read_resume_state(path)


def test_what_is_named_like_a_checkpoint_and_is_none_is_passed_over(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    shutil.copytree(path, tmp_path / "step_1_copy")
    assert latest_checkpoint(tmp_path) == path


_WRITER = """
import sys
from pathlib import Path
from m2flow.apps.checkpoint import ResumeState, write_checkpoint

def write(path):
    (path / "weights").write_bytes(b"x" * 1_000_000)
    print(path, flush=True)
    sys.stdin.read()

write_checkpoint(Path(sys.argv[1]), ResumeState(2, 0, 16, 2, "0.1.0"), write, keep=1)
"""


@pytest.mark.medium
@pytest.mark.timeout(30)
def test_a_run_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    before = _write(tmp_path, 1, keep=1)
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        half = Path(process.stdout.readline().strip())
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    assert half.exists()
    assert latest_checkpoint(tmp_path) == before
    assert (before / "weights").read_text() == "1"
    assert _write(tmp_path, 2, keep=1) == latest_checkpoint(tmp_path)
    assert not half.exists()
