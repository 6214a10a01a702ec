"""How a plan would run: a discrete-event simulation of one iteration, with its timeline."""

from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, lcm

import numpy as np

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import _curve
from m2flow.sched._build import Model, build
from m2flow.sched._checks import LONGEST_S, check_plan
from m2flow.sched._events import Clockwork, Event, Task
from m2flow.sched._loop import Part, run_loop
from m2flow.sched._workflow import Node, work_sources
from m2flow.sched.errors import InputError

_EMISSIONS = 4096  # a curve lets its items out in at most so many steps
_LANES = 16  # of more ranks several go together
_LEAST_S = 1e-9  # of a call in a loop, as of a sample: shares of it are asked for
_SPAN_DEVICES = 200_000  # device ids in a timeline: more would be a file that nobody opens
_KINDS = {"busy": flow_pb2.SPAN_KIND_BUSY, "onload": flow_pb2.SPAN_KIND_ONLOAD, "offload": flow_pb2.SPAN_KIND_OFFLOAD}


def simulate(request: sched_pb2.SimulateRequest) -> sched_pb2.SimulateResponse:
    """Returns the iteration's seconds and its timeline; one span a chunk, as the rank that took it, or as rank 0 where
    its group took it together.

    Args:
        request: The inputs, and the plan to run: from `plan`, or written by hand.

    Raises:
        InputError: the plan does not say what a stage of the workflow needs, names unknown devices, or deadlocks.

    Blocks for about 20 us of CPU a chunk.
    """
    model = build(request.request)
    seconds, tasks, events = run_plan(model, request.plan, record=True)
    if seconds > LONGEST_S:
        raise InputError(f"the plan takes {seconds:.3g} s, want at most {LONGEST_S:g}: correct the profile's seconds")
    response = sched_pb2.SimulateResponse(iteration_s=seconds)
    _fill(response.timeline, model, request.plan, tasks, events)
    return response


def run_plan(
    model: Model, plan: flow_pb2.ExecutionPlan, *, record: bool = False
) -> tuple[float, list[Task], list[Event]]:
    """Seconds of an iteration (in the steady state, for an asynchronous plan), the tasks, and what they did."""
    tasks = _tasks(model, plan)
    in_flight = 1 + plan.staleness
    iterations = 1 if plan.staleness == 0 else 4 * in_flight + 4
    clockwork = Clockwork(tasks, iterations, in_flight, record, bool(model.costs.corun))
    try:
        ends = clockwork.run()
    except RuntimeError as stuck:
        raise InputError(f"simulate: {stuck}: raise an edge's capacity or change the order") from None
    warm = 2 * in_flight
    seconds = ends[-1] if iterations == 1 else (ends[-1] - ends[warm - 1]) / (iterations - warm)
    return seconds, tasks, clockwork.events


def _tasks(model: Model, plan: flow_pb2.ExecutionPlan) -> list[Task]:
    workflow, costs = model.workflow, model.costs
    groups = {g.group: g for g in plan.groups}
    stages = {s.stage: s for s in plan.stages}
    used = {g for node in workflow.nodes for g in node.groups}
    kinds = {g: model.pools[spec.device_kind].ids for g, spec in workflow.groups.items() if g in used}
    check_plan(plan, (stage for node in workflow.nodes for stage in node.stages), kinds)
    tasks = []
    for i, node in enumerate(workflow.nodes):
        first, fed = stages[node.stages[0]], any(e.consumer == i for e in workflow.edges)
        lanes = _lanes(model, plan, i)
        fraction = min(1.0, _chunk(model, plan, i) / workflow.volumes[node.stages[0]]) / lanes
        chunks = max(1, ceil(1 / fraction - 1e-9))
        loop = _Loop(model, plan, node) if node.cyclic else None
        emits: list[float] = []
        if loop is not None and chunks == 1:
            emits = loop.emits(_pieces(model, plan, i))
        elif not fed and (curve := _curve_behind(model, plan, i)) is not None:
            emits = _curve.chunk_fractions(curve, _pieces(model, plan, i)).tolist()
        # A loop switches in each round: that is in its seconds.
        offloaded = [g for g in node.groups if groups[g].residency == flow_pb2.RESIDENCY_OFFLOADED and loop is None]
        switches = [costs.switch_s(g) for g in offloaded]
        tasks.append(
            Task(
                name=node.name,
                devices=frozenset(d for g in node.groups for d in groups[g].device_ids),
                chunks=chunks,
                fraction=fraction,
                position=first.position,
                hold=first.hold,
                onload_s=sum(s[0] for s in switches),
                offload_s=sum(s[1] for s in switches),
                needs=tuple({(e.producer, e.barrier) for e in workflow.edges if e.consumer == i}),
                # The outputs of a loop that runs as a whole wait for room one by one, not the loop for all of theirs.
                room=() if loop is not None and chunks == 1 else _room(model, plan, i),
                seconds=_seconds(model, plan, node, lanes) if loop is None else loop.seconds,
                emits=emits,
                gathers=_gathers(model, plan, i),
                lanes=lanes,
            )
        )
    for publish in workflow.publishes:
        tasks.append(_publication(model, plan, publish))
    return tasks


