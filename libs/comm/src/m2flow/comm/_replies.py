"""What comes over a link, and how a thread waits for it: it reads the link meanwhile, as no other thread is quicker."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

from m2flow.comm._deadline import Deadline
from m2flow.comm._loop import reraise_interrupt

_log = logging.getLogger("m2flow.comm")
_T = TypeVar("_T")
# A Future's states before it is done.
_UNDER_WAY = "PENDING", "RUNNING"


def nothing() -> None:
    """Does nothing: what was asked already is not asked again, and nobody waits to hear of an end."""


class Awaited(Protocol):
    """What a thread may wait for."""

    def done(self) -> bool: ...


class Readable(Protocol):
    """A link that the waiting thread reads."""

    def read_until(self, awaited: Awaited, timeout_s: float | None, ask: Callable[[], None] = nothing) -> None: ...
    def interrupt(self, awaited: Awaited) -> None: ...


class Reply:
    """The body of a request's answer, once it is there, or what went wrong instead.

    There is one for every message, so it is less than a Future: it takes no lock, and whoever waits brings one. The
    request goes out by `ask` or when its reply is first waited for: an answer that comes at once then finds its reader.
    """

    __slots__ = ("_ask", "_body", "_callbacks", "_done", "_error", "_link")

    def __init__(self, link: Readable, ask: Callable[[], None] = nothing) -> None:
        self._link = link
        self._ask = ask
        self._body = b""
        self._error: Exception | None = None
        self._done = False
        self._callbacks: list[Callable[[Reply], None]] = []

    def done(self) -> bool:
        """Says whether `result` returns, or raises, at once."""
        return self._done

    def ask(self) -> None:
        """Sends the request now; afterwards, and where the reply is there already, nothing."""
        ask, self._ask = self._ask, nothing
        if not self._done:
            ask()

    def resolve(self, body: bytes, error: Exception | None = None) -> None:
        """Ends the wait; a callback runs here or where it is added, once."""
        self._body, self._error, self._done = body, error, True
        if self._callbacks:
            self._call_back()

    def add_done_callback(self, callback: "Callable[[Reply], None]") -> None:
        """Calls `callback(self)` when this is done: on the thread that reads, or at once."""
        self._callbacks.append(callback)
        if self._done:
            self._call_back()

    def result(self, timeout_s: float | None = None) -> bytes:
        """Blocks for the body; raises what went wrong, or TimeoutError."""
        if not self._done:
            since = time.monotonic()
            ask, self._ask = self._ask, nothing
            self._link.read_until(self, timeout_s, ask)
            if not self._done:
                # Another thread reads the link, or nobody may yet.
                self._wait(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - since)))
        if self._error is not None:
            raise self._error
        return self._body

    def error(self) -> Exception | None:
        """Returns what went wrong, if anything did; of one that is done."""
        return self._error

    def _wait(self, timeout_s: float | None) -> None:
        woken = threading.Lock()
        woken.acquire()
        self.add_done_callback(lambda _: woken.release())
        if not woken.acquire(timeout=-1.0 if timeout_s is None else timeout_s) and not self._done:
            raise TimeoutError

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                # Another thread, adding a callback at this very moment, has called the last one.
                return
            callback(self)


class Answer(Future[_T]):
    """A future that comes over a link, for callers who want one: it may be cancelled, and resolved by any thread."""

    link: Readable | None = None
    _has_waited = False

    def done(self) -> bool:
        """Like Future's, without its lock."""
        return self._state not in _UNDER_WAY

    def add_done_callback(self, fn: "Callable[[Future[_T]], object]") -> None:
        """Like Future's; what else than an Exception a callback raises is logged too, and ends no io thread."""
        super().add_done_callback(partial(_call, fn))

    def result(self, timeout: float | None = None) -> _T:
        """Like Future's."""
        return super().result(self._read(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Like Future's."""
        return super().exception(self._read(timeout))

    def _read(self, timeout: float | None) -> float | None:
        """Reads the link until this is done or the time is over; returns the time left."""
        deadline = Deadline(timeout)
        if self.link is not None and not self.done():
            if not self._has_waited:
                self._has_waited = True
                super().add_done_callback(self.link.interrupt)
            self.link.read_until(self, deadline.left_s)
        return deadline.left_s


def _call(callback: "Callable[[Future[_T]], object]", done: "Future[_T]") -> None:
    try:
        callback(done)
    except BaseException as error:
        _log.exception("m2flow.comm: the callback of a future failed")
        reraise_interrupt(error)
