"""How the tensors of a version lie at its source, as it travels: whole, or as boxes of larger ones."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from m2flow.comm import _torch
from m2flow.comm._tree import check
from m2flow.comm.errors import PayloadError
from m2flow.comm.payload import Tree
from m2flow.comm.resharding import Box, Shard


class Laid(NamedTuple):
    """The box of a shard, the shape of its whole tensor, and an array of its dtype that has no elements."""

    box: Box
    whole: tuple[int, ...]
    kind: Tree


def packed_layout(weights: Mapping[str, Tree]) -> Tree:
    """Returns how each of the arrays or shards lies, in columns: it is read once for every version, at both ends."""
    numbers: list[int] = []
    # By name, as torch's and numpy's do not compare.
    kinds: dict[str, tuple[int, Tree]] = {}
    for value in weights.values():
        box, whole, kind = _layout(value)
        number, _ = kinds.setdefault(str(kind.dtype), (len(kinds), kind))
        numbers += (len(whole), *box.offset, *box.shape, *whole, number)
    return list(weights), np.array(numbers, np.int64), [kind for _, kind in kinds.values()]


def read_layout(packed: Tree) -> dict[str, Laid]:
    """Returns how each of the arrays or shards lies; the inverse of `packed_layout`."""
    names, numbers, kinds = packed
    flat = iter(numbers.tolist())
    found = {}
    for name in names:
        ndim = next(flat)
        offset, shape, whole = (tuple(itertools.islice(flat, ndim)) for _ in range(3))
        found[name] = Laid(Box(offset, shape), whole, kinds[next(flat)])
    return found


def _layout(value: Tree) -> Laid:
    data = value.data if isinstance(value, Shard) else value
    if not (isinstance(data, np.ndarray) or _torch.is_tensor(data)):
        raise PayloadError(f"got a {type(data).__name__} among weights, want arrays and tensors only")
    check(data)
    shape, kind = tuple(data.shape), _torch.new_empty(data, (0,))
    if isinstance(value, Shard):
        return Laid(Box(value.offset, shape), value.global_shape, kind)
    return Laid(Box((0,) * len(shape), shape), shape, kind)
