"""Runs in processes of their own that are interrupted or whose workers die: how they end, how soon, what is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m2flow.apps.checkpoint import latest_checkpoint
from m2flow.apps.run_directory import RunDirectory

Start = Callable[..., subprocess.Popen[str]]

pytestmark = [pytest.mark.medium, pytest.mark.timeout(60)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(text.rpartition(")")[2].split()[1]) == pid:
            child = int(stat.parent.name)
            found += [child, *_children(child)]
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _catches(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def _wait_gone(pids: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < until, "processes are left"
        time.sleep(0.05)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a run of the toy under the process launcher and waits for its first checkpoint."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str) -> subprocess.Popen[str]:
        settings = [f"model.source={model}", f"run.dir={tmp_path / 'run'}", "num_steps=100000", "generate_s=0.02"]
        command = [sys.executable, "-m", "m2flow.apps.testing", "train", *settings, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        while not ((line := process.stdout.readline()).startswith("step") and "checkpoint" in line):
            assert process.poll() is None, process.communicate()
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_ctrl_c_while_the_plan_changes_is_no_failure(model: Path, tmp_path: Path) -> None:
    plan = tmp_path / "run" / "plan.json"
    words = [f"model.source={model}", 'run.profiles=""', f"run.dir={plan.parent}", "plan=auto", "num_steps=100000"]
    command = [sys.executable, "-m", "m2flow.apps.testing", "train", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as started:
        modes: set[str] = set()
        while len(modes) < 2:  # the plan is written, then the groups move
            assert started.poll() is None, started.communicate()
            if plan.exists():
                modes.add(str(json.loads(plan.read_text())["mode"]))
            time.sleep(0.01)
        workers = _children(started.pid)
        os.kill(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=5)
    assert (started.returncode, err) == (130, "interrupted: all workers have ended\n")
    _wait_gone(workers, 5)


def test_ctrl_c_while_the_command_imports_leaves_no_traceback(model: Path) -> None:
    command = [sys.executable, "-m", "m2flow.apps.testing", "train", f"model.source={model}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as started:
        # Python itself leaves SIGTERM alone: it is caught from the command's first line on.
        while not _catches(started.pid, signal.SIGTERM):
            assert started.poll() is None, started.communicate()
        os.kill(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=5)
    assert err == "interrupted: nothing had started\n"
    # A shell says 130 of both: Python ends by the signal itself where it came as a dataclass was made, caught or not.
    assert started.returncode in (130, -signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_the_run_within_five_seconds(
    start: Start, tmp_path: Path, number: signal.Signals, code: int, word: str
) -> None:
    started = start()
    workers = _children(started.pid)
    assert workers
    os.kill(started.pid, number)
    _, err = started.communicate(timeout=5)
    assert started.returncode == code, err
    assert word in err
    assert "Traceback" not in err
    _wait_gone(workers, 1)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_killed_worker_ends_the_run_with_its_name(start: Start, tmp_path: Path) -> None:
    started = start("dies_at=20")
    workers = _children(started.pid)
    _, err = started.communicate(timeout=10)
    assert started.returncode == 1
    assert err.startswith("actor rank 0 on "), err
    assert "SIGKILL" in err.splitlines()[0]
    assert any(f"(pid {pid})" in err.splitlines()[0] for pid in workers)
    _wait_gone(workers, 5)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step_18"


def test_no_worker_outlives_a_killed_driver(start: Start, tmp_path: Path) -> None:
    started = start()
    workers = _children(started.pid)
    started.kill()
    started.communicate(timeout=5)
    _wait_gone(workers, 10)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is not None


def test_a_run_ahead_of_its_weights_whose_driver_was_killed_loses_and_doubles_nothing(
    start: Start, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    started = start("plan=spatial", "staleness=1", "train_s=0.02", "checkpoint.every=3", "evaluation.every=3")
    time.sleep(0.3)  # into steps that no checkpoint has
    workers = _children(started.pid)
    started.kill()
    started.communicate(timeout=5)
    _wait_gone(workers, 10)
    kept = latest_checkpoint(run.checkpoints)
    assert kept is not None
    steps = int(kept.name.removeprefix("step_")) + 4
    command = [sys.executable, "-m", "m2flow.apps.testing", "train", "--resume", str(run.path), f"num_steps={steps}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    trained = [row["step"] for row in run.read_metrics() if "critic/score/mean" in row]
    assert trained == list(range(1, steps + 1))
    state = json.loads((run.checkpoints / f"step_{steps}" / "state.json").read_text())
    assert state["counts"] == [4 * steps, steps]  # groups, and optimiser steps
