"""What the driver says, in which order, of ranks that die, and what it waits for then; the other end is this test."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m2flow.comm import Endpoint, encode
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker import Cluster, Session, WorkerFailed, WorkerGroup
from m2flow.worker._wire import failure_report
from m2flow.worker.testing.probe import DropProbe, Probe, RetryProbe
from m2flow.worker.wiring import Wiring


class Far:
    """The far end of the only link: it starts ranks at once, and says nothing else by itself."""

    lost = False
    host = ""

    def __init__(self, wiring: Wiring) -> None:
        self.hear = wiring.on_response
        self.meanwhile: Callable[[], object] = lambda: None
        self.told: list[str | None] = []

    def send(self, request: pb.SessionRequest) -> None:
        if not request.HasField("start"):
            self.meanwhile()
        self.told.append(request.WhichOneof("kind"))
        if request.HasField("start"):
            order = request.start
            started = pb.Started(pid=1, group=order.group, rank=order.rank, attempt=order.attempt)
            self.hear(pb.SessionResponse(started=started))

    def close(self) -> None:
        pass

    def die(self, rank: int = 0) -> None:
        self.hear(failure_report("probe", rank, pid=1, phase="", cause="SIGKILL"))

    def stopped(self, rank: int = 0) -> None:
        self.hear(pb.SessionResponse(stopped=pb.Stopped(group="probe", rank=rank)))

    def answer(self, call_id: int, rank: int) -> None:
        result = pb.CallResult(call_id=call_id, rank=rank, value=encode(None).to_bytes())
        self.hear(pb.SessionResponse(results=pb.CallResults(results=[result])))


class Run:
    """A session, its far end, and what had been told to that when the log was."""

    def __init__(self, directory: Path) -> None:
        self.logged: list[list[str | None]] = []
        self.session = Session(
            Cluster.virtual(1),
            Endpoint(directory, "driver", token="t"),
            directory,
            directory=directory,
            token="t",
            preload=(),
            connect=self._connect,
            on_log=lambda *_: self.logged.append(list(self.far.told)),
            max_restarts=3,
            silence_s=60.0,
            start_timeout_s=10.0,
            say=lambda _: None,
        )

    def _connect(self, wiring: Wiring) -> dict[str, Far]:
        self.far = Far(wiring)
        return {"node0": self.far}

    def start(self, worker: type[Probe], placement: str = "0") -> WorkerGroup:
        return self.session.start(worker.group(name="probe", device_kind="virtual"), placement)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.session.close(grace_s=-2.0)  # Nobody is there to wait for.


def test_a_rank_that_is_to_come_again_is_stopped_before_anyone_hears_of_it(run: Run) -> None:
    """Who hears of it may take long, and stop the group and start another of its name: that one was stopped then."""
    run.start(RetryProbe)
    run.far.die()
    assert run.logged == [["start", "stop"]]


def test_a_rank_that_ends_to_come_again_is_not_stopped_twice(run: Run) -> None:
    """The second answer was taken for one of the group that bore its name by then: nobody waited for that one's end."""
    group = run.start(RetryProbe)
    run.far.die()
    stopping = threading.Thread(target=run.session.stop, args=(group,), daemon=True)
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive()
    run.far.stopped()
    stopping.join(10)
    assert not stopping.is_alive()
    assert run.far.told == ["start", "stop"]


def test_a_rank_that_comes_again_is_stopped_as_any_other(run: Run) -> None:
    """Also where it is not there yet."""
    group = run.start(RetryProbe)
    run.far.die()
    run.far.stopped()
    run.session.stop(group, grace_s=-2.0)
    assert run.far.told == ["start", "stop", "start", "stop"]


@pytest.mark.parametrize("kind", ["call", "attach"])
def test_a_rank_that_comes_again_while_it_is_asked_is_asked_once(run: Run, kind: str) -> None:
    """It was asked in the middle of its setup, where it knew no attached object yet, and was deaf from then on."""
    group = run.start(RetryProbe)

    def comes_again() -> None:
        run.far.die()
        run.far.stopped()

    coming = threading.Thread(target=comes_again, daemon=True)

    def begin() -> None:
        run.far.meanwhile = lambda: None
        coming.start()
        coming.join(0.1)

    run.far.meanwhile = begin
    if kind == "call":
        group.echo(1)
    else:
        group.attach("beside", "m2flow.worker.testing:Companion", "hello")
    coming.join(10)
    assert run.far.told == ["start", kind, "stop", "start", kind]


def test_who_answers_a_call_that_another_dropped_is_not_said_to_be_in_it(run: Run) -> None:
    """For the rest of the run, by the watchdog and as the phase of its next failure."""
    group = run.start(DropProbe, "0*2")
    handle = group.echo(1)
    run.far.die(rank=0)
    with pytest.raises(WorkerFailed):
        handle.result(10)
    assert len(run.session._waits(time.monotonic())) == 1
    [(call_id, _)] = run.session._ranks["probe", 1].unanswered.items()
    run.far.answer(call_id, rank=1)
    assert run.session._waits(time.monotonic()) == []
