"""Arrays that a program fills where a peer will read them: their bytes are in shared memory before they are put.

Before each there is room for all of a payload but its last array: once that is written, the payload is whole.
"""

import math
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from m2flow.comm._deadline import Deadline
from m2flow.comm._mappings import BlockRef, Hold, Released
from m2flow.comm._segments import Pool, Slot
from m2flow.comm._tree import check
from m2flow.comm.payload import Encoded

# A page, so that the array begins with one.
_BEFORE_BYTES = 4096

Shape = int | Sequence[int]


@dataclass(frozen=True, eq=False)
class _Loan:
    """The program's hold of a slot, for as long as it refers to the array there."""

    pool: Pool
    slot: Slot

    def release(self, blocks: Sequence[BlockRef]) -> None:
        """Ends it, as the io thread or in its place."""
        self.pool.let_go(self.slot)


class Loans:
    """The arrays that the program has, by their addresses. Thread-safe."""

    def __init__(self, pool: Pool, released: Released) -> None:
        self._pool = pool
        self._released = released
        self._loans: dict[int, tuple[Slot, weakref.ref[npt.NDArray[Any]]]] = {}

    def empty(self, shape: Shape, dtype: npt.DTypeLike, deadline: Deadline) -> npt.NDArray[Any]:
        """Lends an array of any content; waits and raises as `Pool.take`, PayloadError for what does not travel."""
        dims = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
        if any(dim < 0 for dim in dims):
            raise ValueError(f"got shape {dims}, want dims of 0 or more")
        # A dtype may have dims of its own.
        outer = (0,) * len(dims) or (0,)
        like = np.empty(outer, dtype)
        check(like)
        dims = (*dims, *like.shape[len(outer) :])
        size_bytes = math.prod(dims) * like.itemsize
        if not size_bytes:
            return np.empty(dims, like.dtype)
        slot = self._pool.take(_BEFORE_BYTES + size_bytes, deadline)
        data = slot.view(size_bytes, _BEFORE_BYTES)
        hold = Hold(data, partial(self._ended, data.ctypes.data, _Loan(self._pool, slot)))
        array = hold.array().view(like.dtype).reshape(dims)
        self._loans[data.ctypes.data] = slot, weakref.ref(array)
        return array

    def _ended(self, address: int, loan: _Loan) -> None:
        """Runs as a finaliser, anywhere."""
        self._loans.pop(address, None)
        self._released.add(loan, BlockRef(loan.slot.segment.id, loan.slot.offset_bytes, loan.slot.size_bytes))

    def hold(self, encoded: Encoded) -> tuple[Slot, int] | None:
        """Holds the slot in which a payload's last array lies; returns it, and where in it the payload begins.

        None where it lies in none, has a reader or has too much before it. The array is read-only from now on.
        """
        if not self._loans:
            return None
        start, address = encoded.last_place()
        loan = self._loans.get(address)
        if loan is None or start > _BEFORE_BYTES or not self._pool.hold_alone(loan[0]):
            return None
        array = loan[1]()
        if array is not None:
            array.flags.writeable = False
        return loan[0], _BEFORE_BYTES - start
