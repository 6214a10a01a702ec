"""Allocator settings that keep the pages of large tensors between steps.

A training step allocates and frees the same gigabytes again and again. glibc gives blocks above 32 MB back to the
kernel at once, so each step would fault in fresh pages, which costs more than the arithmetic on them. Two `mallopt`
words keep them; huge pages make the first touch ten times cheaper.
"""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 1 << 30  # glibc reads an int, and refuses an mmap threshold above its HEAP_MAX on some builds


def keep_freed_pages() -> bool:
    """Ask the C allocator of this process to keep what is freed; returns whether it agreed.

    To be called once, before the first large tensor. A process's peak is then also its resident size: right for a
    worker that repeats one step, wrong for a short script. Does nothing and returns False off glibc.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first allocation
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * _KEEP_BYTES - 1))
