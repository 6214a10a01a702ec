"""Requests that came before what they ask for: a run's processes start in any order, so these wait a while.

Runs as the io thread or in its place, one thread at a time.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from m2flow.comm._loop import Loop, Timer

Retry = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Parked:
    session: Hashable
    request: int
    retry: Retry
    withdraw: Retry
    timer: Timer


class Parking:
    """Requests by the name of what they ask for, each with what to do when it arrives or does not."""

    def __init__(self, loop: Loop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._parked: dict[str, list[_Parked]] = {}

    def park(self, name: str, session: Hashable, request: int, *, retry: Retry, expire: Retry, withdraw: Retry) -> None:
        """Keeps a request of a session until `arrived(name)`, which retries it.

        It expires when its time is up, and is withdrawn when it is cancelled or its session has ended.
        """

        def time_is_up() -> None:
            self._remove(name, parked)
            expire()

        parked = _Parked(session, request, retry, withdraw, self._loop.call_later(self._timeout_s, time_is_up))
        self._parked.setdefault(name, []).append(parked)

    def arrived(self, name: str) -> None:
        """Retries what waits for a name, in the order it came."""
        for parked in self._parked.pop(name, []):
            parked.timer.cancel()
            parked.retry()

    def cancel(self, session: Hashable, request: int) -> None:
        """Withdraws a request that waits."""
        for name, parked in self._of(session):
            if parked.request == request:
                self._remove(name, parked)
                parked.withdraw()

    def left(self, session: Hashable) -> list[str]:
        """Withdraws all requests of a session that has ended; returns the names that they asked for."""
        found = self._of(session)
        for name, parked in found:
            self._remove(name, parked)
            parked.withdraw()
        return list(dict.fromkeys(name for name, _ in found))

    def _of(self, session: Hashable) -> list[tuple[str, _Parked]]:
        return [(name, one) for name, waiting in self._parked.items() for one in waiting if one.session == session]

    def _remove(self, name: str, parked: _Parked) -> None:
        parked.timer.cancel()
        waiting = self._parked[name]
        waiting.remove(parked)
        if not waiting:
            del self._parked[name]
