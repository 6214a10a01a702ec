"""From a request's messages to a search problem."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import _curve
from m2flow.sched._checks import check_numbers, check_volumes, remarks
from m2flow.sched._cluster import Pool, pools
from m2flow.sched._costs import Costs, build_costs
from m2flow.sched._cycle import cycle_rows
from m2flow.sched._problem import NO_PINS, Pins, Problem
from m2flow.sched._table import Floats, Grid, Ints, Rows
from m2flow.sched._workflow import Workflow, one_rank_groups, reduce_graph
from m2flow.sched.errors import InputError

_MAX_UNITS = 64  # of one kind, when the quantum is chosen here
_MAX_UNITS_EACH = 16  # of each of several kinds
_MAX_CHUNKS = 64
_CHUNK_CHOICES = 8


@dataclass(frozen=True)
class Model:
    """A request understood: the problem and what it was made from."""

    request: sched_pb2.PlanRequest
    workflow: Workflow
    costs: Costs
    pools: Mapping[str, Pool]
    kinds: tuple[str, ...]
    problem: Problem


def build(request: sched_pb2.PlanRequest) -> Model:
    """Checks a request and prepares its search.

    Raises:
        InputError: a part of the request contradicts itself or another part; the message says which and what to do.
    """
    if request.mode not in ("", "temporal", "spatial", "hybrid"):
        raise InputError(f"mode {request.mode!r}, want '', 'temporal', 'spatial' or 'hybrid': give one of these")
    check_numbers(request)
    workflow = as_measured(reduce_graph(request.workflow), request.profile)
    check_volumes(workflow.volumes)
    found = pools(request.cluster)
    groups = workflow.groups
    used = [groups[g] for node in workflow.nodes for g in node.groups]
    for group in used:
        if group.device_kind not in found:
            raise InputError(
                f"group {group.name!r} runs on devices of kind {group.device_kind!r}, the cluster has "
                f"{sorted(found)}: add such devices to the cluster or change the group's device_kind"
            )
    costs = build_costs(workflow, request.profile, request.cluster, found)
    costs.notes.extend(remarks(request))
    if request.workflow.source_items > 1 and not chunk_counts(request):
        costs.notes.append(f"{request.workflow.source_items} items divide into no equal chunks: no pipeline is tried")
    return assemble(request, workflow, costs, found)


def as_measured(workflow: Workflow, profile: sched_pb2.Profile) -> Workflow:
    """The workflow with the rounds of its loops as they were measured, where they were."""
    rounds = {i.stage: sum(i.passes) / len(i.passes) for i in profile.loop_items if i.passes}
    nodes = [
        replace(node, rounds=max(1.0, *(rounds[s] for s in node.stages if s in rounds)))
        if node.cyclic and rounds.keys() & set(node.stages)
        else node
        for node in workflow.nodes
    ]
    return replace(workflow, nodes=tuple(nodes))


def what_if(
    model: Model,
    *,
    seconds: Mapping[str, float] | None = None,
    switching: float = 1.0,
    devices: Mapping[str, int] | None = None,
    memory: Mapping[str, float] | None = None,
    offload: str = "",
    coarser: int = 1,
) -> Model:
    """The model after a change; nothing is fitted again, and devices are given out in the same units.

    Args:
        seconds: Factors on the seconds of stages.
        switching: Factor on the seconds of onload and offload.
        devices: How many there are instead, by kind.
        memory: Factors on a device's bytes, by kind.
        offload: A group that can offload now.
        coarser: Units are so many times as large.
    """
    devices, memory = devices or {}, memory or {}
    found = {k: pool.changed(count=devices.get(k), memory=memory.get(k, 1.0)) for k, pool in model.pools.items()}
    graph = flow_pb2.WorkflowGraph()
    graph.CopyFrom(model.workflow.graph)
    for group in graph.groups:
        group.can_offload |= group.name == offload
    workflow = replace(model.workflow, graph=graph)
    costs = replace(model.costs, workflow=workflow, scaled=seconds or {}, switching=switching)
    units = {kind: quantum * coarser for kind, quantum in zip(model.kinds, model.problem.quanta, strict=True)}
    changed = assemble(model.request, workflow, costs, found, units)
    return replace(changed, problem=replace(changed.problem, near=model.problem.near))


def assemble(
    request: sched_pb2.PlanRequest,
    workflow: Workflow,
    costs: Costs,
    found: Mapping[str, Pool],
    units: Mapping[str, int] | None = None,
) -> Model:
    """The search problem of inputs that were checked and fitted; `units` are devices in a unit by kind, if chosen."""
    used = [workflow.groups[g] for node in workflow.nodes for g in node.groups]
    kinds = tuple(dict.fromkeys(g.device_kind for g in used))
    quanta = _quanta(request, kinds, found, used, units or {})
    grid = Grid([max(1, len(found[k].ids) // q) for k, q in zip(kinds, quanta, strict=True)])
    counts = chunk_counts(request)
    lookup = Lookup(workflow, costs, found, kinds, quanta, grid, counts)
    problem = Problem(
        names=tuple(n.name for n in workflow.nodes),
        groups=tuple(n.groups for n in workflow.nodes),
        before=_before(workflow),
        barriers=tuple((1 << e.producer, 1 << e.consumer) for e in workflow.edges if e.barrier),
        grid=grid,
        chunk_counts=counts,
        leaves=lookup,
        disturbs=_disturbs(workflow, costs),
        sync_s=sum(costs.sync_s(publish) for publish in workflow.publishes),
        max_staleness=request.max_staleness,
        quanta=quanta,
        kind_of={g.name: kinds.index(g.device_kind) for g in used},
        sizes={g: lookup.sizes(g) for g in _repeated(workflow)},
    )
    tails = {}
    for i, node in enumerate(workflow.nodes):
        # Whoever lets items out early does so beside others: as on half of the devices.
        devices = len(found[workflow.groups[node.groups[0]].device_kind].ids) / 2
        curve = None if node.cyclic else _curve.nearest(request.profile.curves, node.name, devices)
        if curve is not None:
            tails[i] = {k: _curve.chunk_fractions(curve, k) for k in problem.chunk_counts}
    problem = replace(problem, tails=tails, unlimited=lookup.unlimited(), light=_light(problem))
    return Model(request, workflow, costs, found, kinds, problem)


def chunk_counts(request: sched_pb2.PlanRequest) -> tuple[int, ...]:
    """Divisors of the iteration's items over 1, thinned to eight evenly spread ones: groups are never split."""
    items, most = max(int(request.workflow.source_items), 1), request.max_chunks or _MAX_CHUNKS
    divisors = [k for k in range(2, min(items, most) + 1) if items % k == 0]
    if len(divisors) <= _CHUNK_CHOICES:
        return tuple(divisors)
    wanted = np.geomspace(divisors[0], divisors[-1], _CHUNK_CHOICES)
    return tuple(sorted({min(divisors, key=lambda d: abs(np.log(d / w))) for w in wanted}))


