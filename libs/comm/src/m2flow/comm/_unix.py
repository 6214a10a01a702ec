"""A link over a Unix socket: frames in order both ways, descriptors beside them.

Any thread may send: it writes at once what the socket takes, and leaves the rest to the io thread. And a thread that
waits for an answer reads the socket itself meanwhile, so that no other thread stands between the wire and it; what it
reads that is not for a waiting thread, it leaves to the io thread, in order. Nothing is written with a signal: SIGPIPE
at its default, as shells want it, would end the process at a peer's death.
"""

import array
import contextlib
import errno
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from m2flow.comm._deadline import LONGEST_SLEEP_S
from m2flow.comm._frames import MAX_HELLO_BYTES, Kind, header
from m2flow.comm._loop import READ, WRITE, Loop
from m2flow.comm._receiver import Receiver
from m2flow.comm._replies import Awaited, nothing
from m2flow.comm.errors import CommError

_MAX_BATCH = 64

_Frame = tuple[Kind, int, bytes, int | None]
OnFrame = Callable[[Kind, int, bytes, int | None], object]
# The same on a thread that waits: says whether it has dealt with the frame.
TakeFrame = Callable[[Kind, int, bytes, int | None], bool]
# What became of the peer, or the error of this end.
OnClosed = Callable[[str | CommError], None]