def _chunk(model: Model, plan: flow_pb2.ExecutionPlan, number: int) -> float:
    """Items that a node takes at a time. A loop that has all its input when the iteration begins, and lets nobody in
    between, takes all of them: it lets some in as others leave."""
    node = model.workflow.nodes[number]
    first = next(s for s in plan.stages if s.stage == node.stages[0])
    if not node.cyclic:
        return first.granularity
    own = {d for g in plan.groups if g.group in node.groups for d in g.device_ids}
    shared = any(own & set(g.device_ids) for g in plan.groups if g.group not in node.groups)
    if (first.hold or not shared) and not any(e.consumer == number for e in model.workflow.edges):
        return model.workflow.volumes[node.stages[0]]
    return _in_flight(model, plan, node) or first.granularity


def _lanes(model: Model, plan: flow_pb2.ExecutionPlan, number: int) -> int:
    """How many of a node's ranks take items as they come, each a share of the chunk, from one queue; 1 where the group
    takes chunks together: all that it has is there when it begins, or items have a rank of their own. Of many ranks
    some are as one."""
    workflow = model.workflow
    stage = workflow.stages[workflow.nodes[number].stages[0]]
    if stage.name in workflow.by_place or not any(e.consumer == number for e in workflow.edges):
        return 1
    num_ranks = next(g.num_ranks for g in plan.groups if g.group == stage.group) or 1
    granularity = next(s.granularity for s in plan.stages if s.stage == stage.name)
    if granularity >= workflow.volumes[stage.name]:
        return 1
    return min(_LANES, ceil(granularity / ceil(granularity / num_ranks)))


def _pieces(model: Model, plan: flow_pb2.ExecutionPlan, number: int) -> int:
    """In how many steps a node's items matter: so many that every chunk of one behind it ends with one of them."""
    stages, volumes = {s.stage: s for s in plan.stages}, model.workflow.volumes
    steps = [1]
    for edge in model.workflow.edges:
        if edge.producer == number:
            chunks = ceil(volumes[edge.stage] / stages[edge.stage].granularity - 1e-9)
            steps.append(chunks * _lanes(model, plan, edge.consumer))
            if number in _gathers(model, plan, edge.consumer):
                steps.append(_curve.KNOTS)
    return min(_EMISSIONS, lcm(*steps))


def _gathers(model: Model, plan: flow_pb2.ExecutionPlan, consumer: int) -> dict[int, Callable[[float], float]]:
    """By producer whose items are gathered for this node: what fraction of them makes a fraction of the groups, as it
    was measured where they come from."""
    found: dict[int, Callable[[float], float]] = {}
    for edge in model.workflow.edges:
        gathered = any(model.workflow.stages[via].kind == flow_pb2.STAGE_KIND_GATHER for via in edge.via)
        if edge.consumer == consumer and gathered:
            curve = _curve_behind(model, plan, edge.producer)
            if curve is not None and curve.group_fraction:
                found[edge.producer] = _curve.items_for_groups(curve)
    return found


