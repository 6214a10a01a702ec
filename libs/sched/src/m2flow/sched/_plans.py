"""The best plans of a problem: the search run for every choice of pins, and the best rows of all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from m2flow.sched._closed_form import iteration_seconds
from m2flow.sched._coarse import Contraction, contractions, is_large, orders
from m2flow.sched._problem import Problem
from m2flow.sched._search import Pins, Search
from m2flow.sched._stretched import Stretched
from m2flow.sched._table import Floats, Table
from m2flow.sched._tree import Reader, Tree, Turns, shape, walk

_MANY = 100_000  # of a larger table only the best row is ranked
_ROWS_A_CUT = 2  # of each first cut the best rows that are ranked


@dataclass(frozen=True)
class Candidate:
    """A plan: its tree, the pins it was found with, and the seconds of an iteration by the closed form."""

    tree: Tree
    pins: Pins
    seconds: float
    staleness: int
    mode: str


_MODES = ("temporal", "temporal", "spatial", "hybrid")


def best_plans(problem: Problem, mode: str, count: int) -> list[Candidate]:
    """Returns up to `count` different plans of a mode ("" for any), best first; none if none fits.

    Exact, unless the graph is large (`_coarse.is_large`): then the best over several blockings of it.
    """
    if not is_large(problem):
        return _exact_plans(problem, mode, count)
    found: dict[tuple[str, int], Candidate] = {}
    for contraction in contractions(problem):
        for plan in _exact_plans(contraction.problem, mode, count):
            fine = replace(plan, tree=contraction.expand(plan.tree))
            found.setdefault((shape(fine.tree), fine.staleness), fine)
    for candidate in _stretched_plans(problem, mode):
        found.setdefault((shape(candidate.tree), 0), candidate)
    return sorted(found.values(), key=lambda c: (c.seconds, c.staleness))[:count]


def _stretched_plans(problem: Problem, mode: str) -> Iterator[Candidate]:
    """Pipelines of many layers, where nothing forbids them."""
    plain = problem.kinds == 1 and not problem.repeated and not problem.tails and problem.pipelined(problem.everything)
    if mode == "temporal" or not plain or not problem.chunk_counts:
        return
    for order in orders(problem):
        stretched = Stretched(problem, order, mode == "spatial")
        contraction = Contraction(problem, stretched.blocks, problem)
        for tree in stretched.plans():
            fine = contraction.expand(tree)
            shared = any(isinstance(t, Turns) for t in walk(fine))
            if mode != "hybrid" or shared:
                seconds = iteration_seconds(fine, {}) + problem.sync_s
                yield Candidate(fine, Pins({}), seconds, 0, "hybrid" if shared else "spatial")


def _exact_plans(problem: Problem, mode: str, count: int) -> list[Candidate]:
    ranked: list[tuple[float, int, int, Table, Pins]] = []
    for pins in pin_choices(problem, mode):
        for table in Search(problem, mode, pins).whole():
            for staleness in range(problem.max_staleness + 1 if table.busy is not None else 1):
                seconds = _iteration_seconds(problem, table, staleness, mode)
                ranked += [(float(seconds[row]), staleness, row, table, pins) for row in _best_rows(table, seconds)]
    ranked.sort(key=lambda r: r[:2])
    plans: dict[tuple[str, int], Candidate] = {}
    reader = Reader(problem.names, problem.grid, problem.chunk_counts)
    for best, staleness, row, table, pins in ranked:
        tree = reader.read(table, row)
        name = shape(tree), staleness
        if name not in plans:
            plans[name] = Candidate(tree, pins, best, staleness, _MODES[int(table.shares[row])])
        if len(plans) == count:
            break
    return list(plans.values())


def _iteration_seconds(problem: Problem, table: Table, staleness: int, mode: str) -> Floats:
    """[R] seconds of an iteration with publication; of an asynchronous one, between two ends of iterations."""
    seconds = table.seconds + problem.sync_s
    if staleness and table.busy is not None:
        seconds = np.maximum(table.busy + problem.sync_s, seconds / (staleness + 1))
    return np.where(table.shares == 3, seconds, np.inf) if mode == "hybrid" else seconds


def _best_rows(table: Table, seconds: Floats) -> list[int]:
    """The fastest rows; of pipelines the fastest of each chunk count. Neighbours on the device axis say little."""
    if table.busy is None:
        rows = np.argsort(seconds, kind="stable")[:_ROWS_A_CUT]
    else:
        if not len(seconds):
            return []
        order = np.lexsort((seconds, table.right)) if len(seconds) < _MANY else [np.argmin(seconds)]
        rows = np.array(order)[np.flatnonzero(np.diff(table.right[order], prepend=-1))]
    return [int(r) for r in rows if np.isfinite(seconds[r])]


def pin_choices(problem: Problem, mode: str) -> Iterator[Pins]:
    """Every number of units, every overlap and every residency of the groups that run several nodes."""
    groups = problem.repeated
    if not groups:
        yield Pins({})
        return
    units = [_pin_units(problem) for _ in groups]
    for counts in product(*units):
        for clusters in _partitions(list(groups)):
            if mode == "spatial" and len(clusters) < len(groups):
                continue
            if mode == "temporal" and len(clusters) > 1:
                continue
            for flags in product((False, True), repeat=0 if problem.unlimited else len(groups)):
                offloaded = frozenset(g for g, f in zip(groups, flags, strict=False) if f)
                yield Pins(dict(zip(groups, counts, strict=True)), clusters, offloaded)


def _pin_units(problem: Problem) -> list[int]:
    most = max(problem.grid.shape)
    if most <= 16:
        return list(range(1, most + 1))
    return sorted({max(1, round(most * i / 16)) for i in range(1, 17)})


def _partitions(groups: list[str]) -> Iterator[tuple[frozenset[str], ...]]:
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for partition in _partitions(rest):
        yield (frozenset({first}), *partition)
        for i, cluster in enumerate(partition):
            yield (*partition[:i], cluster | {first}, *partition[i + 1 :])
