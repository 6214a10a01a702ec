"""Which part of a tensor comes from whom, when those who give and those who take have cut it differently.

A tensor is a box of indices; a shard is a smaller box inside it. What a rank wants is covered by overlaps with the
shards that others have, each element once, however rows, columns or copies are spread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from m2flow.comm._registry import register
from m2flow.comm.payload import Tree


class Box(NamedTuple):
    """Indices `offset[d]` to `offset[d] + shape[d]` of every dim d of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def slices(self, inside: "Box") -> tuple[slice, ...]:
        """Returns where this box lies in an array that holds the box `inside`."""
        starts = [own - base for own, base in zip(self.offset, inside.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def num_elements(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)


@register
@dataclass(frozen=True)
class Shard:
    """The part of a tensor that a rank has: `data` lies at `offset` in a tensor of shape `global_shape`."""

    data: Tree
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.data.shape)
        fits = len(shape) == len(self.offset) == len(self.global_shape) and all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(self.offset, shape, self.global_shape, strict=True)
        )
        if not fits:
            raise ValueError(f"got a shard of shape {shape} at {self.offset}, want it inside {self.global_shape}")


class Piece(NamedTuple):
    """A box of the whole tensor and the source that gives it."""

    source: str
    box: Box


def run(box: Box, inside: Box) -> tuple[int, int] | None:
    """Returns where the elements of `box` lie in an array of the box `inside`, counted in order: first and number.

    None where others lie between them.
    """
    start, count, stride = 0, 1, 1
    whole = True
    for own, size, base, outer in zip(
        reversed(box.offset), reversed(box.shape), reversed(inside.offset), reversed(inside.shape), strict=True
    ):
        if size != 1 and not whole:
            return None
        start += (own - base) * stride
        count *= size
        whole = whole and size == outer
        stride *= outer
    return start, count


def overlap(a: Box, b: Box) -> Box | None:
    """Returns what two boxes share; None when nothing."""
    starts = tuple(map(max, a.offset, b.offset))
    ends = [
        min(first + size, second + other)
        for first, size, second, other in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    ]
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, shape) if all(size > 0 for size in shape) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """Returns boxes that together hold what is in `box` and not in `hole`, each element once."""
    shared = overlap(box, hole)
    if shared is None:
        return [box]
    rest = []
    offset, shape = list(box.offset), list(box.shape)
    for dim in range(len(offset)):
        before = shared.offset[dim] - offset[dim]
        after = offset[dim] + shape[dim] - shared.offset[dim] - shared.shape[dim]
        for start, size in ((offset[dim], before), (shared.offset[dim] + shared.shape[dim], after)):
            if size:
                rest.append(
                    Box((*offset[:dim], start, *offset[dim + 1 :]), (*shape[:dim], size, *shape[dim + 1 :])),
                )
        offset[dim], shape[dim] = shared.offset[dim], shared.shape[dim]
    return rest


def cover(wanted: Box, shards: Sequence[tuple[str, Box]]) -> list[Piece]:
    """Returns pieces of `shards` that together are `wanted`, each element once.

    Earlier shards are preferred, so a caller that rotates them spreads the load over copies. Raises ValueError naming a
    part that nobody has.
    """
    missing = [wanted] if wanted.num_elements() else []
    pieces = []
    for source, shard in shards:
        left = []
        for box in missing:
            shared = overlap(box, shard)
            if shared is None:
                left.append(box)
            else:
                pieces.append(Piece(source, shared))
                left += subtract(box, shared)
        missing = left
    if missing:
        raise ValueError(f"nobody has offset {missing[0].offset} shape {missing[0].shape}, want shards of the whole")
    return pieces
