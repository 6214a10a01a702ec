"""Shared memory as one process maps it, and the pages that it lies on.

A processor's large page, of 2 MiB on most, costs one fault where small ones cost 512 and one entry of the processor's
tables, so memory is written first and read ever after for less. The kernel gives shared memory none by itself, but does
to an owner who asks, where mapping and file agree on where such a page begins.
"""

import ctypes
import mmap
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from m2flow.comm._tree import Bytes

# Of Linux 6.1, and without a name in mmap.
_MADV_COLLAPSE = 25
_LARGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

# The module mmap lets nobody choose an address, and keeps the interpreter while the kernel clears pages.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def mapped(fd: int, size_bytes: int) -> Bytes:
    """Returns a memory file's first bytes, shape [size_bytes] uint8, mapped while a view of them lives.

    Raises OSError where the system does not map it.
    """
    return np.asarray(_Mapping(fd, size_bytes))


def put_on_large_pages(part: Bytes, size_bytes: int) -> None:
    """Puts what holds the first `size_bytes` of a part of shared memory on large pages, as far as there are any.

    Only what lies in the part as a whole page. It is cleared, so nobody may have written there. Blocks for the kernel.
    """
    large = large_page_bytes()
    if part.size < large or not large:
        return
    start = part.ctypes.data
    first = _up(start, large)
    end = min(_up(start + size_bytes, large), (start + part.size) // large * large)
    if first < end:
        # The kernel makes none of what is all hole.
        part[first - start : end - start : large] = 0
        # Refused where it has none left or is older than this: then small ones do.
        _madvise(first, end - first, _MADV_COLLAPSE)


def give_back(part: Bytes) -> None:
    """Frees the memory of the pages that lie in a part as a whole: it costs nothing until it is written again."""
    start = part.ctypes.data
    first, end = _up(start, mmap.PAGESIZE), (start + part.size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and _madvise(first, end - first, mmap.MADV_REMOVE):
        raise _error()


@lru_cache
def large_page_bytes() -> int:
    """Returns the size of a large page, 0 on a system without."""
    try:
        return int(_LARGE_PAGE_FILE.read_text())
    except OSError:
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
        # Not there where it was not mapped.
        if interface := getattr(self, "__array_interface__", None):
            unmap(interface["data"][0], *interface["shape"])


def _place(size_bytes: int) -> int | None:
    """Returns an address at which a large page can begin, free a moment ago; None where any other will do."""
    large = large_page_bytes()
    if size_bytes < large or not large:
        return None
    room = _mmap(None, size_bytes + large, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        return None
    _munmap(room, size_bytes + large)
    # Should another thread map something there meanwhile, the kernel finds another place.
    return _up(room, large)


def _up(address: int, step: int) -> int:
    return -(-address // step) * step


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
