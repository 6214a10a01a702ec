"""The device lock between processes: a server in the driver, clients in the workers.

A client that asks holds no thread of the server's: its answer comes when its turn does. A turn ends with its `with`,
or with the process that holds it, as soon as the operating system has closed that process's sockets.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from m2flow.comm import Endpoint, Request
from m2flow.worker.errors import LockTimeout
from m2flow.worker.lock import LockStats, LockTable, Ticket

SERVICE = "device_lock"


class LockServer:
    """Serves one lock table at an endpoint, for its whole life. Thread-safe."""

    def __init__(self, endpoint: Endpoint, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._table = LockTable()
        self._requests = itertools.count(1)
        self._numbers: dict[tuple[str, int], int] = {}
        self._waiting: dict[int, Future[Any]] = {}
        endpoint.handle(SERVICE, self._handle)
        endpoint.on_peer_lost(self.lose)

    def stats(self) -> LockStats:
        """Who holds and who waits, and for how long, now."""
        with self._mutex:
            return self._table.stats()

    def waits(self, now_s: float) -> list[str]:
        """Who waits for whom, a line each: a witness for the watchdog. `now_s` is on the server's clock."""
        stats = self.stats()
        return [
            f"{waiter.owner}: waits for devices {sorted(waiter.devices)} for {now_s - waiter.since_s:.0f} s, held by "
            + (", ".join(sorted({hold.owner for hold in stats.holds if hold.devices & waiter.devices})) or "nobody")
            for waiter in stats.waiters
        ]

    def lose(self, peer: str) -> None:
        """Ends all that a peer held or waited for: it is dead."""
        with self._mutex:
            self._numbers = {key: number for key, number in self._numbers.items() if key[0] != peer}
            granted = self._take(self._table.lose(peer, now_s=self._clock()))
        _grant(granted)

    def _handle(self, request: Request) -> Any:
        if request.method == "acquire":
            number, owner, devices, ticket = request.args
            return self._acquire(request.peer, number, owner, devices, tuple(ticket))
        if request.method == "release":
            return self._release(request.peer, request.args)
        if request.method == "holders":
            return [f"{hold.owner} ({hold.peer}) holds {sorted(hold.devices)}" for hold in self.stats().holds]
        raise ValueError(f"device lock: got method {request.method!r}, want acquire, release or holders")

    def _acquire(self, peer: str, number: int, owner: str, devices: Sequence[int], ticket: Ticket) -> "Future[Any]":
        answer: Future[Any] = Future()
        with self._mutex:
            request = next(self._requests)
            self._waiting[request] = answer
            try:
                granted = self._take(self._table.ask(request, owner, devices, ticket, peer=peer, now_s=self._clock()))
            except ValueError:
                del self._waiting[request]
                raise
            self._numbers[peer, number] = request
        _grant(granted)
        return answer

    def _release(self, peer: str, number: int) -> None:
        with self._mutex:
            request = self._numbers.pop((peer, number), None)
            if request is None:
                return
            given_up = self._waiting.pop(request, None)
            granted = self._take(self._table.release(request, now_s=self._clock()))
        if given_up is not None:
            given_up.set_result(False)
        _grant(granted)

    def _take(self, granted: Iterable[int]) -> list["Future[Any]"]:
        return [self._waiting.pop(request) for request in granted]


class DeviceLock:
    """A process's way to the lock that the endpoint `host` serves. Thread-safe."""

    _numbers = itertools.count(1)

    def __init__(self, endpoint: Endpoint, *, host: str = "driver") -> None:
        self._endpoint = endpoint
        self._host = host

    @contextmanager
    def turn(
        self, owner: str, devices: Sequence[int], ticket: Ticket, *, timeout_s: float | None = None
    ) -> Iterator[float]:
        """Holds all the devices for the unit `owner` within the `with`; gives the seconds that it waited.

        Blocks until the turn of `ticket`, (iteration, position in the plan's order), has come. A unit that holds them
        already, by another thread or rank, is let in at once. Raises LockTimeout, naming the holders, after
        `timeout_s`; ValueError, as a RemoteError, where the unit already has a turn on other devices.
        """
        number = next(self._numbers)
        start = time.monotonic()
        args = (number, owner, list(devices), list(ticket))
        asked = self._endpoint.request_async(self._host, SERVICE, "acquire", args)
        try:
            self._await(asked, owner, devices, timeout_s)
            yield time.monotonic() - start
        finally:
            self._endpoint.request_async(self._host, SERVICE, "release", number)

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


def _grant(answers: Iterable["Future[Any]"]) -> None:
    for answer in answers:
        answer.set_result(True)
