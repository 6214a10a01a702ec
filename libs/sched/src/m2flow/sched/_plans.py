"""The best plans of a problem: the search run for every choice of pins, and the best rows of all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from m2flow.sched._bound import lower_bound
from m2flow.sched._closed_form import iteration_seconds
from m2flow.sched._coarse import Contraction, contractions, is_large, orders
from m2flow.sched._pins import Choices
from m2flow.sched._problem import NO_PINS, Pins, Problem
from m2flow.sched._search import Search
from m2flow.sched._stretched import Stretched
from m2flow.sched._table import Floats, Table
from m2flow.sched._tree import Reader, Tree, Turns, shape, walk

_MANY = 100_000  # of a larger table only the best row is ranked
_ROWS_A_CUT = 2  # of each first cut the best rows that are ranked
SEARCHES = 128  # each for one choice of sizes, overlaps and residencies of groups with several nodes
FIRST_SEARCHES = 1024  # as long as none of them has found a plan that fits


@dataclass(frozen=True)
class Candidate:
    """A plan: its tree, the pins it was found with, and the seconds of an iteration by the closed form."""

    tree: Tree
    pins: Pins
    seconds: float
    staleness: int
    mode: str


_Ranked = tuple[float, int, int, Table, Pins]  # seconds, staleness, a row of the table
_MODES = ("temporal", "temporal", "spatial", "hybrid")


@dataclass(frozen=True)
class Found:
    """Different plans of a mode, best first, seconds that no plan of it can take less than (infinite where none fits),
    and how often it was searched."""

    plans: list[Candidate]
    lower_bound_s: float
    searches: int = 1

    @property
    def exact(self) -> bool:
        """Whether the first plan is proved to be the best, or it is proved that none fits."""
        best = self.plans[0].seconds if self.plans else np.inf
        return best <= self.lower_bound_s * (1 + 1e-9)


def best_plans(
    problem: Problem, mode: str, count: int, searches: int = SEARCHES, first_searches: int = FIRST_SEARCHES
) -> Found:
    """Returns up to `count` different plans of a mode ("" for any); none if none was found (`Found.exact`: none fits).

    The best one is exact, unless the graph is large (`_coarse.is_large`), when it is the best over several blockings of
    it, or groups with several nodes have more sizes, overlaps and residencies that could be better than there may be
    searches: `searches`, and up to `first_searches` as long as no plan fits.
    """
    if not is_large(problem):
        return _exact_plans(problem, mode, count, searches, first_searches)
    found: dict[tuple[str, int], Candidate] = {}
    blockings = list(contractions(problem))
    each, done = [-(-most // (3 * len(blockings))) for most in (searches, first_searches)], 0
    for contraction in blockings:
        answer = _exact_plans(contraction.problem, mode, count, *each)
        done += answer.searches
        for plan in answer.plans:
            fine = replace(plan, tree=contraction.expand(plan.tree, plan.pins))
            found.setdefault((shape(fine.tree), fine.staleness), fine)
    for candidate in _stretched_plans(problem, mode):
        found.setdefault((shape(candidate.tree), 0), candidate)
    plans = sorted(found.values(), key=lambda c: (c.seconds, c.staleness))[:count]
    return Found(plans, lower_bound(problem), done)


def _stretched_plans(problem: Problem, mode: str) -> Iterator[Candidate]:
    """Pipelines of many layers, where nothing forbids them."""
    plain = problem.kinds == 1 and not problem.sizes and not problem.tails and problem.pipelined(problem.everything)
    if mode == "temporal" or not plain or not problem.chunk_counts:
        return
    for order in orders(problem):
        stretched = Stretched(problem, order, mode == "spatial")
        contraction = Contraction(problem, stretched.blocks, problem)
        for tree in stretched.plans():
            fine = contraction.expand(tree, NO_PINS)
            shared = any(isinstance(t, Turns) for t in walk(fine))
            if mode != "hybrid" or shared:
                seconds = iteration_seconds(fine, {}) + problem.sync_s
                yield Candidate(fine, NO_PINS, seconds, 0, "hybrid" if shared else "spatial")


def _exact_plans(problem: Problem, mode: str, count: int, searches: int, first_searches: int) -> Found:
    """As `best_plans`, of a graph that is not large."""
    if not problem.sizes:
        plans = _different(problem, sorted(_rows(problem, mode, NO_PINS), key=_by_seconds), count)
        return Found(plans, plans[0].seconds if plans else np.inf)
    if not all(problem.sizes.values()):
        return Found([], np.inf)  # a group needs more than there is
    choices, ranked, done = Choices(problem, mode), list[_Ranked](), 0
    while done < (searches if ranked else first_searches):
        limit_s = ranked[count - 1][0] if len(ranked) >= count else np.inf
        pins = choices.nearest(ranked[0][-1] if ranked else None, limit_s)
        if pins is None:
            break
        ranked, done = sorted(ranked + list(_rows(problem, mode, pins)), key=_by_seconds), done + 1
    plans = _different(problem, ranked, count)
    least = plans[0].seconds if plans else np.inf
    return Found(plans, least if choices.none_left(least) else min(least, lower_bound(problem)), done)


def _by_seconds(ranked: _Ranked) -> tuple[float, int]:
    return ranked[:2]


def _rows(problem: Problem, mode: str, pins: Pins) -> Iterator[_Ranked]:
    """The best rows of every first cut."""
    for table in Search(problem, mode, pins).whole():
        for staleness in range(problem.max_staleness + 1 if table.busy is not None else 1):
            seconds = _iteration_seconds(problem, table, staleness, mode)
            for row in _best_rows(table, seconds):
                yield float(seconds[row]), staleness, row, table, pins


def _different(problem: Problem, ranked: list[_Ranked], count: int) -> list[Candidate]:
    """The first of every shape, up to `count` of them."""
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
