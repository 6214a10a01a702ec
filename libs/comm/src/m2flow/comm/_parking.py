"""Requests that came before what they ask for: a run's processes start in any order, so these wait a while.

Runs on the io thread alone.
"""

from collections.abc import Callable

from m2flow.comm._loop import Loop, Timer

Retry = Callable[[], None]


class Parking:
    """Requests by the name of what they ask for, each with what to do when it arrives or does not."""

    def __init__(self, loop: Loop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._parked: dict[str, list[tuple[Retry, Timer]]] = {}

    def park(self, name: str, retry: Retry, refuse: Retry) -> None:
        """Keeps a request until `arrived(name)`, which retries it, or until its time is up, which refuses it."""
        timer = self._loop.call_later(self._timeout_s, lambda: self._expire(name, retry, refuse))
        self._parked.setdefault(name, []).append((retry, timer))

    def arrived(self, name: str) -> None:
        """Retries what waits for a name, in the order it came."""
        for retry, timer in self._parked.pop(name, []):
            timer.cancel()
            retry()

    def _expire(self, name: str, retry: Retry, refuse: Retry) -> None:
        waiting = [parked for parked in self._parked.pop(name, []) if parked[0] is not retry]
        if waiting:
            self._parked[name] = waiting
        refuse()
