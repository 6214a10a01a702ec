"""Allocator settings that keep the pages of large tensors between steps.

A training step allocates and frees the same gigabytes again and again. glibc gives blocks above 32 MB back to the
kernel at once, so each step would fault in fresh pages, which costs more than the arithmetic on them.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 1 << 30
_TRIM_BYTES = (1 << 31) - 1  # glibc reads an int


def keep_freed_pages() -> bool:
    """Ask the C allocator of this process to keep what is freed; returns whether it agreed.

    To be called once, before the first large tensor. A process's peak is then also its resident size: right for a
    worker that repeats one step, wrong for a short script. Returns False, and changes nothing, where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
