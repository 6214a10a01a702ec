"""Exact search over the plans that `_tree` describes, for one choice of pins.

Down-set by down-set: a set of nodes is cut at each of its down-sets, and the best rows for the two parts are joined.
What shares its devices with something else keeps a Pareto front of (seconds, bytes); what does not keeps its fastest.
A pipeline is built layer by layer over down-sets, keeping the front of (sum, slowest), so that nested pairs are never
collapsed into one number. Everything is memoised, and vectorised over device counts.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from m2flow.sched import _table as tables
from m2flow.sched._pipelines import held_together, pipelines
from m2flow.sched._problem import Pins, Problem, downsets, independent
from m2flow.sched._table import Block, Rows, Table

_FITS = 1.0 + 1e-9


class Search:
    """The search for one problem, one mode ("" for any) and one choice of pins."""

    def __init__(self, problem: Problem, mode: str, pins: Pins) -> None:
        self.problem = problem
        self.grid = problem.grid
        self._pins = pins
        self._turns = mode != "spatial"
        self._splits = mode != "temporal"
        self.by_shares = mode == "hybrid"
        self._memo: dict[tuple[str, int, bool, bool, int], Table] = {}
        self._first = {g: next(i for i, gs in enumerate(problem.groups) if g in gs) for g in pins.units}

    def whole(self) -> Iterator[Table]:
        """Tables of whole plans on all devices, one for each way to make the first cut, not reduced."""
        yield from self._ways(self.problem.everything, True, True, 0)

    def _root(self, nodes: int, alone: bool, full: bool, beside: int) -> Table:
        beside = self.problem.relevant(nodes, beside)
        key = ("root", nodes, alone, full, beside)
        if key not in self._memo:
            self._memo[key] = self._reduce(list(self._ways(nodes, alone, full, beside)), alone)
        return self._memo[key]

    def _ways(self, nodes: int, alone: bool, full: bool, beside: int) -> Iterator[Table]:
        problem = self.problem
        lean = problem.unlimited  # nothing has to leave: what shares its devices is as good as alone on them
        if nodes & (nodes - 1) == 0:
            leaf = self.leaf(nodes.bit_length() - 1, False, alone, beside)
            yield leaf.take(leaf.n == self.grid.full) if full else leaf
            return
        lowest = nodes & -nodes
        for part in downsets(nodes, problem.before)[:-1]:
            rest = nodes ^ part
            if self._may_turn(part, rest):
                left, right = self._root(part, lean, full, beside), self._root(rest, lean, full, beside)
                yield self._turn(nodes, left, right, part)
            if not self.may_split(part, rest):
                continue
            how = "full" if full else "any"
            if part & lowest and independent(part, rest, problem.before):
                left = self._root(part, alone, False, beside | rest)
                right = self._root(rest, alone, False, beside | part)
                yield self._side("beside", left, right, how, alone, self.apart(part, rest))
            if any(a & part and b & rest for a, b in problem.barriers):
                left = self._root(part, alone, False, beside)
                right = self._root(rest, alone, False, beside)
                yield self._side("apart", left, right, how, alone, self.apart(part, rest))
        if problem.chunk_counts and problem.pipelined(nodes):
            yield from pipelines(self, nodes, alone, full, beside)

    def layer(self, nodes: int, alone: bool, beside: int) -> Table:
        """Ways to run one chunk of some nodes as one layer of a pipeline, for every chunk and device count."""
        beside = self.problem.relevant(nodes, beside)
        key = ("layer", nodes, alone, False, beside)
        if key in self._memo:
            return self._memo[key]
        if nodes & (nodes - 1) == 0:
            found = [self.leaf(nodes.bit_length() - 1, True, alone, beside)]
        else:
            found = []
            lowest, lean = nodes & -nodes, self.problem.unlimited
            for part in downsets(nodes, self.problem.before)[:-1]:
                rest = nodes ^ part
                if self._may_turn(part, rest):
                    left = self.layer(part, lean, beside)
                    found.append(self._turn(nodes, left, self.layer(rest, lean, beside), part))
                if part & lowest and self.may_split(part, rest) and independent(part, rest, self.problem.before):
                    left = self.layer(part, alone, beside | rest)
                    right = self.layer(rest, alone, beside | part)
                    found.append(self._side("beside", left, right, "any", alone, self.apart(part, rest)))
        self._memo[key] = self._reduce(found, alone)
        return self._memo[key]

    def leaf(self, node: int, chunked: bool, alone: bool, beside: int) -> Table:
        """Ways to run one node, for the whole iteration or for one chunk of every chunk count."""
        problem = self.problem
        rows = problem.leaves(node, chunked, problem.relevant(1 << node, beside), self._pins)
        groups = problem.groups[node]
        pinned = [g for g in groups if g in self._pins.units]
        if pinned:
            options = [all(g in self._pins.offloaded for g in pinned)]
            options = [o for o in options if rows.can_offload or not o]
        else:
            options = [False] if alone or problem.unlimited or not rows.can_offload else [False, True]
        counted = len(groups) > 1 or not pinned or self._first[pinned[0]] == node
        found = [self._option(node, rows, offloaded, counted) for offloaded in options]
        if not found:
            return tables.empty(problem.kinds)
        if len(found) == 1:
            return found[0] if _once(found[0]) else self._reduce(found, alone)
        both = tables.concat(found, problem.kinds)
        if sum(rows.switch_s) > 0 and (rows.off < rows.keep).any(axis=1).all() and _once(found[0]):
            return both.take(np.argsort(both.n, kind="stable"))  # neither dominates the other
        return tables.pareto(both, self.by_shares)

    def _option(self, node: int, rows: Rows, offloaded: bool, counted: bool) -> Table:
        """The rows of a node that stays on its devices, or is offloaded; `counted` says whether its group's idle bytes
        are to be counted here, or were at an earlier node of it."""
        base, count = rows.off if offloaded else rows.keep, len(rows.n)
        peak = np.maximum(rows.run, base)
        groups = self.problem.groups[node]
        several = len({self.problem.kind_of.get(g, 0) for g in groups}) < len(groups)
        leaf = Table(
            n=rows.n,
            seconds=rows.seconds,
            pending=np.zeros((count, 2)),
            base=base if counted else np.zeros_like(base),
            peak=peak if counted else peak - base,
            shares=np.where(rows.batches > 0, 2, 1) if several else np.zeros(count, dtype=np.int64),
            block=np.zeros(count, dtype=np.int64),
            left=np.arange(count),
            right=np.full(count, int(offloaded)),
            blocks=(Block("leaf", (), node, rows),),
        )
        if offloaded:
            leaf.pending[:] = rows.switch_s
        allowed = np.isfinite(leaf.seconds)
        if not self.problem.unlimited:
            allowed &= _fits(leaf.peak)
        if several and not self._turns:
            allowed &= leaf.shares & 1 == 0
        if several and not self._splits:
            allowed &= leaf.shares & 2 == 0
        return leaf if allowed.all() else leaf.take(allowed)

    def _may_turn(self, part: int, rest: int) -> bool:
        return self._turns or not self._sharing(part, rest)

    def _sharing(self, part: int, rest: int) -> int:
        """1 if turns of the two sets make different groups share a device."""
        problem = self.problem
        left, right = problem.groups_of(part) - problem.light, problem.groups_of(rest) - problem.light
        return int(not (left <= right or right <= left) and problem.meet(left, right))

    def may_split(self, part: int, rest: int) -> bool:
        """Whether the two sets may run on disjoint devices."""
        left, right = self.problem.groups_of(part), self.problem.groups_of(rest)
        if left & right or any(left & c and right & c for c in self._pins.clusters):
            return False
        return self._splits or not self.apart(part, rest)

    def apart(self, part: int, rest: int) -> int:
        """2 if groups that could share a device are on disjoint ones when the two sets run side by side."""
        return 2 * int(self.problem.meet(self.problem.groups_of(part), self.problem.groups_of(rest)))

    def _turn(self, nodes: int, left: Table, right: Table, part: int) -> Table:
        a, b = tables.pairs(left, right, self.grid, "same")
        count, problem = len(a), self.problem
        seconds = left.seconds[a] + right.seconds[b]
        if problem.unlimited:
            base = peak = np.zeros((count, problem.kinds))
        else:
            seconds = seconds + left.pending[a].sum(axis=1) + right.pending[b].sum(axis=1)
            base = left.base[a] + right.base[b]
            peak = np.maximum(left.peak[a] + right.base[b], right.peak[b] + left.base[a])
        joined = Table(
            n=left.n[a],
            seconds=seconds,
            pending=np.zeros((count, 2)),
            base=base,
            peak=peak,
            shares=left.shares[a] | right.shares[b] | self._sharing(part, nodes ^ part),
            block=np.zeros(count, dtype=np.int64),
            left=a,
            right=b,
            blocks=(Block("turns", (left, right)),),
        )
        if problem.unlimited and not self._pins.clusters:
            return joined
        fits = _fits(peak)
        if self._pins.clusters:
            fits &= self.grid.vectors[joined.n % self.grid.size].sum(axis=1) >= self._needed(nodes)
        return joined if bool(fits.all()) else joined.take(fits)

    def _needed(self, nodes: int) -> int:
        """Units that the pinned groups of these nodes take, clusters being disjoint."""
        present = self.problem.groups_of(nodes)
        held = [max((self._pins.units[g] for g in c & present), default=0) for c in self._pins.clusters]
        return sum(held)

    def _side(self, op: str, left: Table, right: Table, how: str, alone: bool, apart: int) -> Table:
        a, b = tables.pairs(left, right, self.grid, how)
        seconds = left.seconds[a], right.seconds[b]
        pending, base, peak = held_together(left, a, right, b, alone, chained=op == "apart")
        return Table(
            n=(left.n - self.grid.base(left.n))[a] + right.n[b],
            seconds=np.maximum(*seconds) if op == "beside" else seconds[0] + seconds[1],
            pending=pending,
            base=base,
            peak=peak,
            shares=left.shares[a] | right.shares[b] | apart,
            block=np.zeros(len(a), dtype=np.int64),
            left=a,
            right=b,
            blocks=(Block(op, (left, right)),),
        )

    def _reduce(self, found: list[Table], alone: bool) -> Table:
        joined = tables.concat(found, self.problem.kinds)
        return tables.fastest(joined, self.by_shares) if alone else tables.pareto(joined, self.by_shares)


def _once(table: Table) -> bool:
    return bool((np.diff(table.n) > 0).all())


def _fits(held: tables.Floats) -> NDArray[np.bool_]:
    """[R] whether no kind of device holds more than it has; a reduction only where there are several kinds."""
    within = held <= _FITS
    return np.asarray(within[:, 0] if held.shape[1] == 1 else within.all(axis=1))
