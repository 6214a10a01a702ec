"""The conformance suite on the launchers of this machine."""

import re
import tempfile
import threading
from typing import ClassVar

import pytest

from m2flow.worker import (
    AgentAddress,
    Cluster,
    LaunchError,
    PlacementError,
    RefusedError,
    Session,
    SessionClosedError,
    WorkerFailed,
    launch_run,
)
from m2flow.worker.launchers._agent_process import AgentProcess
from m2flow.worker.launchers._boot import AgentOptions
from m2flow.worker.testing import Probe
from m2flow.worker.testing.conformance import DEADLINE_S, LauncherConformance


class TestInproc(LauncherConformance):
    launcher = "inproc"
    dies = False

    def test_a_thread_cannot_be_killed(self) -> None:
        with pytest.raises(RefusedError, match="a thread cannot be killed: use process"):
            self.group.kill(0)


@pytest.mark.medium
class TestProcess(LauncherConformance):
    launcher = "process"


@pytest.mark.medium
class TestProcessOfTwo(LauncherConformance):
    launcher = "process"
    ranks_per_process = 2


@pytest.mark.medium
class TestJoined(LauncherConformance):
    """Every node is an agent that was started apart, as by hand, and is joined by its address."""

    launcher = "process"
    agents: ClassVar[list[AgentProcess]] = []

    @classmethod
    def launch(cls) -> Session:
        options = AgentOptions(tempfile.mkdtemp(prefix="m2flow-"), "t", address="127.0.0.1:0")
        cls.agents.append(agent := AgentProcess(options))
        joined = {"node0": AgentAddress(agent.address, "t")}
        return launch_run(Cluster.virtual(2, memory_bytes=1 << 20), agents=joined, on_log=lambda *_: None)

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        while cls.agents:
            cls.agents.pop().end()


def test_ranks_of_one_process_are_of_one_node() -> None:
    with launch_run(Cluster.virtual(4, num_nodes=2), launcher="inproc") as session:
        spec = Probe.group(device_kind="virtual", ranks_per_process=3)
        with pytest.raises(PlacementError, match="ranks 0 to 2 on node0, node1, want one node: they share a process"):
            session.start(spec, "all")


@pytest.mark.medium
@pytest.mark.parametrize("launcher", ["inproc", "process"])
def test_nodes_may_be_names_on_one_machine(launcher: str) -> None:
    with launch_run(Cluster.virtual(2, num_nodes=2), launcher=launcher) as session:
        assert session.start(Probe.group(device_kind="virtual"), "all").echo(1).result(20) == [1, 1]


def test_an_unknown_launcher_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'thread', want one of 'inproc', 'process'"):
        launch_run(Cluster.virtual(1), launcher="thread")


def test_a_run_that_does_not_start_leaves_no_watchdog() -> None:
    watching = _watchdogs()
    with pytest.raises(LaunchError):
        launch_run(Cluster.virtual(1), agents={"node0": AgentAddress("", "t")})
    assert _watchdogs() == watching
    with launch_run(Cluster.virtual(1), launcher="inproc"):
        assert _watchdogs() == watching + 1


def _watchdogs() -> int:
    return sum(thread.name == "watchdog" for thread in threading.enumerate())


def test_a_placement_of_the_wrong_kind_is_refused() -> None:
    with launch_run(Cluster.virtual(1), launcher="inproc") as session, pytest.raises(ValueError, match="'virtual'"):
        session.start(Probe.group(), "0")


def test_a_silent_run_says_who_waits_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    with launch_run(Cluster.virtual(1), launcher="inproc", silence_s=0.2) as session:
        group = session.start(Probe.group(device_kind="virtual"), "0*2")
        group.on(1).echo(1)
        sleeping = group.on(0).sleep(0.6)
        group.on(0).echo(1)
        sleeping.wait(10)
    assert (
        "[m2flow] nothing has happened for 0 s\n  probe.0: in sleep for 0 s, 1 more behind it"
        in capsys.readouterr().err
    )


def test_a_silent_start_is_said_to_last_as_long_as_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with launch_run(Cluster.virtual(1), launcher="inproc", silence_s=0.7) as session:
        session.start(Probe.group({"setup": "sleep 1.8"}, device_kind="virtual"), "0")
    assert re.search(r"nothing has happened for \d s\n  probe\.0: in start for [1-9] s\n", capsys.readouterr().err)


def test_an_answer_that_comes_after_its_group_was_stopped_harms_nobody() -> None:
    with launch_run(Cluster.virtual(1), launcher="inproc") as session:
        brief, other = session.start_all([(Probe.group(name=name, device_kind="virtual"), "0") for name in ("a", "b")])
        late = brief.sleep(2.5)  # A thread cannot be ended, so it answers after `stop` has given up on it.
        session.stop(brief, grace_s=0.0)
        assert other.sleep(1.0).result(10) == [1.0]
        assert session.failure is None
        with pytest.raises(SessionClosedError, match="group a was stopped before it answered"):
            late.result()


def test_a_driver_that_cannot_hear_fails_instead_of_waiting_for_ever() -> None:
    def deaf(group: str, rank: int, line: str) -> None:
        raise OSError("the log is full")

    with launch_run(Cluster.virtual(1), launcher="process", on_log=deaf) as session:
        group = session.start(Probe.group(device_kind="virtual"), "0")
        group.say("a line")
        with pytest.raises(WorkerFailed, match=r"driver.*OSError: the log is full"):
            group.sleep(60.0).result(DEADLINE_S)


def test_no_token_is_printed() -> None:
    assert "secret" not in repr(AgentAddress("host:1", "secret"))
    assert "secret" not in repr(AgentOptions("/run", "secret"))