class UnixLink:
    """One end of a connected Unix socket. `on_frame` and `on_closed` run on the io thread, `on_closed` once.

    `take` is offered each frame first that a waiting thread has read.
    """

    passes_fds = True

    def __init__(self, loop: Loop, *, on_frame: OnFrame, take: TakeFrame, on_closed: OnClosed) -> None:
        self._loop = loop
        self._on_frame = on_frame
        self._take = take
        self._on_closed = on_closed
        self._socket: socket.socket | None = None
        self._watched = 0
        self._closed = False
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self.unsent_bytes = self.num_taken = 0
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._num_waiting = 0
        self._receiver = Receiver()
        # Held by the one thread that reads, which alone can let go of it.
        self._reading = threading.RLock()
        # What a waiting thread read and the io thread has yet to deal with; a reason stands for the end.
        self._left: deque[_Frame | str] = deque()
        self._waiting: Awaited | None = None
        self._waiting_thread = 0
        # The one that waits, while it deals with what it has read.
        self._dealing_thread = 0
        self._poll: select.poll | None = None
        self._wake = -1
        self.body_limit = MAX_HELLO_BYTES

    def attach(self, connected: socket.socket) -> None:
        """Takes a connected socket; what was sent before goes out first."""
        connected.setblocking(False)
        with self._lock:
            if self._closed:
                connected.close()
                return
            self._socket = connected
            self._flush(connected)
            self._watch()

    # Sending.

    def send(self, kind: Kind, request_id: int, body: bytes | memoryview, fd: int | None = None) -> None:
        """Sends a frame; a descriptor travels with its first byte and stays the caller's.

        Does not wait: what the socket does not take now is kept. Raises BrokenPipeError once closed.
        """
        data = header(kind, request_id, len(body)) + bytes(body)
        with self._lock:
            if self._closed:
                raise BrokenPipeError("the link is closed")
            was_idle = not self._out and self._socket is not None
            # A thread that deals with a frame while it waits first gets on with its own.
            writes = was_idle and self._dealing_thread != threading.get_ident()
            if writes and fd is None:
                assert self._socket is not None
                try:
                    sent = self._socket.send(data, socket.MSG_NOSIGNAL)
                except OSError:
                    # Full, or dead: what deals with the rest will find out.
                    sent = 0
                if sent == len(data):
                    return
                data = data[sent:]
            self._out.append((memoryview(data), None if fd is None else os.dup(fd)))
            self.unsent_bytes += len(data)
            if writes:
                assert self._socket is not None
                self._flush(self._socket)
                self._watch()

    def wait_sent(self, timeout_s: float | None, at_most_bytes: int) -> bool:
        """Waits until the socket has taken all but so many bytes of what was sent; says whether it did in time."""
        with self._lock:
            self._num_waiting += 1
            try:
                return self._drained.wait_for(lambda: self.unsent_bytes <= at_most_bytes or self._closed, timeout_s)
            finally:
                self._num_waiting -= 1

    # Ending.

    def close(self) -> None:
        """Closes the socket after a last attempt to send what waits, on the io thread. `on_closed` is not called."""
        with self._lock:
            if self._closed:
                return
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._flush(self._socket)
            self._shut()

    def fail(self, reason: str | CommError) -> None:
        """Closes the socket and reports why, on the io thread."""
        with self._lock:
            if self._closed:
                return
            on_closed = self._on_closed
            self._shut()
        on_closed(reason)

    def abandon(self) -> None:
        """Closes this process's copy of the socket, in a forked child, where no lock can be trusted."""
        self._closed = True
        if self._socket is not None:
            self._socket.close()
        if self._wake >= 0:
            os.close(self._wake)

    def _shut(self) -> None:
        self._closed = True
        if self._socket is not None:
            self._loop.remove(self._socket.fileno())
            if self._waiting is None:
                self._free()
            else:
                # A waiting thread sleeps on these descriptors: it closes them when it has woken.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                os.eventfd_write(self._wake, 1)
        self._discard()
        # The callbacks lead to the connection, which leads here: without them nothing waits for the cycle collector.
        self._on_frame, self._take, self._on_closed = _no_frame, _no_frame, _no_close
        self._left.clear()

    def _free(self) -> None:
        assert self._socket is not None
        self._socket.close()
        self._receiver.close()
        if self._wake >= 0:
            os.close(self._wake)

    # Writing.

    def _watch(self) -> None:
        """Asks the loop for what is wanted now; nobody watches for bytes that a waiting thread reads."""
        if self._closed or self._socket is None:
            return
        wanted = (0 if self._waiting is not None else READ) | (WRITE if self._out else 0)
        if wanted != self._watched:
            # A KeyboardInterrupt may come here: what is not known to be asked is asked again.
            self._watched = -1
            self._loop.watch(self._socket.fileno(), wanted, self._ready)
            self._watched = wanted

    def _flush(self, connected: socket.socket) -> None:
        """Writes until the socket is full. A dead socket is left for the reader to find: it closes the link, once."""
        while self._out:
            batch, fd = self._next_batch()
            ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            try:
                self._taken(connected.sendmsg(batch, ancillary, socket.MSG_NOSIGNAL))
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    # As many descriptors are under way as the kernel allows: the receiver has yet to take them.
                    self._loop.call_later(0.01, lambda: self._ready(WRITE))
                else:
                    self._discard()
                return
            except BaseException:
                # A KeyboardInterrupt: nobody knows what has gone out, and the other end may not get it twice.
                connected.shutdown(socket.SHUT_RDWR)
                raise
        if self._num_waiting:
            self._drained.notify_all()

    def _next_batch(self) -> tuple[list[memoryview], int | None]:
        """Returns what one system call may send: a descriptor goes with the first byte of its own frame."""
        first, fd = self._out[0]
        batch = [first]
        for data, next_fd in itertools.islice(self._out, 1, _MAX_BATCH):
            if next_fd is not None:
                break
            batch.append(data)
        return batch, fd

    def _taken(self, sent: int) -> None:
        self.unsent_bytes -= sent
        self.num_taken += 1
        while sent:
            data, fd = self._out.popleft()
            if fd is not None:
                os.close(fd)
            if sent < len(data):
                self._out.appendleft((data[sent:], None))
                return
            sent -= len(data)

    def _discard(self) -> None:
        for _, fd in self._out:
            if fd is not None:
                os.close(fd)
        self._out.clear()
        self.unsent_bytes = 0
        self._drained.notify_all()

    # Reading, on the io thread.

    def _ready(self, events: int) -> None:
        if events & WRITE:
            with self._lock:
                if not self._closed and self._socket is not None:
                    self._flush(self._socket)
                    self._watch()
        if events & ~WRITE and self._reading.acquire(blocking=False):
            try:
                if self._left:
                    self._deal_with_left()
                self._receive(self._on_frame)
            except CommError as error:
                self.fail(str(error))
            finally:
                self._reading.release()

    def _deal_with_left(self) -> None:
        """Deals with the frames that a waiting thread has left, in order, before any that came later."""
        try:
            while self._left and not self._closed:
                left = self._left.popleft()
                if isinstance(left, str):
                    self.fail(left)
                else:
                    self._on_frame(*left)
        except CommError as error:
            self.fail(str(error))

    def _receive(self, deal_with: OnFrame) -> None:
        """Reads once and deals with every whole frame; raises CommError where the link has ended."""
        connected = None if self._closed else self._socket
        if connected is None:
            return
        self._receiver.receive(connected)
        for found in self._receiver.frames(self):
            deal_with(*found)
            if self._closed:
                return

    # Reading, on a thread that waits.

    def read_until(self, awaited: Awaited, timeout_s: float | None, ask: Callable[[], None] = nothing) -> None:
        """Calls `ask`, and reads on the calling thread until what it waits for is done or the time is over.

        Returns at once where another thread reads already, or the other end has yet to be believed.
        """
        try:
            reads = self.body_limit != MAX_HELLO_BYTES and self._reading.acquire(blocking=False)
            waits = reads and self._begin_waiting(awaited)
            # Only now: an answer that comes at once wakes no other thread.
            ask()
            if waits:
                self._wait(awaited, timeout_s)
                self._end_waiting()
            if reads:
                self._reading.release()
        except BaseException:
            # A KeyboardInterrupt may come between any two steps: what this thread has not yet undone is undone.
            if self._waiting_thread == threading.get_ident():
                self._end_waiting()
            with contextlib.suppress(RuntimeError):
                self._reading.release()
            # What it has read and not dealt with is the io thread's.
            self._loop.call(lambda: self._ready(READ))
            raise

    def _begin_waiting(self, awaited: Awaited) -> bool:
        with self._lock:
            if self._closed or self._socket is None or self._loop.inside():
                return False
            if self._poll is None:
                try:
                    self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                except OSError:
                    # Out of descriptors: the io thread reads.
                    return False
                self._poll = select.poll()
                self._poll.register(self._wake, select.POLLIN)
                self._poll.register(self._socket, select.POLLIN)
            self._waiting, self._waiting_thread = awaited, threading.get_ident()
            if self._out:
                self._flush(self._socket)
            self._watch()
        return True

    def _end_waiting(self) -> None:
        with self._lock:
            self._waiting = None
            if self._closed:
                self._waiting_thread = 0
                self._free()
                return
            if self._out and self._socket is not None:
                self._flush(self._socket)
            self._watch()
            self._waiting_thread = 0

    def _wait(self, awaited: Awaited, timeout_s: float | None) -> None:
        assert self._poll is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        left_ms: float | None = None
        while not awaited.done() and not self._closed:
            if deadline is not None:
                # One more millisecond rather than none: the kernel's clock for this is coarse.
                left_ms = min(deadline - time.monotonic(), LONGEST_SLEEP_S) * 1000 + 1
                if left_ms <= 1:
                    return
            if self._out:
                self._ready(WRITE)
            ready = self._poll.poll(left_ms)
            if (self._wake, select.POLLIN) in ready:
                os.eventfd_read(self._wake)
            elif ready and not self._receive_waiting():
                return

    def _receive_waiting(self) -> bool:
        """Reads once; says whether there may be more. What is not for a waiting thread is left to the io thread."""
        ended = False
        thread = threading.get_ident()
        try:
            self._dealing_thread = thread
            self._loop.readers.add(thread)
            self._receive(self._take_or_leave)
        except CommError as error:
            self._left.append(str(error))
            ended = True
        finally:
            # Before any call, after which a KeyboardInterrupt may come: else all that this thread sends is put off.
            self._dealing_thread = 0
            self._loop.readers.discard(thread)
        if self._left:
            self._loop.call(self._deal_with_left)
        return not ended

    def _take_or_leave(self, kind: Kind, request_id: int, body: bytes, fd: int | None) -> None:
        if not self._take(kind, request_id, body, fd):
            self._left.append((kind, request_id, body, fd))

    def interrupt(self, awaited: Awaited) -> None:
        """Wakes the thread that waits for something, when another thread has done it."""
        if self._waiting_thread == threading.get_ident():
            return
        with self._lock:
            if self._waiting is awaited:
                os.eventfd_write(self._wake, 1)


def _no_frame(kind: Kind, request_id: int, body: bytes, fd: int | None) -> bool:
    """A closed link has no frames."""
    if fd is not None:
        os.close(fd)
    return True


def _no_close(reason: str | CommError) -> None:
    """A closed link does not close again."""
