"""The process launcher: what is left, who outlives whom, and what a worker process holds."""

import contextlib
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow.worker import AgentAddress, Cluster, GroupSpec, LaunchError, Session, WorkerFailed, launch_run
from m2flow.worker.testing import Probe, RetryProbe
from m2flow.worker.testing.conformance import DEADLINE_S
from m2flow.worker.testing.listening import listening_sockets
from m2flow.worker.testing.torch_probe import TorchProbe

pytestmark = pytest.mark.medium

DRIVER = """
import sys, time
from m2flow.worker import Cluster, launch_run
from m2flow.worker.testing import Probe
with launch_run(Cluster.virtual(2), run_dir=".") as session:
    group = session.start(Probe.group(device_kind="virtual"), "0-1")
    print(session._links["node0"].agent.pid, *group.pids, flush=True)
    group.sleep(60.0).wait()
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def session_members(agent: int) -> list[int]:
    """The processes of the agent's session: all that a run has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == agent and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def wait_for_end(agent: int, directory: Path, deadline_s: float = DEADLINE_S) -> None:
    """Fails when a process of the run or its private directory is left after the deadline."""
    end = time.monotonic() + deadline_s
    while session_members(agent) or list(directory.iterdir()):
        assert time.monotonic() < end, f"left: {session_members(agent)}, {list(directory.iterdir())}"
        time.sleep(0.02)


def agent_of(session: Session) -> int:
    return int(session._links["node0"].agent.pid)  # type: ignore[attr-defined]


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the run's private directories are made: empty before and after. Short, for socket paths."""
    with tempfile.TemporaryDirectory(prefix="m2f-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)
        assert list(Path(name).iterdir()) == []


def started_driver(private: Path) -> tuple["subprocess.Popen[str]", list[int]]:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=private.parent
    )
    assert driver.stdout is not None
    return driver, [int(word) for word in driver.stdout.readline().split()]


def test_a_driver_with_many_open_files_starts_a_run_and_ends_it(private: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("kernel: this user may not open 2,048 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    held = [os.open("/", os.O_RDONLY) for _ in range(1100)]
    try:
        with launch_run(Cluster.virtual(1)) as session:
            assert session.start(Probe.group(device_kind="virtual"), "0").echo(1).result(10) == [1]
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("of_the_driver", [True, False])
def test_a_run_that_is_out_of_descriptors_says_so(private: Path, of_the_driver: bool) -> None:
    with launch_run(Cluster.virtual(16), on_log=lambda *_: None) as session:
        (zygote,) = set(session_members(agent_of(session))) - {agent_of(session)}
        pid = os.getpid() if of_the_driver else zygote
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + 6, limits[1]))
        start = time.monotonic()
        try:
            with pytest.raises(WorkerFailed, match=r"Too many open files: raise the limit of open files \(ulimit -n\)"):
                session.start(Probe.group(device_kind="virtual"), "0-15")
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert time.monotonic() - start < DEADLINE_S


def test_when_the_driver_is_killed_everything_ends(private: Path) -> None:
    driver, pids = started_driver(private)
    assert len(pids) == 3
    assert all(map(alive, pids))
    driver.kill()
    driver.communicate()
    wait_for_end(pids[0], private)
    assert not any(map(alive, pids))


def test_ctrl_c_ends_a_run_within_five_seconds(private: Path) -> None:
    driver, pids = started_driver(private)
    start = time.monotonic()
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S
    assert errors.strip().endswith("KeyboardInterrupt")
    assert not any(map(alive, pids))


@pytest.mark.parametrize("victim", ["agent", "zygote"])
def test_when_the_middle_is_killed_the_run_fails_and_everything_ends(private: Path, victim: str) -> None:
    with launch_run(Cluster.virtual(2), on_log=lambda *_: None) as session:
        group = session.start(Probe.group(device_kind="virtual"), "0-1")
        agent = agent_of(session)
        (zygote,) = set(session_members(agent)) - {agent, *group.pids}
        start = time.monotonic()
        os.kill(agent if victim == "agent" else zygote, signal.SIGKILL)
        while session.failure is None:
            assert time.monotonic() - start < DEADLINE_S
            time.sleep(0.01)
    wait_for_end(agent, private)


