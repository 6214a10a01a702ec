"""Shared memory that dies with its last holder: anonymous segments, cut into slots that are used again.

A segment is a memfd: it has no name in any file system, so the kernel frees it when the last process that holds its
descriptor or its mapping is gone, however that process ended. Fresh pages cost much more than warm ones, so a slot goes
back to its pool when its last reader has let go, and the pool hands out the slot that came back last.

Slots of one size share a segment of 64 MiB (its pages cost nothing until a slot on them is taken); larger payloads have
a segment each. That keeps the descriptors few, however many payloads wait. When the quota is used up, the pages of
all that is not in use go back to the system.
"""

import fcntl
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable

from m2flow.comm import _torch
from m2flow.comm._deadline import Deadline
from m2flow.comm._pages import give_back, map_shared, put_on_large_pages
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import CommError, system_refuses

MIN_SLOT_BYTES = 64 << 10
SLAB_BYTES = 64 << 20
LARGEST_SHARED_SLOT_BYTES = 16 << 20
# What whoever maps a segment can rely on: it is as long as it was, for ever.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """One memfd of this process, mapped; `id` is random, so it is unique among the processes of a run."""

    def __init__(self, size_bytes: int) -> None:
        self.id = int.from_bytes(os.urandom(8), "little")
        self.size_bytes = size_bytes
        # A reader may still map it where nobody can say when it lets go: its slots are never used again.
        self.abandoned = False
        self.slots_in_use = 0
        self.cut_bytes = 0
        # Of slots that have ended and keep their memory until the segment is gone.
        self.kept_bytes = 0
        self._pinned: bool | None = None
        self.fd = -1
        try:
            self.fd = os.memfd_create(f"m2flow-{self.id:x}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size_bytes)
            # A reader touches what it was told is there: nobody may cut it off.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.bytes: Bytes = map_shared(self.fd, size_bytes)
        except OSError as error:
            raise system_refuses("make shared memory", error) from error

    @property
    def pinned(self) -> bool:
        """Says whether its memory has to stay where it is, for a GPU."""
        return bool(self._pinned)

    def pin(self) -> None:
        """Pins the segment for copies from a GPU, once; where CUDA refuses, such copies are slower and as right."""
        if self._pinned is None:
            self._pinned = _torch.pin(self.bytes)

    def __del__(self) -> None:
        if self._pinned:
            _torch.unpin(self.bytes)
        if self.fd >= 0:
            os.close(self.fd)


class Slot:
    """A part of a segment that holds one payload, for as long as somebody holds the slot."""

    __slots__ = ("abandoned", "holds", "offset_bytes", "segment", "size_bytes")

    def __init__(self, segment: Segment, offset_bytes: int, size_bytes: int) -> None:
        self.segment = segment
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self.holds = 0
        # Somebody may read it for ever.
        self.abandoned = False

    @property
    def held_once(self) -> bool:
        """Says whether it has one holder, and nobody else may read it."""
        return self.holds == 1 and not self.abandoned

    def view(self, size_bytes: int, start: int = 0) -> Bytes:
        """Returns `size_bytes` of the slot from `start` on, shape [size_bytes] uint8."""
        return self.segment.bytes[self.offset_bytes + start : self.offset_bytes + start + size_bytes]


class Pool:
    """The segments of one process: at most `quota_bytes` of slots, free ones kept warm. Thread-safe.

    `readers` names those who have slots of it, for the error of who waits for one in vain.
    """

    def __init__(
        self, quota_bytes: int, *, on_retire: Callable[[int], None], readers: Callable[[], Iterable[str]] = tuple
    ) -> None:
        self.quota_bytes = quota_bytes
        self._on_retire = on_retire
        self._readers = readers
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)
        # Free slots whose memory went back to the system, in segments of which others are in use.
        self._cold: defaultdict[int, list[Slot]] = defaultdict(list)
        # The segment of each size that slots are still being cut from.
        self._slabs: dict[int, Segment] = {}
        self._used_bytes = 0
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._abandoned = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, in use or kept warm: what the pool costs."""
        with self._lock:
            return self._used_bytes

    def take(self, size_bytes: int, deadline: Deadline | None = None, *, or_hold: Slot | None = None) -> Slot:
        """Returns a slot of at least `size_bytes`, held once; or rather `or_hold`, held once more, if it is held once.

        Waits for slots to come back while the quota is used up, and for the kernel where one has no memory yet, which
        takes less than to write it. Raises CommError when the payload alone exceeds the quota, the system refuses a
        segment or this is a forked child, TimeoutError, saying what was waited for, when nothing came back in time.
        """
        if self._abandoned:
            raise CommError("got a payload for an endpoint of the parent process, want one made after the fork")
        size = slot_bytes(size_bytes)
        if size > self.quota_bytes:
            raise CommError(
                f"got a payload of {size_bytes} bytes, want at most the quota of {self.quota_bytes}: raise it"
            )
        with self._lock:
            while not (alone := or_hold is not None and or_hold.held_once) and not self._has_room(size):
                left_s = None if deadline is None else deadline.left_s
                if left_s == 0 or not self._room.wait(left_s):
                    raise TimeoutError(self._in_use())
            if or_hold is not None and alone:
                or_hold.holds += 1
                return or_hold
            fresh = not self._free[size]
            slot = self._cut(size) if fresh else self._free[size].pop()
            slot.segment.slots_in_use += 1
            slot.holds = 1
        try:
            # What a GPU copies to stays where it is.
            if fresh and not slot.segment.pinned:
                put_on_large_pages(slot.view(slot.size_bytes), size_bytes)
        except BaseException:
            # Ctrl-C may come while the kernel is at work.
            self.let_go(slot)
            raise
        return slot

    def beside_quota(self, size_bytes: int) -> Slot:
        """Returns a slot for so many bytes, held once, of which the quota does not count any.

        It is not used again: its memory is free once the last hold has ended. Raises CommError as `take` does.
        """
        if self._abandoned:
            raise CommError("got a payload for an endpoint of the parent process, want one made after the fork")
        slot = Slot(Segment(size_bytes), 0, 0)
        put_on_large_pages(slot.segment.bytes, size_bytes)
        slot.segment.abandoned, slot.segment.slots_in_use, slot.holds = True, 1, 1
        return slot

    def wake(self) -> None:
        """Lets who waits for room look at its deadline again."""
        with self._lock:
            self._room.notify_all()

    def hold(self, slot: Slot) -> None:
        """Holds a slot once more: for another reader."""
        if self._abandoned:
            return
        with self._lock:
            slot.holds += 1

    def let_go(self, slot: Slot, *, abandoned: bool = False) -> None:
        """Ends one hold; the last one gives the slot back. `abandoned`: somebody may still read it, for ever."""
        if self._abandoned:
            return
        with self._lock:
            segment = slot.segment
            slot.abandoned |= abandoned
            if abandoned and not segment.abandoned:
                segment.abandoned = True
                _taken_out(self._cold, segment)
                for free in _taken_out(self._free, segment):
                    self._end(free)
            slot.holds -= 1
            if slot.holds:
                if slot.holds == 1:
                    # It may be what its holder waits for.
                    self._room.notify_all()
                return
            segment.slots_in_use -= 1
            if not segment.abandoned:
                self._free[slot.size_bytes].append(slot)
            else:
                self._end(slot)
                if not segment.slots_in_use:
                    self._drop(segment)
            self._room.notify_all()

    def trim(self) -> None:
        """Gives the memory of all that is not in use back to the system."""
        if self._abandoned:
            return
        with self._lock:
            self._drop_unused(0)

    def abandon(self) -> None:
        """In a forked child: leaves all as it is from now on. The memory is the parent's, and its readers'.

        No lock can be trusted there, so none is taken.
        """
        self._abandoned = True

    def _in_use(self) -> str:
        """Returns what is waited for: a channel's host, as a reader, may have passed on what it was lent."""
        readers = sorted(self._readers())
        holders = ", ".join((*readers, "who reads through them, or this program")) if readers else "this program"
        in_use = f"{self._used_bytes} bytes are in use, of a quota of {self.quota_bytes}"
        return f"{holders} to let go of shared memory: {in_use}"

    def _has_room(self, size: int) -> bool:
        """Says whether there is a slot, or memory for one, which it frees where that helps."""
        if self._free[size]:
            return True
        if self._used_bytes + size > self.quota_bytes:
            self._drop_unused(self.quota_bytes - size)
        return self._used_bytes + size <= self.quota_bytes

    def _cut(self, size: int) -> Slot:
        slot = self._cold[size].pop() if self._cold[size] else self._new(size)
        self._used_bytes += size
        return slot

    def _new(self, size: int) -> Slot:
        if size > LARGEST_SHARED_SLOT_BYTES:
            return Slot(Segment(size), 0, size)
        slab = self._slabs.get(size)
        if slab is None or slab.abandoned or slab.cut_bytes + size > slab.size_bytes:
            slab = self._slabs[size] = Segment(SLAB_BYTES)
        slab.cut_bytes += size
        return Slot(slab, slab.cut_bytes - size, size)

    def _drop_unused(self, limit_bytes: int) -> None:
        """Frees what is not in use, whole segments first, until no more than the limit is left."""
        free = {slot.segment for slots in self._free.values() for slot in slots}
        for segment in sorted(free, key=lambda segment: segment.slots_in_use):
            if self._used_bytes <= limit_bytes:
                return
            if not segment.slots_in_use:
                self._drop(segment)
            elif not segment.pinned:
                for slot in _taken_out(self._free, segment):
                    self._end(slot)
                    self._cold[slot.size_bytes].append(slot)

    def _end(self, slot: Slot) -> None:
        """Frees the memory of a slot that is not in use: at once where nobody may read it, else with its segment."""
        segment = slot.segment
        if slot.abandoned or segment.pinned:
            segment.kept_bytes += slot.size_bytes
        else:
            give_back(slot.view(slot.size_bytes))
            self._used_bytes -= slot.size_bytes

    def _drop(self, segment: Segment) -> None:
        """Frees the memory of a segment of which no slot is in use."""
        _taken_out(self._cold, segment)
        free = _taken_out(self._free, segment)
        self._used_bytes -= segment.kept_bytes + sum(slot.size_bytes for slot in free)
        self._slabs = {size: slab for size, slab in self._slabs.items() if slab is not segment}
        self._on_retire(segment.id)


def _taken_out(slots_by_size: dict[int, list[Slot]], segment: Segment) -> list[Slot]:
    """Takes the slots of a segment out; returns them."""
    taken: list[Slot] = []
    for slots in slots_by_size.values():
        taken += [slot for slot in slots if slot.segment is segment]
        slots[:] = [slot for slot in slots if slot.segment is not segment]
    return taken


def slot_bytes(size: int) -> int:
    """Rounds up to a sixteenth of a power of two: few sizes, so that slots fit again, and at most a ninth wasted."""
    if size <= MIN_SLOT_BYTES:
        return MIN_SLOT_BYTES
    step = (1 << (size - 1).bit_length()) // 16
    return -(-size // step) * step
