"""Long pipelines of a large graph: runs of one topological order as layers, by the least period that fits.

For a chunk count and a period, a run needs the fewest units with which its chunk takes no longer; the cheapest way to
cut the order into runs is a shortest path. Bisection finds the least period whose cut fits the devices; a few longer
periods, which need fewer layers, are tried as well, and spare units go to the slowest layers.
"""

from collections.abc import Iterator

import numpy as np

from m2flow.sched._closed_form import iteration_seconds
from m2flow.sched._coarse import BlockLeaves, row_of_code
from m2flow.sched._problem import NO_PINS, Problem, independent
from m2flow.sched._table import Floats
from m2flow.sched._tree import Beside, Leaf, Pipe, Tree

_STEPS = 24
_LONGER = (1.0, 1.01, 1.03, 1.06)
_LAYER_PRICE = 0.02  # units that a layer more must save: it lengthens the fill


class Stretched:
    """Pipelines over one order of the nodes.

    Args:
        alone: Whether every layer is one node, as a spatial plan needs.
    """

    def __init__(self, problem: Problem, order: list[int], alone: bool) -> None:
        self._problem, count = problem, len(order)
        longest = 1 if alone else count
        self._runs = [(i, j) for j in range(1, count + 1) for i in range(max(0, j - longest), j)]
        # The runs; a leaf's node is an index into them.
        self.blocks = tuple(tuple(order[i:j]) for i, j in self._runs)
        self._count = count
        leaves = BlockLeaves(problem, self.blocks)
        self._rows = [leaves(r, True, 0, NO_PINS) for r in range(len(self._runs))]
        self._picks = [row_of_code(r, problem.grid.size * len(problem.chunk_counts)) for r in self._rows]

    def plans(self) -> Iterator[Tree]:
        """The best pipeline of each chunk count, if one fits."""
        for level in range(len(self._problem.chunk_counts)):
            times = np.array([self._times(r, level) for r in range(len(self._runs))])
            low, high = 0.0, float(np.nanmax(np.where(np.isfinite(times), times, np.nan)))
            if self._cut(times, high) is None:
                continue
            for _ in range(_STEPS):
                middle = (low + high) / 2
                low, high = (low, middle) if self._cut(times, middle) is not None else (middle, high)
            trees = [self._tree(times, level, high * factor) for factor in _LONGER]
            yield min(trees, key=lambda tree: iteration_seconds(tree, {}))

    def _times(self, run: int, level: int) -> Floats:
        """[units + 1] chunk seconds with at most so many units; infinite where it does not fit."""
        size = self._problem.grid.size
        picks = self._picks[run][level * size : (level + 1) * size]
        rows = self._rows[run]
        good = picks >= 0
        seconds = np.full(size, np.inf)
        fits = (rows.run[picks[good]] <= 1 + 1e-9).all(axis=1)
        seconds[good] = np.where(fits, rows.seconds[picks[good]], np.inf)
        return np.asarray(np.minimum.accumulate(seconds))

    def _cut(self, times: Floats, period: float) -> list[tuple[int, int]] | None:
        """(run, units) of the cheapest cut with no layer over the period; None if it needs more than there is."""
        fast = times <= period
        need = np.where(fast.any(axis=1), fast.argmax(axis=1), np.inf)
        cost = np.full(self._count + 1, np.inf)
        cost[0], via = 0.0, [0] * (self._count + 1)
        for run, (i, j) in enumerate(self._runs):
            total = cost[i] + need[run] + _LAYER_PRICE
            if total < cost[j]:
                cost[j], via[j] = total, run
        found: list[tuple[int, int]] = []
        end = self._count
        while end and np.isfinite(cost[end]):
            found.insert(0, (via[end], int(need[via[end]])))
            end = self._runs[via[end]][0]
        units = sum(u for _, u in found)
        return found if np.isfinite(cost[self._count]) and units <= self._problem.grid.full else None

    def _tree(self, times: Floats, level: int, period: float) -> Pipe:
        layers = self._cut(times, period)
        assert layers is not None
        spare = self._problem.grid.full - sum(u for _, u in layers)
        for _ in range(spare):
            slowest = max(range(len(layers)), key=lambda i: times[layers[i][0], layers[i][1]])
            run, units = layers[slowest]
            layers[slowest] = run, units + 1
        leaves = [self._leaf(run, units, level) for run, units in layers]
        parts: list[Tree] = []
        together: list[Leaf] = []
        for leaf in leaves:
            if together and not all(self._independent(leaf, other) for other in together):
                parts.append(_side_by_side(together))
                together = []
            together.append(leaf)
        parts.append(_side_by_side(together))
        return Pipe(tuple(parts), self._problem.chunk_counts[level], self._problem.grid.full)

    def _independent(self, one: Leaf, other: Leaf) -> bool:
        mine, theirs = (sum(1 << i for i in self.blocks[leaf.node]) for leaf in (one, other))
        return independent(mine, theirs, self._problem.before)

    def _leaf(self, run: int, units: int, level: int) -> Leaf:
        rows, size = self._rows[run], self._problem.grid.size
        codes = self._picks[run][level * size : (level + 1) * size]
        usable = [u for u in range(units + 1) if codes[u] >= 0 and (rows.run[codes[u]] <= 1 + 1e-9).all()]
        best = min(usable, key=lambda u: rows.seconds[codes[u]])
        row, block = int(codes[best]), self.blocks[run]
        name = "+".join(self._problem.names[i] for i in block)
        # Members of a block are looked up again by its units: those of its row.
        units = int(rows.n[row]) % size if len(block) > 1 else units
        chunks = self._problem.chunk_counts[level]
        return Leaf.of(rows, row, node=run, name=name, offloaded=False, chunks=chunks, units=units)


def _side_by_side(leaves: list[Leaf]) -> Tree:
    return leaves[0] if len(leaves) == 1 else Beside(tuple(leaves), sum(leaf.units for leaf in leaves))
