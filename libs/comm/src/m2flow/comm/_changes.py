"""What differs between two versions of an array, element by element and to the bit: the optional delta of weights."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2flow.comm import _torch
from m2flow.comm._registry import register
from m2flow.comm.payload import Tree

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@register
class Changes(NamedTuple):
    """The elements that changed: where, shape [k] counted in the flat array, and what they are now, as bytes."""

    indices: npt.NDArray[Any]
    values: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.indices.nbytes + self.values.nbytes


def changes(old: Tree, new: Tree) -> Changes | None:
    """Returns what makes `new` of `old`; None where sending the whole of `new` is no more, or they are not alike."""
    if type(old) is not type(new) or old.dtype != new.dtype or old.shape != new.shape:
        return None
    before, after = _elements(old), _elements(new)
    differs = before != after
    indices = np.flatnonzero(differs.any(1) if differs.ndim > 1 else differs)
    indices = indices.astype(np.uint32 if len(before) <= 1 << 32 else np.uint64)
    found = Changes(indices, np.ascontiguousarray(after[indices]).view(np.uint8).reshape(-1))
    return found if found.nbytes < after.nbytes else None


def changed(old: Tree, found: Changes) -> Tree:
    """Returns `old` with its changes, as an array of its own; raises IndexError or ValueError where they do not fit."""
    # In order in memory, or its elements would be a copy.
    new = old.contiguous().clone() if _torch.is_tensor(old) else np.array(old, order="C")
    elements = _elements(new)
    elements[found.indices] = found.values.view(elements.dtype).reshape(-1, *elements.shape[1:])
    return new


def _elements(array: Tree) -> npt.NDArray[Any]:
    """Returns an array's elements in order as unsigned words, which compare by their bits; shape [n] or [n, bytes]."""
    flat, word = _torch.bytes_of(array), _WORDS.get(array.itemsize)
    return flat.view(word) if word is not None else flat.reshape(-1, array.itemsize)
