"""A cycle as one node: its parts in turns on all its devices, or spread over them with batches in flight.

With R rounds and part seconds c_i for a whole batch on their devices:

    in turns               R sum_i c_i(x)
    spread, B sub-batches  S + max((R B - 1) M, (R - 1) S + (B - 1) M),  S = sum_i c_i(x/B), M = max_i c_i(x/B)

the second being exactly when B batches that follow each other round the ring are all through. Where its groups leave
their devices, they do so in every round: a loop pays R times their onload and offload.
"""

from collections.abc import Callable, Mapping

import numpy as np

from m2flow.sched._costs import Costs
from m2flow.sched._table import Floats, Grid, Ints, Rows
from m2flow.sched._workflow import Workflow

_BATCHES = (2, 3, 4, 8)


def spread_seconds(parts: Floats, rounds: float, batches: int) -> Floats:
    """[N] seconds of a ring of parts [parts, N], each taking that long for one sub-batch; the module's formula."""
    once, slowest = parts.sum(axis=0), parts.max(axis=0)
    busy = (rounds * batches - 1) * slowest
    return np.asarray(once + np.maximum(busy, (rounds - 1) * once + (batches - 1) * slowest))


def cycle_rows(
    workflow: Workflow,
    costs: Costs,
    options: Mapping[str, tuple[int, Ints, Ints]],
    node: int,
    chunks: int,
    beside: frozenset[str],
    grid: Grid,
    fraction: Callable[[Floats, int], Floats],
) -> Rows:
    """The fastest way in turns, and the fastest way spread, of every device code.

    `options` are what each group may be given: its kind, units, and the devices that it then uses.
    """
    spec = workflow.nodes[node]
    stages_of = {g: tuple(s for s in spec.stages if workflow.stages[s].group == g) for g in spec.groups}
    found: list[tuple[Ints, Floats, Ints, int, Floats, Floats, Floats]] = []

    def seconds(group: str, devices: Ints, batches: int) -> Floats:
        others = frozenset(s for s in spec.stages if s not in stages_of[group]) | beside if batches else beside
        total = np.zeros(len(devices))
        for stage in stages_of[group]:
            items = workflow.volumes[stage] / chunks / max(batches, 1)
            total += costs.stage_seconds(stage, items, devices.astype(float), others)
        return total

    def held(group: str, devices: Ints, batches: int) -> list[Floats]:
        items = {s: workflow.volumes[s] / chunks / max(batches, 1) for s in stages_of[group]}
        memory = costs.group_memory(group, stages_of[group], items, devices.astype(float))
        return [fraction(m, options[group][0]) for m in memory]

    if len({kind for kind, _, _ in options.values()}) == 1:
        common = sorted(set.intersection(*(set(units.tolist()) for _, units, _ in options.values())))
        rows = {g: np.searchsorted(units, common) for g, (_, units, _) in options.items()}
        devices = {g: options[g][2][rows[g]] for g in spec.groups}
        turn = np.sum([seconds(g, devices[g], 0) for g in spec.groups], axis=0) * spec.rounds
        parts = [held(g, devices[g], 0) for g in spec.groups]
        keep, off = (np.sum([p[i] for p in parts], axis=0) for i in (0, 1))
        run = np.max([keep - p[0] + np.maximum(p[2], p[0]) for p in parts], axis=0)
        stride = grid.strides[options[spec.groups[0]][0]]
        picks = np.stack([devices[g] for g in spec.groups], axis=1)
        found.append((np.array(common, dtype=np.int64) * stride, turn, picks, 0, keep, off, run))
    if len(spec.groups) > 1:
        choices = [np.arange(len(options[g][1])) for g in spec.groups]
        index = np.stack([c.reshape(-1) for c in np.meshgrid(*choices, indexing="ij")], axis=1)
        used = np.zeros((len(index), len(grid.shape)), dtype=np.int64)
        for column, g in enumerate(spec.groups):
            used[:, options[g][0]] += options[g][1][index[:, column]]
        index, used = index[(used <= grid.shape).all(axis=1)], used[(used <= grid.shape).all(axis=1)]
        picks = np.stack([options[g][2][index[:, i]] for i, g in enumerate(spec.groups)], axis=1)
        for batches in _BATCHES:
            each = np.stack([seconds(g, options[g][2], batches)[index[:, i]] for i, g in enumerate(spec.groups)])
            parts = [[m[index[:, i]] for m in held(g, options[g][2], batches)] for i, g in enumerate(spec.groups)]
            memory = [np.max([p[i] for p in parts], axis=0) for i in (0, 1, 2)]
            found.append((used @ grid.strides, spread_seconds(each, spec.rounds, batches), picks, batches, *memory))
    onload_s, offload_s = costs.switches_s(spec.groups)
    can_offload = all(workflow.groups[g].can_offload for g in spec.groups)
    return _closed(found, grid, (spec.rounds * onload_s, spec.rounds * offload_s), can_offload)


def _closed(
    found: list[tuple[Ints, Floats, Ints, int, Floats, Floats, Floats]],
    grid: Grid,
    switch_s: tuple[float, float],
    can_offload: bool,
) -> Rows:
    """The fastest row of each way (in turns, spread) for every code, fewer devices allowed."""
    columns = [np.concatenate([f[i] for f in found]) for i in (0, 1, 2, 4, 5, 6)]
    batches = np.concatenate([np.full(len(f[0]), f[3], dtype=np.int64) for f in found])
    codes, rows = [], []
    for spread in (False, True):
        fastest = _fastest_below(columns[0], columns[1], np.flatnonzero((batches > 0) == spread), grid)
        enough = np.flatnonzero(fastest >= 0)
        codes.append(enough)
        rows.append(fastest[enough])
    order = np.argsort(np.concatenate(codes), kind="stable")
    pick = np.concatenate(rows)[order]
    return Rows(
        n=np.concatenate(codes)[order].astype(np.int64),
        seconds=columns[1][pick],
        switch_s=switch_s,
        keep=columns[3][pick],
        off=columns[4][pick],
        run=columns[5][pick],
        can_offload=can_offload,
        picks=columns[2][pick],
        batches=batches[pick],
    )


def _fastest_below(codes: Ints, seconds: Floats, rows: Ints, grid: Grid) -> Ints:
    """[codes of the grid] the fastest of `rows` that needs no more of any kind than the code has; -1 if none."""
    order = rows[np.lexsort((seconds[rows], codes[rows]))]
    _, first = np.unique(codes[order], return_index=True)
    best = np.full(grid.size, -1, dtype=np.int64)
    best[codes[order[first]]] = order[first]
    padded = np.append(seconds, np.inf)  # -1 is never the fastest
    for kind, most in enumerate(grid.shape):
        for have in range(1, most + 1):
            here = np.flatnonzero(grid.vectors[:, kind] == have)
            fewer = best[here - grid.strides[kind]]
            best[here] = np.where(padded[fewer] < padded[best[here]], fewer, best[here])
    return best
