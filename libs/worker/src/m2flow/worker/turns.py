"""The device lock between processes: a server in the driver, clients in the workers.

A client that asks holds no thread of the server's: its answer comes when its turn does. A unit whose turn is over keeps
the devices, and takes its next turn without a message, until the server recalls them because another unit waits: the
answer to that is their release. What a process holds ends with it, as soon as the operating system has closed its
sockets.
"""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from m2flow.comm import Endpoint, PeerLostError, Request
from m2flow.worker.errors import LockTimeout
from m2flow.worker.lock import LockStats, LockTable, Ticket

SERVICE = "device_lock"
RECALL = "device_lock.recall"


class LockServer:
    """Serves one lock table at an endpoint, for its whole life. Thread-safe."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._mutex = threading.Lock()
        self._table = LockTable()
        self._requests = itertools.count(1)
        # The requests in the table: who made them, under which number of its own.
        self._asked: dict[int, tuple[str, int]] = {}
        self._waiting: dict[int, Future[Any]] = {}
        self._recalled: set[int] = set()
        endpoint.handle(SERVICE, self._handle, prompt=True)
        endpoint.on_peer_lost(self.lose)

    def stats(self) -> LockStats:
        """Who holds and who waits, and for how long, now."""
        with self._mutex:
            return self._table.stats()

    def waits(self, now_s: float) -> list[str]:
        """Who waits for whom, a line each: a witness for the watchdog. `now_s` is by `time.monotonic`."""
        stats = self.stats()
        return [
            f"{waiter.owner}: waits for devices {sorted(waiter.devices)} for {now_s - waiter.since_s:.0f} s, held by "
            + (", ".join(sorted({hold.owner for hold in stats.holds if hold.devices & waiter.devices})) or "nobody")
            for waiter in stats.waiters
        ]

    def lose(self, peer: str) -> None:
        """Ends all that a peer held or waited for: it is dead."""
        with self._mutex:
            for request in [request for request, (who, _) in self._asked.items() if who == peer]:
                self._forget(request)
            granted = self._take(self._table.lose(peer, now_s=time.monotonic()))
        self._tell(granted)

    def _handle(self, request: Request) -> Any:
        if request.method == "acquire":
            number, owner, devices, ticket = request.args
            return self._acquire(request.peer, number, owner, devices, tuple(ticket))
        if request.method == "release":
            return self._release((request.peer, request.args))
        if request.method == "holders":
            return [f"{hold.owner} ({hold.peer}) holds {sorted(hold.devices)}" for hold in self.stats().holds]
        raise ValueError(f"device lock: got method {request.method!r}, want acquire, release or holders")

    def _acquire(self, peer: str, number: int, owner: str, devices: Sequence[int], ticket: Ticket) -> "Future[Any]":
        answer: Future[Any] = Future()
        with self._mutex:
            request = next(self._requests)
            granted = self._table.ask(request, owner, devices, ticket, peer=peer, now_s=time.monotonic())
            self._asked[request], self._waiting[request] = (peer, number), answer
            answers = self._take(granted)
        self._tell(answers)
        return answer

    def _release(self, asked: tuple[str, int]) -> None:
        with self._mutex:
            request = next((request for request, by in self._asked.items() if by == asked), None)
            if request is None:
                return
            given_up = self._forget(request)
            granted = self._take(self._table.release(request, now_s=time.monotonic()))
        if given_up is not None:
            given_up.set_result(False)
        self._tell(granted)

    def _forget(self, request: int) -> "Future[Any] | None":
        """Drops a request that is over; returns the answer that it still waits for."""
        del self._asked[request]
        self._recalled.discard(request)
        return self._waiting.pop(request, None)

    def _take(self, granted: Iterable[int]) -> list["Future[Any]"]:
        return [self._waiting.pop(request) for request in granted]

    def _tell(self, granted: Iterable["Future[Any]"]) -> None:
        """Answers those whose turn has come, then recalls what others wait for."""
        for answer in granted:
            answer.set_result(True)
        with self._mutex:
            wanted = self._table.in_the_way() - self._recalled
            self._recalled |= wanted
            asked = [self._asked[request] for request in sorted(wanted)]
        for peer, number in asked:
            recall = self._endpoint.request_async(peer, RECALL, "recall", number)
            recall.add_done_callback(partial(self._on_recalled, peer, number))

    def _on_recalled(self, peer: str, number: int, done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            self._release((peer, number))
        elif isinstance(error, PeerLostError):
            self.lose(peer)
        else:
            self._refuse((peer, number), error)

    def _refuse(self, asked: tuple[str, int], error: BaseException) -> None:
        """Fails those who wait for devices whose holder cannot give them back: they would wait for ever."""
        with self._mutex:
            stats, now_s = self._table.stats(), time.monotonic()
            hold = next((hold for hold in stats.holds if self._asked[hold.request] == asked), None)
            if hold is None:
                return
            self._recalled.discard(hold.request)
            granted, refused = [], []
            for waiter in stats.waiters:
                if waiter.devices & hold.devices:
                    refused.append((waiter, self._forget(waiter.request)))
                    granted += self._table.release(waiter.request, now_s=now_s)
            answers = self._take(granted)
        for waiter, answer in refused:
            assert answer is not None
            where = f"devices {sorted(waiter.devices)}, which {hold.owner} does not give back"
            answer.set_exception(RuntimeError(f"device lock: {waiter.owner} waits for {where}: {error}"))
        self._tell(answers)


@dataclass(eq=False)
class _Turn:
    """What the server knows by a number. One that is not in use is kept; `recall` is answered when it is given back."""

    number: int
    owner: str
    devices: tuple[int, ...]
    in_use: bool = True
    recall: "Future[None] | None" = None


class DeviceLock:
    """A process's way to the lock that the endpoint `host` serves: one for each endpoint. Thread-safe.

    Close it before the endpoint: else what it keeps is free only once a recall has found nobody.
    """

    def __init__(self, endpoint: Endpoint, *, host: str = "driver") -> None:
        self._endpoint = endpoint
        self._host = host
        self._mutex = threading.Lock()
        self._numbers = itertools.count(1)
        self._turns: dict[int, _Turn] = {}
        self._closed = False
        endpoint.handle(RECALL, self._on_recall, prompt=True)

    @contextmanager
    def turn(
        self, owner: str, devices: Sequence[int], ticket: Ticket, *, timeout_s: float | None = None
    ) -> Iterator[float]:
        """Holds all the devices for the unit `owner` within the `with`; gives the seconds that it waited.

        Blocks until the turn of `ticket`, (iteration, position in the plan's order), has come. A unit that holds them
        already, by another thread or rank or because nobody has asked for them since, is let in at once. Raises
        LockTimeout, naming the holders, after `timeout_s`; ValueError, as a RemoteError, where the unit already has a
        turn on other devices.
        """
        start = time.monotonic()
        turn = self._kept(owner, tuple(devices)) or self._granted(owner, tuple(devices), ticket, timeout_s)
        try:
            yield time.monotonic() - start
        finally:
            self._end(turn)

    def close(self) -> None:
        """Gives back what is kept, and keeps nothing from now on. Does not block."""
        with self._mutex:
            self._closed = True
            kept = [turn for turn in self._turns.values() if not turn.in_use]
            for turn in kept:
                turn.in_use = True
        for turn in kept:
            self._give_back(turn)

    def _kept(self, owner: str, devices: tuple[int, ...]) -> _Turn | None:
        """Takes up the turn that a unit keeps, if these are its devices; gives it back if they are not."""
        with self._mutex:
            turn = next((turn for turn in self._turns.values() if turn.owner == owner and not turn.in_use), None)
            if turn is None:
                return None
            turn.in_use = True
        if turn.devices == devices:
            return turn
        self._give_back(turn)
        return None

    def _granted(self, owner: str, devices: tuple[int, ...], ticket: Ticket, timeout_s: float | None) -> _Turn:
        turn = _Turn(next(self._numbers), owner, devices)
        with self._mutex:
            # It may be recalled as soon as it is granted, before the thread that waits has heard of either.
            self._turns[turn.number] = turn
        try:
            args = (turn.number, owner, list(devices), list(ticket))
            self._await(self._endpoint.request_async(self._host, SERVICE, "acquire", args), owner, devices, timeout_s)
        except BaseException:
            self._give_back(turn)
            raise
        return turn

    def _end(self, turn: _Turn) -> None:
        """Keeps a turn that is over, unless it was recalled or its unit keeps another."""
        with self._mutex:
            others = any(other.owner == turn.owner and not other.in_use for other in self._turns.values())
            kept = turn.recall is None and not others and not self._closed
            turn.in_use = not kept
        # Not by `in_use`: another thread may have taken up by now what was kept.
        if not kept:
            self._give_back(turn)

    def _give_back(self, turn: _Turn) -> None:
        with self._mutex:
            del self._turns[turn.number]
        if turn.recall is not None:
            turn.recall.set_result(None)
        else:
            self._endpoint.request_async(self._host, SERVICE, "release", turn.number)

    def _on_recall(self, request: Request) -> "Future[None] | None":
        """Gives back at once what is kept, what is in use when its turn ends."""
        with self._mutex:
            turn = self._turns.get(request.args)
            if turn is not None and turn.in_use:
                turn.recall = Future()
                return turn.recall
            if turn is not None:
                del self._turns[turn.number]
        return None

    def _await(self, asked: "Future[Any]", owner: str, devices: Sequence[int], timeout_s: float | None) -> None:
        try:
            asked.result(timeout_s)
        except TimeoutError as late:
            if asked.done():
                raise
            holders = self._endpoint.request(self._host, SERVICE, "holders", timeout_s=10.0)
            raise LockTimeout(
                f"device lock: {owner} waited {timeout_s} s for devices {sorted(devices)}; {'; '.join(holders)}"
            ) from late
