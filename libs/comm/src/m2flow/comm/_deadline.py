"""When a call has to be answered: one time for all that it waits for on the way."""

import threading
import time

from m2flow.comm.errors import TimeoutError_

# What poll and epoll take, 24 days: who waits for longer looks again then.
LONGEST_SLEEP_S = 2_147_000.0


class Deadline:
    """`timeout_s` seconds from now; None is no end, and more than a lock can wait for, 292 years, is cut to that."""

    __slots__ = ("_since", "_timeout_s")

    def __init__(self, timeout_s: float | None = None) -> None:
        self._since = time.monotonic()
        self._timeout_s = None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)

    def end(self) -> None:
        """Makes it now, for one who was cancelled; who waits has to be woken to see it."""
        self._timeout_s = 0.0

    def sooner(self, timeout_s: float | None) -> "Deadline":
        """Returns this one, or `timeout_s` seconds from now where that is sooner."""
        left_s = self.left_s
        return self if timeout_s is None or (left_s is not None and left_s <= timeout_s) else Deadline(timeout_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._since

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, none below zero."""
        return None if self._timeout_s is None else max(0.0, self._timeout_s - self.elapsed_s)

    def ended(self, error: BaseException) -> bool:
        """Says whether an error says that this is over: a program's own alarm may raise a TimeoutError at any time."""
        return isinstance(error, TimeoutError) and self.left_s == 0

    def timed_out(self, channel: str, peer: str, key: str | None = None) -> TimeoutError_:
        """Returns the error of a call on a channel, or of a service, that has waited for a peer since this began."""
        return TimeoutError_(channel=channel, key=key, peer=peer, elapsed_s=self.elapsed_s)
