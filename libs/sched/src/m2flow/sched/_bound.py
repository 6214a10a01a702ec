"""A time that no plan can beat: by the room that the stages need, and by the longest path.

A node whose chunks take K t on n units fills n K t unit-seconds, and must be through in T: so T is possible only if

    sum_i min { n K t_i(n, K) : K t_i(n, K) <= T }  <=  N T        for every kind of device

The least such T is found by bisection; the sum falls and N T grows with T.
"""

import numpy as np

from m2flow.sched._problem import Problem
from m2flow.sched._table import Floats

_STEPS = 60


def lower_bound(problem: Problem) -> float:
    """Seconds of an iteration, publication included, that no plan of the problem can take less than."""
    nodes = [_work(problem, i) for i in range(len(problem.names))]
    low, high = 0.0, sum(float(busy.min()) for busy, _ in nodes if len(busy)) + 1e-12
    while not _possible(problem, nodes, high):
        low, high = high, high * 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _possible(problem, nodes, middle) else (middle, high)
    area = low
    return max(area, _longest_path(problem) if not problem.max_staleness else 0.0) + problem.sync_s


def _work(problem: Problem, node: int) -> tuple[Floats, Floats]:
    """[R] busy seconds in an iteration, and [R, kinds] unit-seconds of every way to run a node."""
    busy, room = [], []
    for chunked in (False, True) if problem.chunk_counts else (False,):
        rows = problem.leaves(node, chunked, 0, {})
        level, code = rows.n // problem.grid.size, rows.n % problem.grid.size
        counts = np.array(problem.chunk_counts)[level] if chunked else np.ones(len(rows.n))
        total = rows.seconds * counts
        mine = {problem.kind_of.get(g, 0) for g in problem.groups[node]}
        units = problem.grid.vectors[code] * np.isin(np.arange(problem.kinds), list(mine))
        busy.append(total)
        room.append(total[:, None] * units)
    return np.concatenate(busy), np.concatenate(room)


def _possible(problem: Problem, nodes: list[tuple[Floats, Floats]], seconds: float) -> bool:
    needed = np.zeros(problem.kinds)
    for busy, room in nodes:
        fast = busy <= seconds * (1 + 1e-12)
        if not fast.any():
            return False
        needed += room[fast].min(axis=0)
    return bool((needed <= np.array(problem.grid.shape) * seconds * (1 + 1e-12)).all())


def _longest_path(problem: Problem) -> float:
    """The fill of the finest pipeline on the fastest devices, at least."""
    ends: list[float] = []
    for node, before in enumerate(problem.before):
        rows = [problem.leaves(node, c, 0, {}).seconds for c in ((False, True) if problem.chunk_counts else (False,))]
        fastest = min((float(r.min()) for r in rows if len(r)), default=0.0)
        ends.append(fastest + max((ends[i] for i in problem.members(before)), default=0.0))
    return max(ends)
