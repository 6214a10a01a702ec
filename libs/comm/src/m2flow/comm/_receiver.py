"""What arrives on a Unix socket, cut into frames, with the descriptors that came beside them."""

import errno
import os
import socket
from collections import deque
from collections.abc import Iterator

from m2flow.comm._frames import HEADER, Kind, Limits, ProtocolError, parse_header
from m2flow.comm.errors import CommError, system_refuses

_BUFFER_BYTES = 256 << 10
_MAX_FDS = 64
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS * 4)
# As plain numbers: arithmetic on an enum's members costs microseconds.
_CLOEXEC, _CUT_SHORT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)


class Receiver:
    """The bytes of one socket that are no whole frame yet. One thread at a time uses it."""

    def __init__(self) -> None:
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # What has arrived and is not cut yet lies between these.
        self._start = 0
        self._end = 0
        self._fds: deque[int] = deque()

    def receive(self, connected: socket.socket) -> None:
        """Takes what the socket has, without waiting. Raises CommError at its end."""
        if self._end == len(self._buffer):
            # Full of what an interrupted thread has not cut.
            return
        try:
            size, ancillary, flags, _ = connected.recvmsg_into([self._view[self._end :]], _ANCILLARY_BYTES, _CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            raise CommError(f"its connection failed: {error}") from error
        except BaseException:
            # A KeyboardInterrupt: nobody knows what was read, and whoever waits for it must be told.
            connected.shutdown(socket.SHUT_RDWR)
            raise
        taken = 0
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                taken = len(data) // 4
                self._fds.extend(memoryview(data[: taken * 4]).cast("i"))
        if flags & _CUT_SHORT:
            if taken < _MAX_FDS:
                # The kernel has dropped one for want of a number to give it here.
                raise system_refuses("take its shared memory", OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            raise ProtocolError(f"got more than {_MAX_FDS} descriptors at once")
        if not size:
            raise CommError("its connection closed without a goodbye")
        self._end += size

    def frames(self, limits: Limits) -> Iterator[tuple[Kind, int, bytes, int | None]]:
        """Cuts whole frames: kind, id, body and, for a segment, its descriptor. Each is cut when it is asked for.

        Raises ProtocolError for a frame whose body is longer than the limit, or that lacks its descriptor.
        """
        wanted = HEADER.size
        while self._end - self._start >= wanted:
            length, kind, request_id = parse_header(self._buffer, self._start, limits.body_limit)
            at = self._start + HEADER.size
            if self._end - at < length:
                wanted += length
                break
            self._start = at + length
            body = bytes(self._view[at : self._start])
            if kind is not Kind.SEGMENT:
                yield kind, request_id, body, None
            elif self._fds:
                yield kind, request_id, body, self._fds.popleft()
            else:
                raise ProtocolError("got a segment without its descriptor")
        if self._start == self._end and len(self._buffer) == _BUFFER_BYTES:
            self._start = self._end = 0
        else:
            self._make_room(wanted)

    def close(self) -> None:
        """Closes the descriptors that nobody has taken."""
        while self._fds:
            os.close(self._fds.popleft())

    def _make_room(self, needed: int) -> None:
        """Moves what is left to the front, so that a frame of `needed` bytes finds room behind it."""
        rest = self._view[self._start : self._end]
        if needed > len(self._buffer) or (len(self._buffer) > _BUFFER_BYTES >= needed):
            # A long frame gets a larger buffer, at most twice what has really arrived; then the usual one again.
            self._buffer = bytearray(max(_BUFFER_BYTES, min(needed, 2 * len(self._buffer))))
            self._buffer[: len(rest)] = rest
            self._view = memoryview(self._buffer)
        elif self._start and rest:
            self._view[: len(rest)] = bytes(rest)
        self._start, self._end = 0, len(rest)
