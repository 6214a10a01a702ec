"""Tables of partial plans, and the joins and prunings that the search is made of.

A row is one way to run a set of nodes on some devices: how many (a code, see `Grid`), seconds, seconds of switching
still to be charged by whoever takes turns with it, and bytes on one device as fractions of its memory. A table
remembers where its rows come from, so that a plan can be read back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_MANY = 20_000  # from so many rows on a column of one value is a view of it
_SHORT = 24  # up to so many rows of a key are compared each with each, all keys at once

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Grid:
    """Device counts of several kinds as one number: mixed radix, so that codes add like vectors.

    In a pipeline a row belongs to a chunk count as well: its code is then `level * size` larger, where `level` is the
    chunk count's index, so that one table holds the rows of all chunk counts and one join serves them all.

    Args:
        shape: Units of each kind, one or more.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.strides = np.cumprod([1, *[s + 1 for s in shape[:-1]]]).astype(np.int64)
        self.size = int(np.prod([s + 1 for s in shape]))
        codes = np.arange(self.size, dtype=np.int64)
        self.vectors = (codes[:, None] // self.strides) % (np.array(shape, dtype=np.int64) + 1)
        self.full = self.size - 1

    def fits(self, a: Ints, b: Ints) -> NDArray[np.bool_]:
        """Whether the counts add up to no more than there are; elementwise on codes without level."""
        return np.asarray((self.vectors[a] + self.vectors[b] <= np.array(self.shape)).all(axis=1))

    def base(self, n: Ints) -> Ints:
        """The level's part of codes."""
        return n // self.size * self.size


@dataclass(frozen=True)
class Rows:
    """Every way to run one node at one chunk size.

    Args:
        n: [R] codes with their levels, ascending; what needs fewer devices is listed under larger counts too.
        seconds: [R] of one chunk, alone in its turn.
        switch_s: Onload and offload of its groups.
        keep, off, run: [R, kinds] fractions of a device's memory held while idle on it, after offload, and running.
        can_offload: Whether it may be offloaded.
        picks: [R, groups of the node] devices of each group.
        batches: [R] sub-batches in flight of a cycle that is spread over its devices; 0 for all in turns.
    """

    n: Ints
    seconds: Floats
    switch_s: tuple[float, float]
    keep: Floats
    off: Floats
    run: Floats
    can_offload: bool
    picks: Ints
    batches: Ints


@dataclass(frozen=True)
class Block:
    """Where rows come from: the operator, and the tables that `Table.left` and `Table.right` point into."""

    op: str
    tables: tuple["Table", ...]
    node: int = -1
    rows: "Rows | None" = None


@dataclass(slots=True)
class Table:
    """Rows of partial plans, sorted by `n` unless said otherwise. Not changed once made.

    Args:
        n: [R] codes.
        seconds: [R].
        pending: [R, 2] seconds of onload and of offload, to be charged once per turn.
        base: [R, kinds] fraction of a device held while others run.
        peak: [R, kinds] fraction of a device held at most.
        shares: [R] bit 1: different groups take turns on a device; bit 2: different groups run side by side.
        block: [R] index into `blocks`.
        left, right: [R] rows of the block's tables; of a leaf, the row of its choice and whether it is offloaded; of a
            pipeline, the row of its prefix and the index of its chunk count.
        total, slowest, head, busy: [R] of a pipeline only: sum of chunk seconds, the largest of them, the seconds of
            its long-tailed first stage, and the busiest stage's seconds in an iteration.
    """

    n: Ints
    seconds: Floats
    pending: Floats
    base: Floats
    peak: Floats
    shares: Ints
    block: Ints
    left: Ints
    right: Ints
    blocks: tuple[Block, ...]
    total: Floats | None = None
    slowest: Floats | None = None
    head: Floats | None = None
    busy: Floats | None = None

    def __len__(self) -> int:
        return len(self.n)

    def take(self, rows: NDArray[np.bool_] | Ints) -> "Table":
        extra = [None if c is None else c[rows] for c in (self.total, self.slowest, self.head, self.busy)]
        return Table(
            self.n[rows], self.seconds[rows], self.pending[rows], self.base[rows], self.peak[rows],
            self.shares[rows], self.block[rows], self.left[rows], self.right[rows], self.blocks, *extra,
        )  # fmt: skip


def empty(kinds: int) -> Table:
    ints, floats, memory = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros((0, kinds))
    columns = ints, floats, np.zeros((0, 2)), memory, memory, ints, ints, ints, ints
    return Table(*columns, (), floats, floats, floats)


def blank(count: int, width: int = 0) -> Floats:
    """[count] or [count, width] zeros, not to be written to; where there are many they take no room."""
    shape = (count, width) if width else count
    return np.zeros(shape) if count < _MANY else np.broadcast_to(0.0, shape)


def same(count: int, value: int) -> Ints:
    """[count] times one whole number, not to be written to; where there are many they take no room."""
    return np.full(count, value) if count < _MANY else np.broadcast_to(np.int64(value), count)


def concat(tables: Sequence[Table], kinds: int) -> Table:
    """All rows of the tables, unsorted; `total`, `slowest`, `head` and `busy` are kept if every table has them."""
    tables = [t for t in tables if len(t)]
    if len(tables) < 2:
        return tables[0] if tables else empty(kinds)
    offsets = np.cumsum([0] + [len(t.blocks) for t in tables])
    extra = []
    for name in ("total", "slowest", "head", "busy"):
        columns = [getattr(t, name) for t in tables]
        extra.append(None if any(c is None for c in columns) else np.concatenate(columns))
    return Table(
        np.concatenate([t.n for t in tables]),
        np.concatenate([t.seconds for t in tables]),
        np.concatenate([t.pending for t in tables]),
        np.concatenate([t.base for t in tables]),
        np.concatenate([t.peak for t in tables]),
        np.concatenate([t.shares for t in tables]),
        np.concatenate([t.block + o for t, o in zip(tables, offsets[:-1], strict=True)]),
        np.concatenate([t.left for t in tables]),
        np.concatenate([t.right for t in tables]),
        tuple(b for t in tables for b in t.blocks),
        *extra,
    )


def pairs(left: Table, right: Table, grid: Grid, how: str, base: Ints | int | None = None) -> tuple[Ints, Ints]:
    """Row pairs of two tables, `right` sorted by n.

    Args:
        how: "same": equal n; "full": n adds up to all devices; "any": n adds up to no more than all. Levels are equal.
        base: The level's part of `left.n`, where it is known.
    """
    base = grid.base(left.n) if base is None else base
    several = len(grid.shape) > 1
    if how == "full" and len(right) and right.n[-1] - right.n[0] == len(right) - 1 and (np.diff(right.n) == 1).all():
        rows = 2 * base + (grid.full - right.n[0]) - left.n  # one row a code, without gaps: no need to look it up
        found = np.flatnonzero((rows >= 0) & (rows < len(right)))
        return found, rows[found]
    if how == "any":
        start = np.searchsorted(right.n, base, side="left") + np.zeros_like(left.n)
        stop = np.searchsorted(right.n, base + grid.full - (0 if several else left.n - base), side="right")
        stop = stop + np.zeros_like(left.n) if several else stop
    else:
        wanted = left.n if how == "same" else 2 * base + grid.full - left.n
        start = np.searchsorted(right.n, wanted, side="left")
        stop = np.searchsorted(right.n, wanted, side="right")
    rows_left, rows_right = _ranges(start, stop)
    if how == "any" and several:
        levels = np.broadcast_to(base, left.n.shape)[rows_left]
        good = grid.fits(left.n[rows_left] - levels, right.n[rows_right] - levels)
        return rows_left[good], rows_right[good]
    return rows_left, rows_right


def _ranges(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Each i repeated for every number from start[i] up to stop[i], and those numbers."""
    count = stop - start
    if len(count) and (count == 1).all():
        return np.arange(len(count)), start
    rows_left = np.repeat(np.arange(len(count)), count)
    rows_right = np.arange(len(rows_left)) - np.repeat(np.cumsum(count) - count - start, count)
    return rows_left, rows_right


def fastest(table: Table, by_shares: bool) -> Table:
    """The fastest row of each device count (and of each kind of sharing); ties go to the earlier row."""
    if len(table) < 2:
        return table
    key = table.n * 4 + table.shares if by_shares else table.n
    order = np.lexsort((table.seconds, key))
    first = np.ones(len(order), dtype=bool)
    first[1:] = key[order[1:]] != key[order[:-1]]
    return table.take(order[first])


def pareto(table: Table, by_shares: bool) -> Table:
    """The rows of each device count that no other row of it beats or equals in seconds, pending, base and peak."""
    if len(table) < 2:
        return table
    columns = [table.seconds[:, None], table.pending, table.base, table.peak]
    if table.total is not None and table.slowest is not None and table.head is not None:
        columns = [table.total[:, None], table.slowest[:, None], table.head[:, None], *columns[1:]]
    costs = np.concatenate(columns, axis=1)
    key = table.n * 4 + table.shares if by_shares else table.n
    order = np.lexsort((costs.sum(axis=1), costs[:, 0], key))
    key = key[order]
    bounds = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1], [True]]))
    longest = int(np.diff(bounds).max())
    if longest == 1:
        return table.take(order)
    if longest <= _SHORT:
        return table.take(order[_undominated(costs[order], key, longest)])
    kept = [_skyline(costs, order[a:b]) for a, b in pairwise(bounds)]
    return table.take(np.concatenate(kept))


def front(table: Table) -> Table:
    """Of pipeline prefixes with nothing beside them: per device count, the front of (total, slowest)."""
    if len(table) < 2 or table.total is None or table.slowest is None:
        return table
    order = np.lexsort((table.slowest, table.total, table.n))
    slowest = table.slowest[order]
    shifted = slowest - table.n[order] * (2.0 * float(slowest.max()) + 1.0)  # later groups are lower
    before = np.r_[np.inf, np.minimum.accumulate(shifted)[:-1]]
    return table.take(order[shifted < before])


def _undominated(costs: Floats, key: Ints, longest: int) -> NDArray[np.bool_]:
    """Which rows no other row of their key dominates; keys stand together, `longest` rows at most."""
    good = np.ones(len(key), dtype=bool)
    for shift in range(1, longest):
        same = key[shift:] == key[:-shift]
        earlier, later = costs[:-shift], costs[shift:]
        good[shift:] &= ~(same & (earlier <= later).all(axis=1))
        good[:-shift] &= ~(same & (later <= earlier).all(axis=1) & (later < earlier).any(axis=1))
    return good


def _skyline(costs: Floats, rows: Ints) -> Ints:
    """Rows (sorted by the first cost) that no other dominates."""
    kept = []
    while len(rows):
        best = rows[0]
        kept.append(best)
        rows = rows[1:]
        rows = rows[(costs[rows] < costs[best]).any(axis=1)]
    return np.array(kept, dtype=np.int64)
