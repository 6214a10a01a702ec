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

_PROT_NONE = 0
# Linux 6.1 has it, and the module mmap no name for it.
_MADV_COLLAPSE = 25
_LARGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

# By the module mmap nobody chooses an address, and it holds the GIL while the kernel works.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, size_bytes: int) -> Bytes:
    """Returns the first bytes of a memory file that has as many, shape [size_bytes] uint8, mapped while a view lives.

    Raises OSError where the system refuses.
    """
    return np.asarray(_Mapping(fd, size_bytes))


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


class _Mapping:
    """Unmaps when the last array that lies in it is gone."""

    __slots__ = ("__array_interface__",)

    def __init__(self, fd: int, size_bytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _mmap(_place(size_bytes), size_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            raise _error()
        self.__array_interface__ = {"data": (address, False), "shape": (size_bytes,), "typestr": "|u1", "version": 3}

    def __del__(self, unmap: "ctypes._NamedFuncPointer" = _munmap) -> None:
        # Missing where it was not mapped.
        if interface := getattr(self, "__array_interface__", None):
            unmap(interface["data"][0], *interface["shape"])


def _place(size_bytes: int) -> int | None:
    """Returns an address at which a large page can begin, with room behind it; None where any address will do."""
    large = large_page_bytes()
    if not 0 < large <= size_bytes:
        return None
    room = _mmap(None, size_bytes + large, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        return None
    # Given up again: to map over it could fail half-way. Should another thread be quicker, the kernel maps elsewhere.
    _munmap(room, size_bytes + large)
    return _up(room, large)


def _up(address: int, step: int) -> int:
    return -(-address // step) * step


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
