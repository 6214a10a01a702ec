"""A link between two endpoints of one process: who sends a frame deals with it, in the receiving endpoint's place.

So no thread is woken for what is answered at once, and otherwise only the one that waits for it.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial

from m2flow.comm._deadline import Deadline
from m2flow.comm._frames import MAX_HELLO_BYTES, Kind
from m2flow.comm._loop import Loop
from m2flow.comm._replies import Awaited, nothing
from m2flow.comm.errors import CommError

# What a frame that waits costs beside its body.
_FRAME_BYTES = 512
# How often who waits for the other end looks again.
_LOOK_S = 0.001

OnFrame = Callable[[Kind, int, bytes, int | None], object]
OnClosed = Callable[[str], None]


class LocalLink:
    """One end; `on_frame` and `on_closed` run in the place of the endpoint's io thread, `on_closed` once."""

    passes_fds = True

    def __init__(self, loop: Loop, *, on_frame: OnFrame, on_closed: OnClosed) -> None:
        self._loop = loop
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._other: LocalLink | None = None
        # Of the frames that have come to this end and wait for who is at work.
        self._waiting_bytes = 0
        self._num_dealt = 0
        # A Condition would stay locked after a KeyboardInterrupt in its own code.
        self._counting = threading.Lock()
        self.body_limit = MAX_HELLO_BYTES

    def join(self, other: "LocalLink") -> None:
        """Makes two links the ends of one."""
        self._other, other._other = other, self

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the other end has yet to deal with."""
        other = self._other
        return 0 if other is None else other._waiting_bytes

    @property
    def num_taken(self) -> int:
        """How many frames the other end has dealt with."""
        other = self._other
        return 0 if other is None else other._num_dealt

    def send(self, kind: Kind, request_id: int, body: bytes | memoryview, fd: int | None = None) -> None:
        """Brings a frame to the other end; a descriptor stays the caller's. Raises BrokenPipeError once closed.

        Blocks for what the other end does with it, which never waits, unless another thread is to do that.
        """
        other = self._other
        if other is None:
            raise BrokenPipeError("the link is closed")
        copied = bytes(body), None if fd is None else os.dup(fd)
        # A descriptor is sent under the connection's lock, which what else there is to deal with may want.
        brought = other._loop.work if fd is None else other._loop.call
        brought(partial(other._deal_with, kind, request_id, *copied))
        other._count(_FRAME_BYTES + len(body))

    def _count(self, size_bytes: int) -> None:
        with self._counting:
            self._waiting_bytes += size_bytes

    def _deal_with(self, kind: Kind, request_id: int, body: bytes, fd: int | None) -> None:
        try:
            self._on_frame(kind, request_id, body, fd)
        except CommError as error:
            self.fail(str(error))
        self._num_dealt += 1
        # Counted down before its sender has counted it, where that one is at work: the sum is right.
        self._count(-_FRAME_BYTES - len(body))

    def wait_sent(self, timeout_s: float | None, at_most_bytes: int) -> bool:
        """Waits until the other end has dealt with all but so many bytes; says whether it did in time."""
        deadline = Deadline(timeout_s)
        while self.unsent_bytes > at_most_bytes:
            if deadline.left_s == 0:
                return False
            time.sleep(_LOOK_S)
        return True

    def read_until(self, awaited: Awaited, timeout_s: float | None, ask: Callable[[], None] = nothing) -> None:
        """Calls `ask`; nothing is read: who answers brings it."""
        ask()

    def interrupt(self, awaited: Awaited) -> None:
        """No thread reads."""

    def close(self) -> None:
        """Closes both ends; `on_closed` is called at the other."""
        other, self._other = self._other, None
        # The callbacks lead to the connection, which leads here: without them nothing waits for the cycle collector.
        self._on_frame, self._on_closed = _no_frame, _no_close
        if other is not None:
            other._loop.work(partial(other.fail, "the other end was closed"))

    def fail(self, reason: str) -> None:
        """Closes both ends and reports it."""
        on_closed = self._on_closed
        self.close()
        on_closed(reason)

    def abandon(self) -> None:
        """There is nothing to close in a forked child."""


def _no_frame(kind: Kind, request_id: int, body: bytes, fd: int | None) -> None:
    """A closed link has no frames."""
    if fd is not None:
        os.close(fd)


def _no_close(reason: str) -> None:
    """A closed link does not close again."""