def _curve_behind(model: Model, plan: flow_pb2.ExecutionPlan, number: int) -> sched_pb2.CompletionCurve | None:
    """The curve along which a node's items come: its own, or that of the first before it which has one. A stage that
    gets its input from another, or takes it in chunks, has none: it gives a chunk at its end."""
    node = model.workflow.nodes[number]
    before = [edge.producer for edge in model.workflow.edges if edge.consumer == number]
    if before:
        return next((found for other in before if (found := _curve_behind(model, plan, other)) is not None), None)
    granularity = next(s.granularity for s in plan.stages if s.stage == node.stages[0])
    if node.cyclic or granularity < model.workflow.volumes[node.stages[0]]:
        return None
    devices = next(len(g.device_ids) for g in plan.groups if g.group == node.groups[0])
    return _curve.nearest(model.request.profile.curves, node.name, devices)


def _in_flight(model: Model, plan: flow_pb2.ExecutionPlan, node: Node) -> int:
    """Items that are in a loop at once: what its feedback edge holds; 0 for any number."""
    sources = work_sources(model.workflow)
    streams = model.workflow.graph.streams
    back = {(s.producer, s.consumer) for s in streams if s.feedback and sources[s.producer] & set(node.stages)}
    return max((e.capacity for e in plan.edges if (e.producer, e.consumer) in back), default=0)


def _room(model: Model, plan: flow_pb2.ExecutionPlan, node: int) -> tuple[tuple[int, float], ...]:
    """Bounded edges out of a node, as the fraction of the iteration that they hold. What items pass on their way, a
    gather say, is behind the bound: it counts what the node puts."""
    workflow, capacity = model.workflow, {(e.producer, e.consumer): e.capacity for e in plan.edges}
    room = []
    for edge in workflow.edges:
        if edge.producer == node:
            first = edge.via[0] if edge.via else edge.stage
            held = max(capacity.get((stage, first), 0) for stage in workflow.nodes[node].stages)
            if held:
                room.append((edge.consumer, held / workflow.volumes[first]))
    return tuple(room)


def _seconds(
    model: Model, plan: flow_pb2.ExecutionPlan, node: Node, lanes: int
) -> Callable[[float, frozenset[str]], float]:
    """Seconds of a chunk of a node, by its fraction of the iteration and its neighbours; remembered.

    A lane takes as long for its share as the group does for a chunk of such shares.
    """
    stage, group = node.stages[0], node.groups[0]
    count = float(next(len(g.device_ids) for g in plan.groups if g.group == group))
    memo: dict[tuple[int, frozenset[str]], float] = {}

    def seconds(fraction: float, beside: frozenset[str]) -> float:
        key = round(fraction * 1e9), beside
        if key not in memo:
            items, neighbours = model.workflow.volumes[stage] * fraction * lanes, _stages_of(model, beside)
            memo[key] = float(model.costs.stage_seconds(stage, items, np.array([count]), neighbours)[0])
        return memo[key]

    return seconds


def _stages_of(model: Model, beside: frozenset[str]) -> frozenset[str]:
    """The stages of nodes that run side by side, where neighbours slow each other."""
    if not model.costs.corun:
        return frozenset()
    return frozenset(s for n in model.workflow.nodes if n.name in beside for s in n.stages)


