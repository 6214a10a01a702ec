"""Which sizes, overlaps and residencies of groups with several nodes are searched, and in which order."""

from collections.abc import Iterator
from functools import reduce
from itertools import product

import numpy as np
from numpy.typing import NDArray

from m2flow.sched._bound import Room
from m2flow.sched._problem import Pins, Problem
from m2flow.sched._table import Floats

_MOST = 1 << 16  # choices of sizes that are told apart; of more some are left out
_FINE = 0.75  # doublings
_FITS = 1.0 + 1e-9
Bools = NDArray[np.bool_]


class Choices:
    """Choices of pins, the nearest to the best so far first; none whose groups cannot fit into the memory of their
    devices, and none whose sizes have no room (`_bound.Room`) for a plan that is faster than what was found.

    Near is what doubles or halves few sizes, and changes few overlaps and residencies; at first, to `Problem.near`, or
    to groups that have equal shares of the devices and stay there.
    """

    def __init__(self, problem: Problem, mode: str) -> None:
        self._groups = list(problem.sizes)
        held = [_held(problem, group) for group in self._groups]
        self._rows = [np.flatnonzero((h.sum(axis=1) <= _FITS).all(axis=-1).any(axis=0)) for h in held]
        most = int(_MOST ** (1 / len(self._groups)))
        self._all = all(len(rows) <= most for rows in self._rows)
        if not self._all:
            thin = [np.unique(np.linspace(0, len(r) - 1, min(len(r), most)).astype(int)) for r in self._rows]
            self._rows = [rows[places] for rows, places in zip(self._rows, thin, strict=True)]
        sizes = zip(problem.sizes.values(), self._rows, strict=True)
        self._units = [np.array(units, dtype=np.int64)[rows] for units, rows in sizes]
        self._ways = list(_ways(problem, mode))
        held = [h[:, :, rows] for h, rows in zip(held, self._rows, strict=True)]
        total = sum(problem.grid.shape)
        fits = [
            (_needed(self._groups, self._units, clusters) <= total) & _holds(self._groups, held, clusters, away)
            for clusters, away in self._ways
        ]
        self._left = np.stack(fits, axis=-1)
        equal = {g: max(1, max(problem.grid.shape) // len(self._groups)) for g in self._groups}
        self._first = problem.near or Pins(equal, *self._ways[0])
        self._room = Room(problem)

    def nearest(self, best: Pins | None, limit_s: float) -> Pins | None:
        """A choice that was not given before, with room for plans within the limit; None if there are no more."""
        left = self._within(limit_s)
        if not left.any():
            return None
        near = best or self._first
        steps = [_steps(units, near.units[g]) for g, units in zip(self._groups, self._units, strict=True)]
        steps.append(np.array([(c != near.clusters) + len(off ^ near.offloaded) for c, off in self._ways]))
        distance = reduce(np.add.outer, steps)
        place = np.unravel_index(np.argmin(np.where(left, distance, np.inf)), left.shape)
        self._left[place] = False
        sizes = zip(self._groups, self._units, place, strict=False)
        return Pins({g: int(units[i]) for g, units, i in sizes}, *self._ways[place[-1]])

    def none_left(self, limit_s: float) -> bool:
        """Whether no choice that was never given has room for a plan that is faster than the limit."""
        return self._all and not self._within(limit_s * (1 - 1e-9)).any()

    def _within(self, limit_s: float) -> Bools:
        if not np.isfinite(limit_s):
            return self._left
        spare, needs = self._room.spare(limit_s)
        rooms = [need[rows] for need, rows in zip(needs, self._rows, strict=True)]
        enough = [reduce(np.add.outer, [r[:, kind] for r in rooms]) <= most for kind, most in enumerate(spare)]
        return np.asarray(self._left & np.all(enough, axis=0)[..., None])


def _held(problem: Problem, group: str) -> Floats:
    """[2, 2, sizes, kinds] parts of a device's memory: resident and offloaded, what the group holds while idle and how
    much more it needs to run, at least.

    Nodes of several groups are not counted: which rows they have depends on the sizes of all.
    """
    sizes = problem.sizes[group]
    found = np.zeros((2, 2, len(sizes), problem.kinds))
    nodes = [i for i, groups in enumerate(problem.groups) if group in groups]
    single = [i for i in nodes if problem.groups[i] == (group,) and not problem.unlimited]
    for node, away, (row, units) in product(single, (0, 1), enumerate(sizes)):
        pins = Pins({group: units}, offloaded=frozenset({group} if away else ()))
        ways = [problem.leaves(node, c, 0, pins) for c in ((False, True) if problem.chunk_counts else (False,))]
        idle = np.concatenate([w.off if away else w.keep for w in ways])
        more = np.maximum(np.concatenate([w.run for w in ways]) - idle, 0.0).min(axis=0, initial=np.inf)
        if node == nodes[0]:  # where the search counts it
            found[away, 0, row] = idle.min(axis=0, initial=np.inf)
        found[away, 1, row] = np.maximum(found[away, 1, row], more)
    return found


def _holds(groups: list[str], held: list[Floats], clusters: tuple[frozenset[str], ...], away: frozenset[str]) -> Bools:
    """[sizes of each group, ...] whether each group can run beside what the others of its cluster hold while idle."""
    fits = np.ones([h.shape[2] for h in held], dtype=np.bool_)
    for kind, cluster in product(range(held[0].shape[-1]), clusters):
        mine = [h[int(g in away), :, :, kind] * (g in cluster) for g, h in zip(groups, held, strict=True)]
        idle, more = (reduce(join, [m[i] for m in mine]) for i, join in enumerate((np.add.outer, np.maximum.outer)))
        fits &= idle + more <= _FITS
    return fits


def _steps(units: NDArray[np.int64], near: int) -> NDArray[np.float64]:
    """[sizes] how far they are from one, in doublings; more for those that only refine what a coarse scale finds."""
    scale = units.max() / 2 ** (np.arange(2 * np.log2(units.max()) + 1) / 2)
    coarse = np.isin(units, units[abs(units - scale[:, None]).argmin(axis=1)])
    return np.asarray(abs(np.log2(units / near)) + np.where(coarse | (units == near), 0.0, _FINE))


def _needed(
    groups: list[str], units: list[NDArray[np.int64]], clusters: tuple[frozenset[str], ...]
) -> NDArray[np.int64]:
    """[sizes of each group, ...] the units that the groups take together, those of one cluster overlapping."""
    total = np.zeros([len(u) for u in units], dtype=np.int64)
    for cluster in clusters:
        axes = [u if g in cluster else np.zeros(len(u), dtype=np.int64) for g, u in zip(groups, units, strict=True)]
        total += reduce(np.maximum.outer, axes)
    return total


def _ways(problem: Problem, mode: str) -> Iterator[tuple[tuple[frozenset[str], ...], frozenset[str]]]:
    """Every overlap and every residency of the groups with several nodes."""
    groups = list(problem.sizes)
    movable = [g for g in groups if not problem.unlimited and _can_offload(problem, g)]
    for clusters in _partitions(groups):
        if (mode == "spatial" and len(clusters) < len(groups)) or (mode == "temporal" and len(clusters) > 1):
            continue
        for flags in product((False, True), repeat=len(movable)):
            yield clusters, frozenset(g for g, flag in zip(movable, flags, strict=True) if flag)


def _can_offload(problem: Problem, group: str) -> bool:
    nodes = [i for i, groups in enumerate(problem.groups) if group in groups]
    pins = Pins({group: problem.sizes[group][0]})
    return all(problem.leaves(i, False, 0, pins).can_offload for i in nodes)


def _partitions(groups: list[str]) -> Iterator[tuple[frozenset[str], ...]]:
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for partition in _partitions(rest):
        yield (frozenset({first}), *partition)
        for i, cluster in enumerate(partition):
            yield (*partition[:i], cluster | {first}, *partition[i + 1 :])
