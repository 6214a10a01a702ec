"""Arrays that a program fills where a peer will read them: their bytes are in shared memory before they are put.

Before each there is room for all of a payload but its last array: once that is written, the payload is whole.
"""

import weakref
from collections.abc import Sequence
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


class _Loan:
    """The slot of one array, which the program holds for as long as it refers to the array."""

    def __init__(self, pool: Pool, slot: Slot) -> None:
        self._pool = pool
        self.slot = slot
        self.array: weakref.ref[npt.NDArray[Any]] | None = None

    def release(self, blocks: Sequence[BlockRef]) -> None:
        """Ends the program's hold, as the io thread or in its place."""
        self._pool.let_go(self.slot)


class Loans:
    """The arrays that have been lent to the program and not been put yet, by their addresses. Thread-safe."""

    def __init__(self, pool: Pool, released: Released) -> None:
        self._pool = pool
        self._released = released
        self._loans: dict[int, _Loan] = {}

    def empty(self, shape: Shape, dtype: npt.DTypeLike, deadline: Deadline) -> npt.NDArray[Any]:
        """Lends an array of any content; waits and raises as `Pool.take`, or as `encode` and numpy for what is none."""
        wanted = np.broadcast_to(np.empty((), dtype), shape)
        check(wanted)
        if not wanted.size:
            return np.empty(wanted.shape, wanted.dtype)
        slot = self._pool.take(_BEFORE_BYTES + wanted.nbytes, deadline)
        loan = _Loan(self._pool, slot)
        data = slot.view(wanted.nbytes, _BEFORE_BYTES)
        address = data.ctypes.data
        block = BlockRef(slot.segment.id, slot.offset_bytes + _BEFORE_BYTES, wanted.nbytes)

        def report() -> None:
            self._loans.pop(address, None)
            self._released.add(loan, block)

        array = Hold(data, report).array().view(wanted.dtype).reshape(wanted.shape)
        loan.array = weakref.ref(array)
        self._loans[address] = loan
        return array

    def claim(self, encoded: Encoded) -> tuple[Slot, int] | None:
        """Returns the slot in which a payload's last array lies already, and where in it the payload begins.

        None where it lies in none, was put before, or has too much before it. The array is read-only from now on.
        """
        if not self._loans:
            return None
        start, address = encoded.last_place()
        # Nobody else gets it by then: two threads may put the same.
        if start > _BEFORE_BYTES or (loan := self._loans.pop(address, None)) is None:
            return None
        array = loan.array() if loan.array is not None else None
        if array is not None:
            array.flags.writeable = False
        return loan.slot, _BEFORE_BYTES - start
