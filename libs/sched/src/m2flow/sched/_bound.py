"""A time that no plan can beat: by the room that the stages need, and by the longest path.

A node whose chunks take K t on n units fills n K t unit-seconds, and must be through in T: so T is possible only if

    sum_i min { n K t_i(n, K) : K t_i(n, K) <= T }  <=  N T        for every kind of device

The least such T is found by bisection; the sum falls and N T grows with T. A group that runs several nodes has one size
for all of them: the nodes' rows at that size count, and each size has a least T of its own.

Along a chain of L nodes each waits for the first chunk of those before it and those after it for its last one:

    K t_i + sum_{j != i} t_j  <=  T    for every i,    so that    sum_i (K t_i + (L - 1) t_i)  <=  L T

and with any price p >= 0 on the difference, sum_i min (n K t_i + p (K t_i + (L - 1) t_i)) - p L T is room that the
chain needs at least (the nodes cannot all take T: a pipeline has to fill).
"""

from dataclasses import dataclass

import numpy as np

from m2flow.sched._problem import NO_PINS, Pins, Problem
from m2flow.sched._table import Floats

_STEPS = 60
_MARGIN = 1 + 1e-12
_FOREVER = 1e30  # seconds
_PRICES = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, 24)])  # of a second, as a part of all units


def lower_bound(problem: Problem) -> float:
    """Seconds of an iteration, publication included, that no plan of the problem can take less than."""
    if not all(problem.sizes.values()):
        return float("inf")  # a group needs more than there is
    room = Room(problem)
    low, high = 0.0, 1e-6
    while not room.suffices(high):
        low, high = high, high * 2
        if high > _FOREVER:
            return float("inf")
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if room.suffices(middle) else (middle, high)
    return low


class Room:
    """The room that a problem's nodes need, by the sizes of the groups that run several of them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._path = 0.0 if problem.max_staleness else _longest_path(problem)
        self._free: dict[int, _Ways] = {}
        self._sized: dict[str, list[list[_Ways]]] = {g: [] for g in problem.sizes}  # by node and size
        for node, groups in enumerate(problem.groups):
            group = next((g for g in groups if g in problem.sizes), None)
            if group is None:
                self._free[node] = _work(problem, node, NO_PINS)
            else:
                self._sized[group].append([_work(problem, node, Pins({group: u})) for u in problem.sizes[group]])
        self._chain = [] if problem.max_staleness else self._heaviest_chain()

    def suffices(self, seconds: float) -> bool:
        """Whether an iteration of so many seconds, publication included, has room for some sizes."""
        spare, needs = self.spare(seconds)
        return bool((spare - sum(need.min(axis=0) for need in needs) >= 0).all())

    def spare(self, seconds: float) -> tuple[Floats, list[Floats]]:
        """[kinds] unit-seconds that an iteration of so many seconds leaves to the groups with several nodes, and
        [sizes, kinds] what each of them needs; infinite where no way is as fast."""
        seconds = (seconds - self._problem.sync_s) * _MARGIN
        have = (
            np.array(self._problem.grid.shape) * seconds
            if seconds >= self._path
            else np.full(self._problem.kinds, -1.0)
        )
        have = have - self._chained(seconds)
        for node, ways in self._free.items():
            if node not in self._chain:
                have = have - _least_room(ways, seconds)
        needs = [np.zeros((len(sizes), self._problem.kinds)) for sizes in self._problem.sizes.values()]
        for need, nodes in zip(needs, self._sized.values(), strict=True):
            for sizes in nodes:
                need += [_least_room(rows, seconds) for rows in sizes]
        return have, needs

    def _chained(self, seconds: float) -> Floats:
        """[kinds] unit-seconds that the chain needs at least."""
        length = len(self._chain)
        best = prices = np.zeros((self._problem.kinds, 1))
        if length > 1 and seconds > 0:
            prices = np.array(self._problem.grid.shape)[:, None] * _PRICES
            best = -prices * length * seconds
        for node in self._chain:
            ways = self._free[node]
            fast = ways.busy <= seconds
            if not fast.any():
                return np.full(self._problem.kinds, np.inf)
            span = (ways.busy + (length - 1) * ways.first)[fast]
            best = best + (ways.room[fast].T[:, :, None] + prices[:, None, :] * span[:, None]).min(axis=1)
        return np.asarray(best.max(axis=1))

    def _heaviest_chain(self) -> list[int]:
        """Of the nodes whose sizes are free and that let nothing out early, those of the path with the most work."""
        heaviest: list[tuple[float, list[int]]] = []
        for node, before in enumerate(self._problem.before):
            weight, chain = max((heaviest[i] for i in self._problem.members(before)), default=(0.0, []))
            ways = self._free.get(node)
            if ways is not None and len(ways.busy) and node not in self._problem.tails:
                weight, chain = weight + float(ways.room.sum(axis=1).min()), [*chain, node]
            heaviest.append((weight, chain))
        return max(heaviest)[1]


@dataclass(frozen=True)
class _Ways:
    """[R] ways to run a node: its busy seconds in an iteration, those of one chunk, and its [R, kinds] unit-seconds."""

    busy: Floats
    first: Floats
    room: Floats


def _least_room(ways: _Ways, seconds: float) -> Floats:
    """[kinds] unit-seconds of the way to run a node within the time that needs least; infinite if there is none."""
    fast = ways.busy <= seconds
    return np.asarray(ways.room[fast].min(axis=0)) if fast.any() else np.full(ways.room.shape[1], np.inf)


def _work(problem: Problem, node: int, pins: Pins) -> _Ways:
    busy, first, room = [], [], []
    for chunked in (False, True) if problem.chunk_counts else (False,):
        rows = problem.leaves(node, chunked, 0, pins)
        level, code = rows.n // problem.grid.size, rows.n % problem.grid.size
        counts = np.array(problem.chunk_counts)[level] if chunked else np.ones(len(rows.n))
        total = rows.seconds * counts
        mine = {problem.kind_of.get(g, 0) for g in problem.groups[node]}
        units = problem.grid.vectors[code] * np.isin(np.arange(problem.kinds), list(mine))
        busy.append(total)
        first.append(rows.seconds)
        room.append(total[:, None] * units)
    return _Ways(np.concatenate(busy), np.concatenate(first), np.concatenate(room))


def _longest_path(problem: Problem) -> float:
    """The fill of the finest pipeline on the fastest devices, at least."""
    ends: list[float] = []
    for node, before in enumerate(problem.before):
        rows = [
            problem.leaves(node, c, 0, NO_PINS).seconds for c in ((False, True) if problem.chunk_counts else (False,))
        ]
        fastest = min((float(r.min()) for r in rows if len(r)), default=0.0)
        ends.append(fastest + max((ends[i] for i in problem.members(before)), default=0.0))
    return max(ends)