def own_holdings() -> tuple[list[str], list[str]]:
    """What this process holds of ports and shared memory: the sockets that listen, and the memory files."""
    gc.collect()
    held = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.append(os.readlink(descriptor))
    return sorted(listening_sockets()), sorted(name for name in held if name.startswith("/memfd:"))


def test_fifty_random_kills_leave_nothing(private: Path) -> None:
    rng = random.Random(7)
    before = own_holdings()
    with launch_run(Cluster.virtual(2), on_log=lambda *_: None, max_restarts=100) as session:
        group = session.start(RetryProbe.group(device_kind="virtual"), "0-1*2")
        agent = agent_of(session)
        for _ in range(50):
            rank = rng.randrange(4)
            pid = group.pids[rank]
            os.kill(pid, signal.SIGKILL)
            handle = group.echo(rank)
            assert handle.result(10) == [rank] * 4
    wait_for_end(agent, private)
    assert own_holdings() == before


@pytest.mark.parametrize("ranks_per_process", [1, 2])
def test_a_thousand_items_with_random_kills_arrive_once_each(private: Path, ranks_per_process: int) -> None:
    rng = random.Random(3)
    arrived: Counter[int] = Counter()
    with launch_run(Cluster.virtual(2), on_log=lambda *_: None, max_restarts=100) as session:
        spec = RetryProbe.group(device_kind="virtual", ranks_per_process=ranks_per_process)
        group = session.start(spec, "0-1*2")
        handles = [group.on(number % 4).echo(number) for number in range(1000)]
        for handle in handles:
            handle.add_done_callback(lambda ended: arrived.update(ended.result()))
        restarts = 0
        while not all(handle.done() for handle in handles) or restarts < 10:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(group.pids), signal.SIGKILL)
            restarts += 1
            time.sleep(0.02)
        # Answers that were given before a kill and after it were one answer to the caller.
        assert group.echo("end").result(30) == ["end"] * 4
        assert session.failure is None
    assert arrived == Counter(range(1000))


@contextlib.contextmanager
def memory_limit(size_bytes: int) -> Iterator[Path]:
    """A control group whose processes the kernel kills for lack of memory: the file that takes them in."""
    for parent, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = parent / f"m2f-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(size_bytes))
                yield group / "cgroup.procs"
                return
        finally:
            group.rmdir()
    pytest.skip("kernel: no memory control group can be made here")


def test_a_rank_that_the_kernel_kills_for_lack_of_memory_is_the_first_cause(private: Path) -> None:
    with memory_limit(64 << 20) as members:
        with launch_run(Cluster.virtual(2), on_log=lambda *_: None) as session:
            group = session.start(Probe.group(device_kind="virtual"), "0-1")
            members.write_text(str(group.pids[1]))
            waiting = group.on(0).sleep(60.0)
            group.on(1).fill_memory(512 << 20)
            with pytest.raises(WorkerFailed) as caught:
                waiting.result(DEADLINE_S)
        assert (caught.value.rank, caught.value.phase) == (1, "fill_memory")
        assert caught.value.cause == "SIGKILL (the kernel's answer to a lack of memory, or someone's kill -9)"


def test_logs_reach_the_driver(private: Path) -> None:
    lines: list[tuple[str, int, str]] = []
    with launch_run(Cluster.virtual(2), on_log=lambda *line: lines.append(line)) as session:
        session.start(Probe.group(device_kind="virtual"), "0-1").say("a line").wait(10)
    assert sorted(lines) == [("probe", 0, "a line"), ("probe", 1, "a line")]