class _Loop:
    """A node that is a loop, under a plan: its ranks on a clock of their own, once for every question."""

    def __init__(self, model: Model, plan: flow_pb2.ExecutionPlan, node: Node) -> None:
        self._model, self._plan, self._node = model, plan, node
        self._groups = {g.group: g for g in plan.groups}
        self._stages = {s.stage: s for s in plan.stages}
        self._memo: dict[tuple[int, frozenset[str]], tuple[float, list[float]]] = {}

    def seconds(self, fraction: float, beside: frozenset[str]) -> float:
        """Until a fraction of the iteration's items has been round as often as it has to, all switching included."""
        return self._run(fraction, beside)[0]

    def emits(self, pieces: int) -> list[float]:
        """The fractions of the time at which the j-th of so many equal parts of all items is out."""
        end, done = self._run(1.0, frozenset())
        return [done[ceil(j * len(done) / pieces) - 1] / end for j in range(1, pieces + 1)]

    def _run(self, fraction: float, beside: frozenset[str]) -> tuple[float, list[float]]:
        key = round(fraction * 1e9), beside
        if key not in self._memo:
            parts = [self._part(stage, beside) for stage in self._node.stages]
            items = max(1, round(self._model.workflow.volumes[self._node.stages[0]] * fraction))
            in_flight = _in_flight(self._model, self._plan, self._node)
            self._memo[key] = run_loop(parts, items, max(1, round(self._node.rounds)), in_flight)
        return self._memo[key]

    def _part(self, stage: str, beside: frozenset[str]) -> Part:
        model, group = self._model, self._group_of(stage)
        ids, num_ranks = list(group.device_ids), group.num_ranks or 1
        neighbours = _stages_of(model, beside) | {s for s in self._node.stages if not self._share(s, stage)}
        away = group.residency == flow_pb2.RESIDENCY_OFFLOADED
        onload_s, offload_s = model.costs.switch_s(group.group) if away else (0.0, 0.0)
        items_of = {i.stage: i for i in model.request.profile.loop_items}
        known = items_of.get(stage, sched_pb2.LoopItems())
        count = np.array([float(len(ids))])

        @cache
        def seconds(items: int) -> float:
            call = model.costs.stage_seconds(stage, items * num_ranks, count, frozenset(neighbours))
            return max(float(call[0]) - model.costs.hand_off_s(stage), _LEAST_S)

        @cache
        def emits(items: int) -> Sequence[float]:
            if not known.one_by_one:
                return [1.0] * items
            return [min(seconds(number) / seconds(items), 1.0) for number in range(1, items + 1)]

        width = len(ids) // num_ranks
        return Part(
            ranks=[frozenset(ids[r * width : (r + 1) * width]) for r in range(num_ranks)],
            share=-(-self._stages[stage].granularity // num_ranks),
            hold=self._stages[stage].hold,
            onload_s=onload_s,
            offload_s=offload_s,
            hand_off_s=model.costs.hand_off_s(stage),
            seconds=seconds,
            emits=emits,
            passes=known.passes,
            relative=known.relative,
            pulls=known.pulls,
        )

    def _share(self, one: str, other: str) -> bool:
        return not set(self._group_of(one).device_ids).isdisjoint(self._group_of(other).device_ids)

    def _group_of(self, stage: str) -> flow_pb2.GroupPlan:
        return self._groups[self._model.workflow.stages[stage].group]


def _publication(model: Model, plan: flow_pb2.ExecutionPlan, publish: flow_pb2.Stage) -> Task:
    workflow = model.workflow
    devices = frozenset(d for g in plan.groups if g.group in (publish.group, publish.to) for d in g.device_ids)
    position = max((s.position for s in plan.stages if s.stage == publish.name), default=1 << 30)
    cost = model.costs.sync_s(publish)
    return Task(
        name=publish.name,
        devices=devices,
        chunks=1,
        fraction=1.0,
        position=position,
        hold=False,
        onload_s=0.0,
        offload_s=0.0,
        needs=tuple((i, True) for i in range(len(workflow.nodes))),
        room=(),
        seconds=lambda _fraction, _beside: cost,
    )


def _fill(
    timeline: flow_pb2.Timeline, model: Model, plan: flow_pb2.ExecutionPlan, tasks: list[Task], events: list[Event]
) -> None:
    ids = {g.group: list(g.device_ids) for g in plan.groups}
    named = sum(len(tasks[e.task].devices) for e in events) <= _SPAN_DEVICES
    nodes = model.workflow.nodes
    for event in events:
        stages = nodes[event.task].stages if event.task < len(nodes) else (tasks[event.task].name,)
        for stage in stages:
            group = model.workflow.stages[stage].group
            devices = ids[group]
            if event.kind != "offload":
                lanes = tasks[event.task].lanes
                devices = devices[len(devices) * event.lane // lanes : len(devices) * (event.lane + 1) // lanes]
            timeline.spans.add(
                stage=stage,
                group=group,
                rank=event.lane,
                kind=_KINDS[event.kind],
                start_ns=round(event.start_s * 1e9),
                end_ns=round(event.end_s * 1e9),
                iteration=event.iteration,
                items=round(event.fraction * model.workflow.volumes[stage]),
                device_ids=devices if named else (),
            )
