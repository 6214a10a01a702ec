"""A link over a Unix socket: frames in order both ways, descriptors beside them.

Any thread may send: it writes at once what the socket takes, and leaves the rest to the io thread.
"""

import array
import contextlib
import errno
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable

from m2flow.comm import _frames
from m2flow.comm._frames import HEADER, Kind, ProtocolError
from m2flow.comm._loop import READ, WRITE, Loop
from m2flow.comm.errors import CommError

# Senders that are not the io thread wait above this many bytes not yet taken by the socket.
HIGH_WATER_BYTES = 8 << 20
_BUFFER_BYTES = 256 << 10
_MAX_FDS = 64
_MAX_BATCH = 64
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS * 4)

OnFrame = Callable[[Kind, int, bytes, int | None], None]
OnClosed = Callable[[str], None]


class UnixLink:
    """One end of a connected Unix socket. `on_frame` and `on_closed` run on the io thread, `on_closed` once."""

    passes_fds = True

    def __init__(self, loop: Loop, *, on_frame: OnFrame, on_closed: OnClosed) -> None:
        self._loop = loop
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._socket: socket.socket | None = None
        self._closed = False
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self._out_bytes = 0
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._filled = 0
        self._fds: deque[int] = deque()
        self.body_limit = _frames.MAX_HELLO_BYTES

    def attach(self, connected: socket.socket) -> None:
        """Takes a connected socket; what was sent before goes out first."""
        connected.setblocking(False)
        with self._lock:
            if self._closed:
                connected.close()
                return
            self._socket = connected
            self._flush()
            self._loop.add(connected.fileno(), READ | (WRITE if self._out else 0), self._ready)

    def send(self, data: bytes, fd: int | None = None, *, wait: bool = True) -> None:
        """Sends whole frames; a descriptor travels with their first byte and stays the caller's.

        Blocks, unless on the io thread or not to `wait`, while more than 8 MiB wait for the socket. Raises
        BrokenPipeError once closed.
        """
        with self._lock:
            while wait and self._out_bytes > HIGH_WATER_BYTES and not self._closed and not self._loop.inside():
                self._drained.wait()
            if self._closed:
                raise BrokenPipeError("the link is closed")
            was_idle = not self._out
            self._out.append((memoryview(data), None if fd is None else os.dup(fd)))
            self._out_bytes += len(data)
            if was_idle and self._socket is not None:
                self._flush()
                if self._out:
                    self._loop.call(self._watch)

    def close(self) -> None:
        """Closes the socket after a last attempt to send what waits. `on_closed` is not called."""
        with self._lock:
            if self._closed:
                return
            with contextlib.suppress(OSError):
                self._flush()
            self._shut()

    def wait_sent(self, timeout_s: float) -> bool:
        """Waits until the socket has taken all that was sent; says whether it did in time."""
        with self._lock:
            return self._drained.wait_for(lambda: not self._out or self._closed, timeout_s)

    def fail(self, reason: str) -> None:
        """Closes the socket and reports it, on the io thread."""
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

    def _shut(self) -> None:
        self._closed = True
        if self._socket is not None:
            self._loop.remove(self._socket.fileno())
            self._socket.close()
        self._discard()
        # The callbacks lead to the connection, which leads here: without them nothing waits for the cycle collector.
        self._on_frame, self._on_closed = _no_frame, _no_close
        while self._fds:
            os.close(self._fds.popleft())

    def _watch(self) -> None:
        with self._lock:
            if not self._closed and self._socket is not None:
                self._loop.change(self._socket.fileno(), READ | (WRITE if self._out else 0))

    def _flush(self) -> None:
        """Writes until the socket is full. A dead socket is left for the reader to find: it closes the link, once."""
        assert self._socket is not None
        while self._out:
            batch, fd = self._next_batch()
            ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            try:
                sent = self._socket.sendmsg(batch, ancillary)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    # As many descriptors are under way as the kernel allows: the receiver has yet to take them.
                    self._loop.call_later(0.01, lambda: self._ready(WRITE))
                else:
                    self._discard()
                return
            self._taken(sent)
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
        self._out_bytes -= sent
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
        self._out_bytes = 0
        self._drained.notify_all()

    def _ready(self, events: int) -> None:
        if events & WRITE:
            with self._lock:
                if not self._closed:
                    self._flush()
            if not self._out:
                self._watch()
        if events & ~WRITE:
            try:
                self._receive()
            except CommError as error:
                self.fail(str(error))

    def _receive(self) -> None:
        connected = self._socket
        if connected is None or self._closed:
            return
        try:
            size, ancillary, flags, _ = connected.recvmsg_into(
                [memoryview(self._buffer)[self._filled :]], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(f"its connection failed: {error}")
            return
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(memoryview(data[: len(data) // 4 * 4]).cast("i"))
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"got more than {_MAX_FDS} descriptors at once")
        if not size:
            self.fail("its connection closed without a goodbye")
            return
        self._filled += size
        self._parse()

    def _parse(self) -> None:
        view = memoryview(self._buffer)
        at = 0
        needed = HEADER.size
        while self._filled - at >= HEADER.size:
            length, kind, request_id = _frames.parse_header(view, at, self.body_limit)
            if self._filled - at < HEADER.size + length:
                needed = HEADER.size + length
                break
            at += HEADER.size
            body = bytes(view[at : at + length])
            at += length
            fd = None
            if kind is Kind.SEGMENT:
                if not self._fds:
                    raise ProtocolError("got a segment without its descriptor")
                fd = self._fds.popleft()
            self._on_frame(kind, request_id, body, fd)
            if self._closed:
                return
        self._keep_rest(view, at, needed)

    def _keep_rest(self, view: memoryview, at: int, needed: int) -> None:
        rest = view[at : self._filled]
        self._filled = len(rest)
        if needed > len(self._buffer) or (len(self._buffer) > _BUFFER_BYTES >= needed):
            # A long frame gets a larger buffer, at most twice what has really arrived; then the usual one again.
            self._buffer = bytearray(max(_BUFFER_BYTES, min(needed, 2 * len(self._buffer))))
            self._buffer[: len(rest)] = rest
        elif at:
            view[: len(rest)] = bytes(rest)


def _no_frame(kind: Kind, request_id: int, body: bytes, fd: int | None) -> None:
    """A closed link has no frames."""


def _no_close(reason: str) -> None:
    """A closed link does not close again."""
