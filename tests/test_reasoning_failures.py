"""What goes wrong is said, in time, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def wait_for_steps(started, count: int, deadline_s: float = 120) -> None:
    """Waits until the run has written that many training steps."""
    metrics = started.path / "metrics.jsonl"
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if metrics.exists() and metrics.read_text().count('"critic/score/mean"') >= count:
            return
        assert started.process.poll() is None, started.process.stdout.read()
        time.sleep(0.2)
    raise AssertionError(f"no {count} steps within {deadline_s} s")


def wait_gone(pids: list[int], deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < until, [command_of(pid) for pid in left]
        time.sleep(0.05)


def worker_pid(started, group: str) -> int:
    """The process of the first rank of a group: workers name their processes."""
    family = descendants(started.process.pid)
    (pid,) = [pid for pid in family if Path(f"/proc/{pid}/comm").read_text().strip() == f"{group}.0"]
    return pid


def maps_torch(pid: int) -> bool:
    """Whether a process has loaded torch's library."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def left_in_shared_memory() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir()}


def test_a_killed_actor_ends_the_run_with_its_name(start) -> None:
    started = start("plan=temporal")
    wait_for_steps(started, 1)
    family = descendants(started.process.pid)
    os.kill(worker_pid(started, "actor"), signal.SIGKILL)
    output, _ = started.process.communicate(timeout=10)
    assert started.process.returncode not in (0, None)
    assert "actor rank 0" in output
    assert "SIGKILL" in output
    wait_gone(family, 5)


def test_no_worker_outlives_a_killed_driver(start) -> None:
    before = left_in_shared_memory()
    started = start("plan=spatial")
    wait_for_steps(started, 1)
    family = descendants(started.process.pid)
    assert len(family) >= 3
    os.kill(started.process.pid, signal.SIGKILL)
    wait_gone(family, 10)
    assert left_in_shared_memory() <= before


def test_ctrl_c_leaves_nothing_and_the_driver_had_no_torch(start) -> None:
    before = left_in_shared_memory()
    started = start("plan=temporal")
    wait_for_steps(started, 1)
    family = descendants(started.process.pid)
    assert maps_torch(worker_pid(started, "actor"))
    assert not maps_torch(started.process.pid)
    os.kill(started.process.pid, signal.SIGINT)
    started.process.communicate(timeout=5)
    assert started.process.returncode == 130
    assert [pid for pid in family if alive(pid)] == []
    assert left_in_shared_memory() <= before


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("num_stepz=3", "num_steps"),
        ("model.source=/nowhere", "/nowhere"),
        ("minibatch_size=60", "minibatch_size"),
        ("task=no_such_task", "no_such_task"),
        ("plan=sideways", "sideways"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_mistake_is_named_before_anything_starts(command: str, setting: str, said: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "m2flow.reasoning", command, f"run.dir={run}", setting],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert not run.exists()


def test_check_finds_nothing_wrong_with_the_shipped_recipes() -> None:
    for recipe in ("one_digit", "two_digit"):
        done = subprocess.run(
            [sys.executable, "-m", "m2flow.reasoning", "check", recipe],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
