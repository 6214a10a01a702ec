"""Copies of more bytes than the processor's caches hold.

An ordinary store reads each line of memory before it overwrites it: a third of the traffic of a large copy, for
nothing. Streaming stores do not. The C library takes to them only above three quarters of the cache that it believes
in, 288 MiB on one machine with 32, and numpy and the kernel never do; so the loop is here, as the instructions that it
is: AVX, which most x86-64 processors have. Where it cannot run, the C library copies.
"""

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from functools import lru_cache

import numpy as np

# From so many bytes on a reader finds little of a copy in the caches, and streaming is the faster way.
STREAMED_BYTES = 8 << 20
_LINE = 64

# void copy(target, source, half): two halves at once, each of whole lines of the target's, and one at least. The
# hardware prefetcher starts anew at each page: in two places the copy waits for it less.
_LOOP = bytes.fromhex(
    "4889d1"  # mov rcx, rdx
    "c5fe6f06 c5fe6f4e20 c5fe6f140e c5fe6f5c0e20"  # 3: vmovdqu ymm0-3, [rsi], [rsi+32], [rsi+rcx], [rsi+rcx+32]
    "c5fde707 c5fde74f20 c5fde7140f c5fde75c0f20"  # vmovntdq [rdi], [rdi+32], [rdi+rcx], [rdi+rcx+32], ymm0-3
    "4883c640 4883c740 4883ea40 75ca"  # add rsi, 64; add rdi, 64; sub rdx, 64; jnz 3
    "0faef8 c5f877 c3"  # sfence; vzeroupper; ret
)

# Takes the addresses of target and source, which do not overlap, and the size in bytes. Other threads run meanwhile.
Copy = Callable[[int, int, int], object]


def copier(size_bytes: int) -> Copy:
    """Returns what copies arrays that are so many bytes in all."""
    loop = None
    if size_bytes >= STREAMED_BYTES:
        # Refused for good, or for want of a descriptor now.
        with contextlib.suppress(OSError):
            loop = _loop()
    if loop is None:
        return ctypes.memmove

    def copy(target: int, source: int, size: int) -> None:
        head = -target % _LINE
        half = (size - head) // (2 * _LINE) * _LINE
        if half <= 0:
            ctypes.memmove(target, source, size)
            return
        end = head + 2 * half
        if head:
            ctypes.memmove(target, source, head)
        loop(target + head, source + head, half)
        if end < size:
            ctypes.memmove(target + end, source + end, size - end)

    return copy


@lru_cache
def _loop() -> Copy | None:
    """Returns the loop, made executable; None where the processor is another. Raises OSError where it cannot be."""
    if platform.machine() != "x86_64" or not _has_avx():
        return None
    with os.fdopen(os.memfd_create("m2flow-copy", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(_LOOP)
        # Never writable and executable at once.
        code = mmap.mmap(file.fileno(), len(_LOOP), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    # Kept for good: `code` is what the array keeps, and the array what the function does.
    held = np.frombuffer(code, np.uint8)
    loop = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(held.ctypes.data)
    loop.held = held  # type: ignore[attr-defined]
    return loop


def _has_avx() -> bool:
    """Says whether processor and system have the registers: the kernel names no flag that it does not support."""
    with open("/proc/cpuinfo") as processors:
        return any(line.startswith("flags") and "avx" in line.split() for line in processors)
