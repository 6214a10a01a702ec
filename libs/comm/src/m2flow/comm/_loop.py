"""The one io thread of an endpoint: sockets, timers and short calls, never a wait of its own.

It sleeps in epoll until the kernel, a timer or another thread has something for it. Another thread may do by itself
what it asks for, in the io thread's place while that one sleeps: only one of them is at work, and no other for long.
"""

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from m2flow.comm._deadline import LONGEST_SLEEP_S

_log = logging.getLogger("m2flow.comm")

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
# How many calls are made before sockets and timers are looked at, or a thread that stands in goes its way.
_MAX_CALLS = 64


class Timer:
    """A call that is due later, unless cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Withdraws the call; harmless when it has been made."""
        self.call = None


class _Event:
    """The descriptor that ends the io thread's sleep, closed by whoever refers to it last."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Loop:
    """Runs callbacks on one daemon thread. `call`, `call_later` and `wake` may be used from any thread."""

    def __init__(self, name: str, *, before_sleep: Callable[[], None]) -> None:
        self._epoll = select.epoll()
        # None once the thread has ended; who is about to write to it keeps it.
        self._event: _Event | None = _Event(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._epoll.register(self._event.fd, READ)
        self._ready: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._before_sleep = before_sleep
        # Threads that deal with what they have read while they wait; each adds and discards itself.
        self.readers: set[int] = set()
        # Held by the one thread that is at work here, named beside it.
        self._working = threading.Lock()
        self._worker = 0
        self._awake = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"m2flow-comm {name}", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def inside(self) -> bool:
        """Says whether the caller deals with frames, as the io thread or in its place: then it must never wait."""
        thread = threading.get_ident()
        return self._worker == thread or thread in self.readers

    def works(self) -> bool:
        """Says whether the caller is at work here, as the io thread or in its place: what it calls runs at once."""
        return self._worker == threading.get_ident()

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None:
        """Calls `ready(events)` as the io thread whenever the descriptor is readable or writable, as asked from now on.

        No events: not until it is asked for again, but once for what the kernel tells unasked, the other end's death.
        Any thread may call it, one at a time for each descriptor.
        """
        known = fd in self._ready
        self._ready[fd] = ready
        # To modify costs the kernel half of what it costs to forget and to register anew.
        (self._epoll.modify if known else self._epoll.register)(fd, events or select.EPOLLET)

    def remove(self, fd: int) -> None:
        """Forgets a descriptor; to be called before it is closed."""
        if self._ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function as the io thread or in its place, after those already asked for."""
        self._calls.append(function)
        self.wake()

    def work(self, function: Callable[[], None]) -> None:
        """Runs a function like `call`, on this thread unless another is at work: then that one runs it, soon.

        Never on the main thread: KeyboardInterrupt may end there what it does, at any place.
        """
        self._calls.append(function)
        if threading.current_thread() is not threading.main_thread() or not self.wake():
            self._work()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Runs a function as the io thread once `delay_s` seconds have passed."""
        timer = Timer(function)
        due = time.monotonic() + delay_s
        self.call(lambda: heapq.heappush(self._timers, (due, next(self._order), timer)))
        return timer

    def wake(self) -> bool:
        """Ends the io thread's sleep; says whether the thread is there to look at what was asked for.

        A finaliser may call it, also as the process ends: no lock is taken, which a thread that is gone might hold.
        """
        event = self._event
        if event is not None and not self._awake:
            try:
                self._awake = True
                os.eventfd_write(event.fd, 1)
            except BaseException:
                # A KeyboardInterrupt: the next one writes.
                self._awake = False
                raise
        return self._event is not None

    def stop(self) -> None:
        """Ends the thread after the calls already asked for. Blocks until then."""
        self.call(self._stop)
        if not self.works():
            self._thread.join()

    def abandon(self) -> None:
        """Closes the descriptors in a forked child, where the thread does not exist."""
        self._stopping = True
        self._epoll.close()
        self._event = None

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        sleep_s: float | None = 0.0
        while not self._stopping:
            events = self._epoll.poll(sleep_s)
            with self._working:
                self._worker = threading.get_ident()
                self._deal_with(events)
                self._run_calls()
                self._guard(self._before_sleep)
                sleep_s = self._sleep_s()
                self._worker = 0
            self._work()
        self._event = None
        self._epoll.close()
        # What was asked for leads back to the endpoint, and may hold much.
        self._before_sleep = _nothing
        self._ready.clear()
        while self._calls:
            self._work()
        self._timers.clear()

    def _deal_with(self, found: list[tuple[int, int]]) -> None:
        assert self._event is not None
        wakes = self._event.fd
        for fd, events in found:
            if fd == wakes:
                os.eventfd_read(fd)
            elif (ready := self._ready.get(fd)) is not None:
                self._guard(ready, events)
            ready = None
        self._awake = False
        if self._timers:
            self._run_due()

    def _work(self) -> None:
        """Runs what was asked for. Who finds another at work leaves it to that one, who looks again when it is done."""
        if self._calls and self._working.acquire(blocking=False):
            try:
                self._worker = threading.get_ident()
                self._run_calls()
            finally:
                self._worker = 0
                self._working.release()
            if self._calls:
                # The rest is the io thread's: others may ask for more without end.
                self.wake()

    def _run_calls(self) -> None:
        for _ in range(_MAX_CALLS):
            if not self._calls:
                return
            self._guard(self._calls.popleft())

    def _sleep_s(self) -> float | None:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return min(max(0.0, self._timers[0][0] - time.monotonic()), LONGEST_SLEEP_S)

    def _run_due(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                self._guard(timer.call)

    def _guard(self, call: Callable[..., None], *arguments: int) -> None:
        try:
            call(*arguments)
        except BaseException as error:
            # Our own defect: other connections must not stop for it, and nobody may miss it.
            _log.exception("m2flow.comm: an io callback failed")
            reraise_interrupt(error)


def reraise_interrupt(error: BaseException) -> None:
    """Raises a KeyboardInterrupt of the user's again, which only the main thread gets; all else was raised by code."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


def _nothing() -> None:
    """What a loop that has ended still does."""
