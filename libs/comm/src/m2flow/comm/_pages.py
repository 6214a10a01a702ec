"""How a process maps shared memory, and the pages that back it.

A large page, 2 MiB on most processors, costs one page fault and one TLB entry where small ones cost 512: memory is
quicker to write for the first time and to read ever after. By default Linux gives shared memory none, but it does to
whoever asks for them, where file and mapping agree on where such a page begins.
"""

import ctypes
import mmap
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from m2flow.comm._tree import Bytes

# The module mmap has no names for these; the last is of Linux 6.1.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25
_LARGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

# The module mmap takes no address, and holds the GIL while the kernel works.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _madvise = _libc.mmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
# Rooms of which nobody knows what is mapped in them: never unmapped.
_lost: list[mmap.mmap] = []


def map_shared(fd: int, size_bytes: int) -> Bytes:
    """Returns the first bytes of a memory file that has as many, shape [size_bytes] uint8, mapped while a view lives.

    Raises OSError where the system refuses.
    """
    large = large_page_bytes()
    if not 0 < large <= size_bytes:
        return np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
    # Mapped over, it still unmaps all of itself when it goes: in C, where no signal's handler can come between.
    room = mmap.mmap(-1, size_bytes + large, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, _PROT_NONE)
    place = _up(np.frombuffer(room, np.uint8).ctypes.data, large)
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _mmap(place, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == _FAILED:
        error = _error()
        _lost.append(room)
        raise error
    return np.asarray(_Placed(room, place, size_bytes))


def put_on_large_pages(part: Bytes, size_bytes: int) -> None:
    """Backs the first `size_bytes` of a part of shared memory by large pages, as far as these lie wholly in the part.

    To be called before anything is written there: some bytes become 0. Blocks while the kernel finds and clears pages;
    where it refuses, the part stays on small ones.
    """
    large = large_page_bytes()
    if not 0 < large <= part.size:
        return
    start = part.ctypes.data
    first = _up(start, large)
    end = min(_up(start + size_bytes, large), (start + part.size) // large * large)
    if first < end:
        # Where there is no page yet the kernel has nothing to collapse: one byte makes one.
        part[first - start : end - start : large] = 0
        _madvise(first, end - first, _MADV_COLLAPSE)


def give_back(part: Bytes) -> None:
    """Gives the pages that lie wholly in a part back to the system; it reads as 0 until it is written again.

    Of a large page all must lie in the part, or all of it is kept.
    """
    start = part.ctypes.data
    first, end = _up(start, mmap.PAGESIZE), (start + part.size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and _madvise(first, end - first, mmap.MADV_REMOVE):
        raise _error()


@lru_cache
def large_page_bytes() -> int:
    """Returns the size of a large page; 0 where the system has none."""
    try:
        return int(_LARGE_PAGE_FILE.read_text())
    except (OSError, ValueError):
        return 0


class _Placed:
    """What is mapped at an address within a room, for numpy; an array of it keeps the room."""

    def __init__(self, room: mmap.mmap, address: int, size_bytes: int) -> None:
        self._room = room
        self.__array_interface__ = {"data": (address, False), "shape": (size_bytes,), "typestr": "|u1", "version": 3}


def _up(address: int, step: int) -> int:
    return -(-address // step) * step


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
