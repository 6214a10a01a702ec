"""Pipelines over a set of nodes, built layer by layer over its down-sets, for every chunk count at once."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from m2flow.sched import _table as tables
from m2flow.sched._problem import Problem, downsets
from m2flow.sched._table import Block, Floats, Grid, Ints, Table

_LARGE = 256  # with more device codes than this one chunk count is done at a time: columns that stay in cache


class Layers(Protocol):
    """What the search offers to a pipeline."""

    problem: Problem
    grid: Grid
    by_shares: bool

    def layer(self, nodes: int, alone: bool, beside: int) -> Table: ...

    def leaf(self, node: int, chunked: bool, alone: bool, beside: int) -> Table: ...

    def may_split(self, part: int, rest: int) -> bool: ...

    def apart(self, part: int, rest: int) -> int: ...


def pipelines(search: Layers, nodes: int, alone: bool, full: bool, beside: int) -> Iterator[Table]:
    """Every pipeline of two layers or more, one table for each last layer and each kind of first layer.

    Args:
        alone: Whether nothing else uses the devices, so that only seconds count.
        full: Whether only rows on all devices are wanted.
        beside: Mask of nodes that run beside all of this.
    """
    before, levels = search.problem.before, range(len(search.problem.chunk_counts))
    groups = [list(levels)] if search.grid.size <= _LARGE else [[level] for level in levels]
    for head in [-1, *(i for i in search.problem.tails if nodes >> i & 1 and not before[i] & nodes)]:
        for group in groups:
            yield from _Pipeline(search, nodes, alone, full, beside, head, group).tables()


def held_together(
    left: Table, a: Ints, right: Table, b: Ints, alone: bool, *, chained: bool
) -> tuple[Floats, Floats, Floats]:
    """Pending, base and peak of two that run on disjoint devices; of no interest, and zero, where nothing else does.

    Args:
        chained: Whether the right one loads only when input comes from the left one, whose offload is then hidden;
            else both load at once.
    """
    if alone:
        memory = tables.blank(len(a), left.base.shape[1])
        return tables.blank(len(a), 2), memory, memory
    first, second = left.pending[a], right.pending[b]
    pending = np.maximum(first, second)
    if chained:
        pending[:, 0] = first[:, 0] + second[:, 0]
    return pending, np.maximum(left.base[a], right.base[b]), np.maximum(left.peak[a], right.peak[b])


class _Pipeline:
    """The pipelines with one kind of first layer (`head`: the long-tailed node, or -1), at some chunk counts."""

    def __init__(
        self, search: Layers, nodes: int, alone: bool, full: bool, beside: int, head: int, levels: list[int]
    ) -> None:
        self._search, self._nodes, self._alone, self._beside, self._head = search, nodes, alone, beside, head
        self._how = "full" if full else "any"
        self._levels = levels
        self._layers: dict[int, Table] = {}

    def tables(self) -> Iterator[Table]:
        parts = downsets(self._nodes, self._search.problem.before)
        prefixes: dict[int, list[Table]] = {}
        for part in parts[:-1]:
            found = [self._start(part)]
            for earlier, tables_of in prefixes.items():
                layer = part ^ earlier
                if earlier & ~part == 0 and self._search.may_split(earlier, layer):
                    found += [self._append(prefix, earlier, layer, "any") for prefix in tables_of]
            last = all(later == self._nodes for later in parts if later & part == part and later != part)
            prefixes[part] = [t for t in self._shorten(found, last) if len(t)]
        for part, tables_of in prefixes.items():
            rest = self._nodes ^ part
            if self._search.may_split(part, rest):
                for prefix in tables_of:
                    yield self._close(self._append(prefix, part, rest, self._how))

    def _layer(self, nodes: int) -> Table:
        """The layer's rows at this pipeline's chunk counts."""
        if nodes not in self._layers:
            layer = self._search.layer(nodes, self._alone, self._beside | (self._nodes ^ nodes))
            if len(self._levels) < len(self._search.problem.chunk_counts):
                ends = np.array([self._levels[0], self._levels[-1] + 1]) * self._search.grid.size
                first, last = np.searchsorted(layer.n, ends)
                layer = layer.take(np.arange(first, last))
            self._layers[nodes] = layer
        return self._layers[nodes]

    def _start(self, part: int) -> Table:
        """The first layer: the long-tailed stage, which takes its whole input at once, or any other."""
        single = part.bit_length() - 1 if part & (part - 1) == 0 else -1
        problem = self._search.problem
        if (self._head >= 0 and single != self._head) or (self._head < 0 and single in problem.tails):
            return tables.empty(problem.kinds)
        if self._head >= 0:
            whole = self._search.leaf(self._head, False, self._alone, self._beside | (self._nodes ^ part))
            rows = np.tile(np.arange(len(whole)), len(self._levels))
            layer = whole.take(rows)
            layer = replace(layer, n=layer.n + np.repeat(self._levels, len(whole)) * self._search.grid.size)
            columns = np.zeros(len(layer)), np.zeros(len(layer)), layer.seconds
        else:
            layer = whole = self._layer(part)
            rows = np.arange(len(whole))
            columns = layer.seconds, layer.seconds, tables.blank(len(layer))
        return Table(
            n=layer.n,
            seconds=layer.seconds,
            pending=layer.pending,
            base=layer.base,
            peak=layer.peak,
            shares=layer.shares,
            block=tables.same(len(layer), 0),
            left=rows,
            right=rows,
            blocks=(Block("head" if self._head >= 0 else "start", (whole,)),),
            total=columns[0],
            slowest=columns[1],
            head=columns[2],
        )

    def _append(self, prefix: Table, earlier: int, nodes: int, how: str) -> Table:
        layer, grid = self._layer(nodes), self._search.grid
        base_n = grid.base(prefix.n) if len(self._levels) > 1 else self._levels[0] * grid.size
        a, b = tables.pairs(prefix, layer, grid, how, base_n)
        assert prefix.total is not None
        assert prefix.slowest is not None
        assert prefix.head is not None
        pending, base, peak = held_together(prefix, a, layer, b, self._alone, chained=True)
        seconds = layer.seconds[b]
        return Table(
            n=(prefix.n - base_n)[a] + layer.n[b],
            seconds=seconds,
            pending=pending,
            base=base,
            peak=peak,
            shares=_shares(prefix.shares, a, layer.shares, b, self._search.apart(earlier, nodes)),
            block=tables.same(len(a), 0),
            left=a,
            right=b,
            blocks=(Block("prefix", (prefix, layer)),),
            total=prefix.total[a] + seconds,
            slowest=np.maximum(prefix.slowest[a], seconds),
            head=prefix.head[a] if self._head >= 0 else tables.blank(len(a)),
        )

    def _shorten(self, found: list[Table], last: bool) -> list[Table]:
        """Drops prefixes that cannot win; not worth sorting where only one layer is to come."""
        if last:
            return found
        joined = tables.concat(found, self._search.problem.kinds)
        plain = self._alone and not self._search.by_shares and self._head < 0
        return [tables.front(joined) if plain else tables.pareto(joined, self._search.by_shares)]

    def _close(self, prefix: Table) -> Table:
        assert prefix.total is not None
        assert prefix.slowest is not None
        assert prefix.head is not None
        size, counts = self._search.grid.size, np.array(self._search.problem.chunk_counts)
        level = prefix.n // size if len(self._levels) > 1 else tables.same(len(prefix), self._levels[0])
        chunks = counts[level] if len(self._levels) > 1 else counts[self._levels[0]]
        if self._head < 0:
            seconds = prefix.total + (chunks - 1) * prefix.slowest
        else:
            seconds = prefix.total + self._released(prefix.head, prefix.slowest, level)
        return Table(
            n=prefix.n - level * size,
            seconds=seconds,
            pending=prefix.pending,
            base=prefix.base,
            peak=prefix.peak,
            shares=prefix.shares,
            block=tables.same(len(prefix), 0),
            left=np.arange(len(prefix)),
            right=level,
            blocks=(Block("layers", (prefix,)),),
            busy=np.maximum(prefix.head, chunks * prefix.slowest),
        )

    def _released(self, whole: Floats, slowest: Floats, level: Ints) -> Floats:
        """max_j A(j) + (K - j) x slowest: when the layers behind a long-tailed stage are through, fill left out."""
        out = np.full(len(whole), -np.inf)
        for index in self._levels:
            chunks = self._search.problem.chunk_counts[index]
            rows = np.flatnonzero(level == index)
            for j, fraction in enumerate(self._search.problem.tails[self._head][chunks], start=1):
                out[rows] = np.maximum(out[rows], whole[rows] * fraction + (chunks - j) * slowest[rows])
        return out


def _shares(left: Ints, a: Ints, right: Ints, b: Ints, apart: int) -> Ints:
    """What two layers share, and that they run side by side; without a gather where all rows are alike."""
    if len(left) and len(right) and left.strides[0] == 0 and (right == right[0]).all():
        return tables.same(len(a), int(left[0] | right[0] | apart))
    return left[a] | right[b] | apart
