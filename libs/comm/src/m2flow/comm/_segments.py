"""Shared memory that dies with its last holder: anonymous segments, cut into slots that are used again.

A segment is a memfd: it has no name in any file system, so the kernel frees it when the last process that holds its
descriptor or its mapping is gone, however that process ended. Fresh pages cost ten times warm ones, so a slot goes back
to its pool when its last reader has let go, and the pool hands out the slot that came back last.

Slots of one size share a segment of 64 MiB (a segment's pages cost nothing until they are touched); larger payloads
have a segment each. That keeps the descriptors few, however many payloads wait.
"""

import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from m2flow.comm import _torch
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import CommError

MIN_SLOT_BYTES = 64 << 10
SLAB_BYTES = 64 << 20
LARGEST_SHARED_SLOT_BYTES = 16 << 20


class Segment:
    """One memfd of this process, mapped; `id` is random, so it is unique among the processes of a run."""

    def __init__(self, size_bytes: int) -> None:
        self.id = int.from_bytes(os.urandom(8), "little")
        self.size_bytes = size_bytes
        self.fd = os.memfd_create(f"m2flow-{self.id:x}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size_bytes)
        self.map = mmap.mmap(self.fd, size_bytes)
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8)
        # A reader may still map it where nobody can say when it lets go: its slots are never used again.
        self.abandoned = False
        self.slots_in_use = 0
        self.cut_bytes = 0
        self._pinned: bool | None = None

    def pin(self) -> None:
        """Pins the segment for copies from a GPU, once; where CUDA refuses, such copies are slower and as right."""
        if self._pinned is None:
            self._pinned = _torch.pin(self.bytes)

    def __del__(self) -> None:
        if self._pinned:
            _torch.unpin(self.bytes)
        os.close(self.fd)


class Slot:
    """A part of a segment that holds one payload, for as long as somebody holds the slot."""

    __slots__ = ("holds", "offset_bytes", "segment", "size_bytes")

    def __init__(self, segment: Segment, offset_bytes: int, size_bytes: int) -> None:
        self.segment = segment
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self.holds = 0

    def view(self, size_bytes: int) -> Bytes:
        """Returns the first `size_bytes` of the slot, shape [size_bytes] uint8."""
        return self.segment.bytes[self.offset_bytes : self.offset_bytes + size_bytes]


class Pool:
    """The segments of one process: at most `quota_bytes` of slots, free ones kept warm. Thread-safe."""

    def __init__(self, quota_bytes: int, *, on_retire: Callable[[int], None]) -> None:
        self.quota_bytes = quota_bytes
        self._on_retire = on_retire
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)
        # The segment of each size that slots are still being cut from.
        self._slabs: dict[int, Segment] = {}
        self._used_bytes = 0
        self._room = threading.Condition()

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, in use or kept warm: what the pool costs."""
        with self._room:
            return self._used_bytes

    def take(self, size_bytes: int, *, timeout_s: float | None = None) -> Slot:
        """Returns a slot of at least `size_bytes`, held once.

        Waits for slots to come back while the quota is used up. Raises CommError when the payload alone exceeds the
        quota, TimeoutError when nothing came back in time.
        """
        size = _slot_bytes(size_bytes)
        if size > self.quota_bytes:
            raise CommError(
                f"got a payload of {size_bytes} bytes, want at most the quota of {self.quota_bytes}: raise it"
            )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._room:
            while not self._free[size] and not self._make_room(size):
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not self._room.wait(left):
                    raise TimeoutError(f"{self._used_bytes} bytes of shared memory are in use")
            slot = self._free[size].pop() if self._free[size] else self._cut(size)
            slot.segment.slots_in_use += 1
            slot.holds = 1
            return slot

    def hold(self, slot: Slot) -> None:
        """Holds a slot once more: for another reader."""
        with self._room:
            slot.holds += 1

    def let_go(self, slot: Slot, *, abandoned: bool = False) -> None:
        """Ends one hold; the last one gives the slot back. `abandoned`: somebody may still read it, for ever."""
        with self._room:
            segment = slot.segment
            if abandoned and not segment.abandoned:
                segment.abandoned = True
                self._drop_free_of(segment)
            slot.holds -= 1
            if slot.holds:
                return
            segment.slots_in_use -= 1
            if segment.abandoned:
                self._used_bytes -= slot.size_bytes
                if not segment.slots_in_use:
                    self._on_retire(segment.id)
            else:
                self._free[slot.size_bytes].append(slot)
            self._room.notify_all()

    def trim(self) -> None:
        """Gives the memory of all unused segments back to the system."""
        with self._room:
            self._drop_unused()

    def _make_room(self, size: int) -> bool:
        if self._used_bytes + size > self.quota_bytes:
            self._drop_unused()
        return self._used_bytes + size <= self.quota_bytes

    def _cut(self, size: int) -> Slot:
        self._used_bytes += size
        if size > LARGEST_SHARED_SLOT_BYTES:
            return Slot(Segment(size), 0, size)
        slab = self._slabs.get(size)
        if slab is None or slab.abandoned or slab.cut_bytes + size > slab.size_bytes:
            slab = self._slabs[size] = Segment(SLAB_BYTES)
        slab.cut_bytes += size
        return Slot(slab, slab.cut_bytes - size, size)

    def _drop_unused(self) -> None:
        for segment in {slot.segment for slots in self._free.values() for slot in slots}:
            if not segment.slots_in_use:
                self._drop_free_of(segment)
                self._on_retire(segment.id)

    def _drop_free_of(self, segment: Segment) -> None:
        for size, slots in self._free.items():
            kept = [slot for slot in slots if slot.segment is not segment]
            self._used_bytes -= size * (len(slots) - len(kept))
            slots[:] = kept
            if self._slabs.get(size) is segment:
                del self._slabs[size]


def _slot_bytes(size: int) -> int:
    """Rounds up to an eighth of a power of two: few sizes, so that slots fit again, and at most a fifth wasted."""
    if size <= MIN_SLOT_BYTES:
        return MIN_SLOT_BYTES
    step = (1 << (size - 1).bit_length()) // 8
    return -(-size // step) * step