def _light(problem: Problem) -> frozenset[str]:
    """The groups with the least work, as many as there are more groups than device units of one kind."""
    work: dict[str, float] = {}
    for i, groups in enumerate(problem.groups):
        rows = problem.leaves(i, False, 0, NO_PINS)
        for group in groups:
            work[group] = work.get(group, 0.0) + (float(rows.seconds[0]) if len(rows.n) else 0.0)
    surplus = len(work) - problem.grid.shape[0] if problem.kinds == 1 else 0
    return frozenset(sorted(work, key=lambda g: (work[g], g))[: max(0, surplus)])


class Lookup:
    """`Leaves` over a profile's costs."""

    def __init__(
        self,
        workflow: Workflow,
        costs: Costs,
        found: Mapping[str, Pool],
        kinds: tuple[str, ...],
        quanta: tuple[int, ...],
        grid: Grid,
        counts: tuple[int, ...],
    ) -> None:
        self._workflow, self._costs, self._grid, self._counts = workflow, costs, grid, counts
        self._pools, self._kinds, self._quanta = found, kinds, quanta
        self._groups = workflow.groups
        self._single = one_rank_groups(workflow.graph)
        self._cache: dict[tuple[int, bool, int, tuple[tuple[str, int], ...]], Rows] = {}

    def __call__(self, node: int, chunked: bool, beside: int, pins: Pins) -> Rows:
        here = tuple((g, pins.units[g]) for g in self._workflow.nodes[node].groups if g in pins.units)
        key = node, chunked, beside, here
        if key not in self._cache:
            names = [n.stages for i, n in enumerate(self._workflow.nodes) if beside >> i & 1]
            neighbours = frozenset(s for stages in names for s in stages)
            self._cache[key] = self._rows(node, self._counts if chunked else (1,), neighbours, dict(here))
        return self._cache[key]

    def unlimited(self) -> bool:
        """Whether all groups fit on one device together, at every device count."""
        held = np.zeros(len(self._kinds))
        worst: dict[tuple[str, int], float] = {}
        for i, node in enumerate(self._workflow.nodes):
            rows = self(i, False, 0, NO_PINS)
            if not len(rows.n):
                return False
            for kind in range(len(self._kinds)):
                key = "+".join(node.groups), kind
                most = max(float(rows.run[:, kind].max()), float(rows.keep[:, kind].max()))
                worst[key] = max(worst.get(key, 0.0), most)
        for (_, kind), most in worst.items():
            held[kind] += most
        return bool((held <= 1.0).all())

    def options(self, group: str, pins: Mapping[str, int]) -> tuple[int, Ints, Ints]:
        """A group's kind, the units that it may be given, and the devices that it then uses."""
        spec = self._groups[group]
        kind = self._kinds.index(spec.device_kind)
        quantum, step = self._quanta[kind], max(spec.devices_per_rank, 1)
        units = np.array([pins[group]]) if group in pins else np.arange(1, self._grid.shape[kind] + 1)
        available = units * quantum
        devices = available // step * step
        if spec.max_devices:
            devices = np.minimum(devices, spec.max_devices // step * step)
        if group in self._single and spec.devices_per_rank:
            devices = np.minimum(devices, step)
        good = devices >= max(spec.min_devices, step)
        return kind, units[good].astype(np.int64), devices[good].astype(np.int64)

    def sizes(self, group: str) -> tuple[int, ...]:
        """The numbers of units that give a group different devices; no others need to be tried."""
        _, units, devices = self.options(group, {})
        return tuple(units[np.unique(devices, return_index=True)[1]].tolist())

    def _rows(self, node: int, counts: tuple[int, ...], beside: frozenset[str], pins: Mapping[str, int]) -> Rows:
        spec = self._workflow.nodes[node]
        if spec.cyclic:
            options = {g: self.options(g, pins) for g in spec.groups}
            parts = [
                cycle_rows(self._workflow, self._costs, options, node, k, beside, self._grid, self._fraction)
                for k in counts
            ]
            return stacked(parts, self._grid)
        group = spec.groups[0]
        kind, units, devices = self.options(group, pins)
        stage = spec.stages[0]
        items = np.repeat(self._workflow.volumes[stage] / np.array(counts), len(units))
        every = np.tile(devices, len(counts)).astype(float)
        seconds = self._costs.stage_seconds(stage, items, every, beside)
        held = self._costs.group_memory(group, (stage,), {stage: items}, every)
        keep, off, run = (self._fraction(b, kind) for b in held)
        codes, rows = closed(units, seconds, run, keep, self._grid, kind, group in pins, len(counts))
        return Rows(
            n=codes,
            seconds=seconds[rows],
            switch_s=self._costs.switch_s(group),
            keep=keep[rows],
            off=off[rows],
            run=run[rows],
            can_offload=self._groups[group].can_offload,
            picks=devices[rows % max(len(devices), 1)][:, None],
            batches=np.zeros(len(rows), dtype=np.int64),
        )

    def _fraction(self, held: Floats, kind: int) -> Floats:
        """[N] bytes as a [N, kinds] fraction of a device; zero where the memory is unknown."""
        fraction = np.zeros((len(held), len(self._kinds)))
        memory = self._pools[self._kinds[kind]].spec.memory_bytes
        if memory:
            fraction[:, kind] = held / memory
        return fraction


def closed(
    units: Ints, seconds: Floats, run: Floats, keep: Floats, grid: Grid, kind: int, pinned: bool, levels: int
) -> tuple[Ints, Ints]:
    """Rows for every code that has enough devices, level after level: the code, and the row that it uses.

    Fewer devices than there are may be used, so a code also lists the smaller counts that are faster or hold less.

    Args:
        units: [U] that the group may have, ascending.
        seconds, run, keep: [levels * U, ...], level after level.
    """
    have, count = grid.vectors[:, kind], len(units)
    last = np.searchsorted(units, have, side="right") - 1
    enough = np.flatnonzero(last >= 0)
    shift = np.repeat(np.arange(levels), len(enough))
    codes, rows = np.tile(enough, levels) + shift * grid.size, np.tile(last[enough], levels) + shift * count
    if pinned or not count:
        return codes.astype(np.int64), rows.astype(np.int64)
    costs = np.concatenate([seconds[:, None], run, keep], axis=1).reshape(levels, count, -1)
    if (np.diff(costs, axis=1) <= 0).all():
        return codes.astype(np.int64), rows.astype(np.int64)
    found = [_useful(c, last) for c in costs]
    codes = np.concatenate([f[0] + level * grid.size for level, f in enumerate(found)])
    rows = np.concatenate([f[1] + level * count for level, f in enumerate(found)])
    return codes.astype(np.int64), rows.astype(np.int64)


def _useful(costs: Floats, last: Ints) -> tuple[Ints, Ints]:
    """Pairs of a code and a row that it may use, where no row that the code may use is as good in every cost."""
    count = len(costs)
    at_most = (costs[None, :, :] <= costs[:, None, :]).all(axis=2)  # [r, q]: q costs no more than r
    index = np.arange(count)
    later = np.where(at_most & (index[None, :] > index[:, None]), index[None, :], count).min(axis=1)
    beaten = np.asarray((at_most & (index[None, :] < index[:, None])).any(axis=1))
    useful = (index[None, :] <= last[:, None]) & (last[:, None] < later[None, :]) & ~beaten[None, :]
    codes, rows = np.nonzero(useful)
    return codes, rows


def stacked(parts: list[Rows], grid: Grid) -> Rows:
    """Rows of several chunk counts as one, at their levels."""
    first = parts[0]
    return Rows(
        n=np.concatenate([p.n + level * grid.size for level, p in enumerate(parts)]),
        seconds=np.concatenate([p.seconds for p in parts]),
        switch_s=first.switch_s,
        keep=np.concatenate([p.keep for p in parts]),
        off=np.concatenate([p.off for p in parts]),
        run=np.concatenate([p.run for p in parts]),
        can_offload=first.can_offload,
        picks=np.concatenate([p.picks for p in parts]),
        batches=np.concatenate([p.batches for p in parts]),
    )


def _before(workflow: Workflow) -> tuple[int, ...]:
    before = [0] * len(workflow.nodes)
    for edge in workflow.edges:
        before[edge.consumer] |= 1 << edge.producer
    return tuple(before)


def _repeated(workflow: Workflow) -> list[str]:
    """Groups that run more than one node: their nodes must share one set of devices."""
    names = [g for node in workflow.nodes for g in node.groups]
    return [g for g in dict.fromkeys(names) if names.count(g) > 1]


def _disturbs(workflow: Workflow, costs: Costs) -> tuple[int, ...]:
    if not costs.corun:
        return ()
    masks = []
    for node in workflow.nodes:
        slowers = {o for (stage, others) in costs.corun for o in others if stage in node.stages}
        masks.append(sum(1 << i for i, other in enumerate(workflow.nodes) if slowers & set(other.stages)))
    return tuple(masks)


def _quanta(
    request: sched_pb2.PlanRequest,
    kinds: tuple[str, ...],
    found: Mapping[str, Pool],
    used: list[flow_pb2.WorkerGroup],
    chosen: Mapping[str, int],
) -> tuple[int, ...]:
    """Devices in a unit, by kind: as asked; else the least that all groups count in and that keeps the search short."""
    quanta = []
    for kind in kinds:
        total = len(found[kind].ids)
        steps = [max(g.devices_per_rank, 1) for g in used if g.device_kind == kind]
        if request.device_quantum and kind == kinds[0] and not chosen:
            quanta.append(min(request.device_quantum, total))
            continue
        if len({g.name for g in used if g.device_kind == kind}) == 1:
            quanta.append(total)
            continue
        if kind in chosen:
            quanta.append(min(chosen[kind], total))
            continue
        quantum = gcd(*steps)
        while total // quantum > (_MAX_UNITS if len(kinds) == 1 else _MAX_UNITS_EACH):
            quantum *= 2
        quanta.append(min(quantum, total))
    return tuple(quanta)
