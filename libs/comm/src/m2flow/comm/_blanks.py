"""Arrays that a program fills where a peer will read them: their bytes are in shared memory before they are put.

Before each there is room for all of a payload but its last array: once that is written, the payload is whole.
"""

import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2flow.comm._deadline import Deadline
from m2flow.comm._mappings import Hold, Released
from m2flow.comm._segments import Pool, Slot
from m2flow.comm._tree import check
from m2flow.comm.payload import Encoded

# A page, so that the array begins with one.
_BEFORE_BYTES = 4096

Shape = int | Sequence[int]


class Blank(NamedTuple):
    """An array of the program's, the slot that it lies in and holds, and where in that a payload begins."""

    slot: Slot
    start: int
    array: weakref.ref[npt.NDArray[Any]]

    def freeze(self) -> None:
        """Makes it read-only: it is its readers' too."""
        array = self.array()
        if array is not None:
            array.flags.writeable = False


class Blanks:
    """The arrays of a program that lie in shared memory, by their addresses. Thread-safe."""

    def __init__(self, pool: Pool, released: Released) -> None:
        self._pool = pool
        self._released = released
        self._blanks: dict[int, Blank] = {}

    def empty(self, shape: Shape, dtype: npt.DTypeLike, deadline: Deadline) -> npt.NDArray[Any]:
        """Returns an array of any content; waits and raises as `Pool.take`, PayloadError for what does not travel."""
        wanted = np.dtype(dtype)
        outer = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
        if any(dim < 0 for dim in outer):
            raise ValueError(f"got shape {outer}, want dims of 0 or more")
        # A dtype may have dims of its own.
        dims = outer + wanted.shape
        check(np.empty((0,) * len(dims) or 0, wanted.base))
        size_bytes = math.prod(dims) * wanted.base.itemsize
        if not size_bytes:
            return np.empty(dims, wanted.base)
        slot = self._pool.take(_BEFORE_BYTES + size_bytes, deadline)
        data = slot.view(size_bytes, _BEFORE_BYTES)
        address = data.ctypes.data
        array = Hold(data, partial(self._gone, address, slot)).array().view(wanted.base).reshape(dims)
        self._blanks[address] = Blank(slot, _BEFORE_BYTES, weakref.ref(array))
        return array

    def _gone(self, address: int, slot: Slot) -> None:
        """Runs as a finaliser, anywhere."""
        self._blanks.pop(address, None)
        self._released.add(self, slot)

    def release(self, slots: Iterable[Slot]) -> None:
        """Ends the program's hold of slots, as the io thread or in its place."""
        for slot in slots:
            self._pool.let_go(slot)

    def under(self, encoded: Encoded) -> Blank | None:
        """Returns the array that is a payload's last; None where that is none of these, or too much is before it."""
        last = encoded.last_array() if self._blanks else None
        if last is None or last.start > _BEFORE_BYTES:
            return None
        blank = self._blanks.get(last.address)
        return None if blank is None else blank._replace(start=_BEFORE_BYTES - last.start)