def test_a_worker_has_its_cores_and_no_torch_unless_its_class_has(private: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with launch_run(Cluster.local()) as session:
        probe, torch_probe = session.start_all(
            [(Probe.group(), "0"), (TorchProbe.group(devices_per_rank=None), "cpu:all")]
        )
        (answer,) = probe.whoami().result(10)
        assert answer["cores"] == [cores[0]]
        assert answer["torch"] is False
        assert torch_probe.threads().result(10) == [{"threads": len(cores), "cores": len(cores)}]


def test_the_token_is_asked_for_and_the_directory_is_private(private: Path) -> None:
    cluster = Cluster.virtual(1)
    with launch_run(cluster) as session:
        (directory,) = private.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        address = session._links["node0"].agent.address  # type: ignore[attr-defined]
        with pytest.raises(LaunchError, match="another token"):
            launch_run(cluster, agents={"node0": AgentAddress(address, "guess")})
        session.start(Probe.group(device_kind="virtual"), "0").echo(1).wait(10)
        # A run of one machine listens in that directory alone.
        assert [listening_sockets(pid) for pid in (os.getpid(), *session_members(agent_of(session)))] == [{}] * 4


def test_an_agent_without_a_token_of_its_own_is_not_joined() -> None:
    with pytest.raises(ValueError, match="got an empty token, want a secret"):
        AgentAddress("127.0.0.1:1", "")


def test_a_failure_reaches_every_waiting_call(private: Path) -> None:
    with launch_run(Cluster.virtual(2), on_log=lambda *_: None) as session:
        group = session.start(Probe.group(device_kind="virtual"), "0-1")
        waiting = group.on(1).sleep(30.0)
        group.kill(0)
        with pytest.raises(WorkerFailed) as caught:
            waiting.result(DEADLINE_S)
    assert (caught.value.rank, caught.value.phase) == (0, "idle")
    assert caught.value.cause.startswith("SIGKILL")


def test_a_module_that_starts_threads_is_started_cold(private: Path) -> None:
    with launch_run(Cluster.virtual(2), on_log=lambda *_: None) as session:
        agent = agent_of(session)
        group = session.start(
            GroupSpec(
                "threaded",
                "m2flow.worker.testing.threaded_probe:ThreadedProbe",
                {"size": 3},
                ("whoami", "die"),
                (),
                device_kind="virtual",
                on_death="retry",
            ),
            "0-1",
        )
        answers = group.whoami().result(10)
        assert [(answer["rank"], answer["config"], answer["torch"]) for answer in answers] == [
            (0, {"size": 3}, False),
            (1, {"size": 3}, False),
        ]
        group.kill(1)
        while group.pids[1] == answers[1]["pid"]:
            time.sleep(0.02)
        assert [answer["attempt"] for answer in group.whoami().result(30)] == [0, 1]
    wait_for_end(agent, private)


def test_what_a_killed_driver_of_threads_left_is_removed_by_the_next_run(private: Path) -> None:
    script = (
        "import os, signal; from m2flow.worker import Cluster, launch_run;"
        "session = launch_run(Cluster.virtual(1), launcher='inproc'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], timeout=50, check=False)
    assert len(list(private.iterdir())) == 1
    with launch_run(Cluster.virtual(1), launcher="inproc"):
        assert len(list(private.iterdir())) == 1
        with launch_run(Cluster.virtual(1), launcher="inproc"):
            assert len(list(private.iterdir())) == 2


WRITER = """
import signal, socket, sys
from contextlib import suppress
from m2flow.proto.worker.v1.worker_pb2 import SessionRequest
from m2flow.worker.launchers._control import ControlClient, _Connection
from m2flow.worker.launchers._frames import send_frame
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
def connected():
    near, far = socket.socketpair()
    far.close()
    return near
with suppress(BrokenPipeError):
    send_frame(connected(), SessionRequest())
print("an agent", flush=True)
_Connection(connected()).write(b"x")
print("a driver", flush=True)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    client = ControlClient(sys.argv[1], "t")
client.enter("group", 0)
print("a rank", flush=True)
"""


def test_no_signal_comes_of_writing_to_who_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "s")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert answer.stdout.splitlines() == ["an agent", "a driver", "a rank"], answer.stderr
