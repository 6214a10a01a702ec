"""The reader's side of shared memory: segments of other processes, mapped once, and the life of what is read in them.

Arrays that are read in place keep a `Hold` alive; when the last of them is gone the hold reports its block, so that the
owner can use it again. Reports are collected here and sent by the io thread: a hold may die anywhere,
even inside a lock.
"""

import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from m2flow.comm._pages import map_shared
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import PayloadError, system_refuses


class BlockRef(NamedTuple):
    """Bytes inside a segment."""

    segment: int
    offset_bytes: int
    size_bytes: int


class Mapped:
    """A segment of another process: its descriptor, to be passed on, and its mapping, made when it is first read.

    `on_gone(id)` is called when nothing here refers to it any more, perhaps by a finaliser. Raises PayloadError for a
    descriptor of less than `size_bytes`, or of what could be cut shorter: reading beyond its end would kill the reader.
    """

    def __init__(self, segment: int, fd: int, size_bytes: int, on_gone: Callable[[int], None]) -> None:
        self._on_gone = on_gone
        self.id = segment
        self.fd = fd
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._bytes: Bytes | None = None
        found_bytes = os.fstat(fd).st_size
        if not 0 < size_bytes <= found_bytes or not _is_sealed(fd):
            raise PayloadError(
                f"got a segment of {found_bytes} bytes, want {size_bytes} or more that are sealed against shrinking"
            )

    def bytes_of(self, block: BlockRef) -> Bytes:
        """Returns the bytes of a block that lies in it, in place; raises CommError where it cannot be mapped."""
        with self._lock:
            if self._bytes is None:
                try:
                    self._bytes = map_shared(self.fd, self.size_bytes)
                except OSError as error:
                    raise system_refuses("map shared memory", error) from error
        return self._bytes[block.offset_bytes : block.offset_bytes + block.size_bytes]

    def __del__(self) -> None:
        os.close(self.fd)
        self._on_gone(self.id)


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        # No memory file at all.
        return False


class Hold:
    """What keeps a block from being used again: the base of every array that lies in it."""

    __slots__ = ("__array_interface__", "__weakref__", "_bytes", "_report")

    def __init__(self, data: Bytes, report: Callable[[], None]) -> None:
        self._bytes = data
        self._report = report
        self.__array_interface__ = {
            "data": (data.ctypes.data, False),
            "shape": (data.size,),
            "typestr": "|u1",
            "version": 3,
        }

    def array(self) -> Bytes:
        """Returns the block as a uint8 array whose base, and that of all its views, is this hold."""
        return np.asarray(self)

    def __del__(self) -> None:
        self._report()


class Lender(Protocol):
    """Whom blocks or slots go back to."""

    def release(self, blocks: list[Any]) -> None: ...


class Released:
    """Blocks and slots whose last array is gone, until the io thread tells whose they are. Appending takes no lock."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._blocks: deque[tuple[Lender, Any]] = deque()

    def add(self, lender: Lender, block: Any) -> None:
        """Notes that `lender`'s block is free; callable from a finaliser in any thread."""
        self._blocks.append((lender, block))
        if not self._wake():
            # Nobody sends word any more, and a lender keeps what it has mapped.
            self._blocks.clear()

    def __bool__(self) -> bool:
        """Says whether there is anything to drain."""
        return bool(self._blocks)

    def drain(self) -> dict[Lender, list[Any]]:
        """Returns what was noted since the last call, by lender."""
        drained: dict[Lender, list[Any]] = {}
        while self._blocks:
            lender, block = self._blocks.popleft()
            drained.setdefault(lender, []).append(block)
        return drained
