"""The agent of one node, without its transport: it starts ranks, passes calls on to them, and explains their ends."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._cause import exit_in_words
from m2flow.worker._wire import failure_report

RankKey = tuple[str, int]
Emit = Callable[[pb.SessionResponse], None]


class Ranks(Protocol):
    """What holds the ranks of a node: threads of this process, or processes.

    Whoever implements it reports by the `emit` that it was built with: `Started`, a failure, log lines, and `Stopped`
    with the exit code when a rank has ended, however it ended. A failure of no group says that all ranks have gone.
    """

    def start(self, order: pb.StartWorker) -> None:
        """Begins to start a rank. Does not block."""

    def ask(self, keys: Sequence[RankKey], request: pb.SessionRequest) -> None:
        """Passes a request on to ranks, whose answers are emitted. Does not block; a rank that has gone is no error."""

    def stop(self, key: RankKey, grace_s: float) -> None:
        """Asks a rank to end, and ends it after the grace. Does not block."""

    def kill(self, key: RankKey) -> None:
        """Kills a rank as an accident would; RefusedError where that cannot be."""

    def close(self) -> None:
        """Ends all ranks. Blocks until they have ended."""


class _Rank:
    """What the agent knows of a rank since its last start."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.stopping = False
        self.gone = False
        self.failed = False


class NodeAgent:
    """Serves one driver. `emit` may be called from any thread."""

    def __init__(self, make_ranks: Callable[[Emit], Ranks], emit: Emit) -> None:
        self._emit = emit
        self._mutex = threading.RLock()
        self._known: dict[RankKey, _Rank] = {}
        self._ranks = make_ranks(self._on_event)

    def handle(self, request: pb.SessionRequest) -> None:
        """Does what the driver says. Does not block."""
        kind = request.WhichOneof("kind")
        if kind == "start":
            with self._mutex:
                self._known[request.start.group, request.start.rank] = _Rank(request.start.attempt)
            self._ranks.start(request.start)
        elif kind == "stop":
            self._stop((request.stop.group, request.stop.rank), request.stop.grace_s)
        elif kind == "kill":
            self._ranks.kill((request.kill.group, request.kill.rank))
        else:
            self._ask(addressees(request), request)

    def close(self) -> None:
        """Ends all ranks. Blocks until they have ended."""
        with self._mutex:
            for rank in self._known.values():
                rank.stopping = True
        self._ranks.close()

    def _ask(self, keys: Sequence[RankKey], request: pb.SessionRequest) -> None:
        with self._mutex:
            # The driver hears of those that have died since by their own reports.
            there = [key for key in keys if key in self._known and not self._known[key].gone]
        self._ranks.ask(there, request)

    def _stop(self, key: RankKey, grace_s: float) -> None:
        with self._mutex:
            rank = self._known.get(key)
            there = rank is not None and not rank.gone
            if rank is not None:
                rank.stopping = True
            if not there:
                self._known.pop(key, None)
        # Whoever hears of it may hold a lock of its own, and have something to say meanwhile.
        if there:
            self._ranks.stop(key, grace_s)
        else:
            self._emit(pb.SessionResponse(stopped=pb.Stopped(group=key[0], rank=key[1])))

    def _on_event(self, event: pb.SessionResponse) -> None:
        kind = event.WhichOneof("kind")
        if kind == "stopped":
            self._ended((event.stopped.group, event.stopped.rank), event)
        elif kind == "failure" and not event.id:
            self._fail((event.failure.group, event.failure.rank), event)
        else:
            self._emit(event)

    def _fail(self, key: RankKey, event: pb.SessionResponse) -> None:
        with self._mutex:
            if not key[0]:
                for rank in self._known.values():
                    rank.gone = rank.failed = True
            elif (known := self._known.get(key)) is not None:
                if known.failed or known.stopping or known.attempt != event.failure.attempt:
                    return
                known.failed = True
        self._emit(event)

    def _ended(self, key: RankKey, event: pb.SessionResponse) -> None:
        with self._mutex:
            rank = self._known.get(key)
            if rank is None:
                return
            unasked = not rank.stopping and not rank.failed
        if unasked:
            # `Stopped` answers a stop; what nobody asked for is a failure. The driver knows the process and its phase.
            cause = exit_in_words(event.stopped.exit_code)
            self._emit(failure_report(*key, pid=0, phase="", cause=cause, attempt=rank.attempt))
        with self._mutex:
            # Only now: a stop that comes meanwhile is answered after that, when the driver forgets the rank.
            rank.gone = True
            if not rank.stopping:
                return
            del self._known[key]
        self._emit(event)


def addressees(request: pb.SessionRequest) -> list[RankKey]:
    """The ranks that a request is for themselves: a call, an attachment, a cancellation, addresses, a stop."""
    kind = request.WhichOneof("kind")
    if kind == "call":
        return [(request.call.group, rank) for rank in request.call.ranks]
    if kind == "attach":
        return [(request.attach.group, rank) for rank in request.attach.ranks]
    if kind == "peers":
        return [(request.peers.group, rank) for rank in request.peers.ranks]
    if kind == "cancel":
        return [(request.cancel.group, rank) for rank in request.cancel.ranks]
    if kind == "stop" and request.stop.grace_s > 0:
        return [(request.stop.group, request.stop.rank)]
    return []
