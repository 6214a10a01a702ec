"""How a plan would run: a discrete-event simulation of one iteration, with its timeline."""

from collections.abc import Callable
from math import ceil

import numpy as np

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import _curve
from m2flow.sched._build import Model, build
from m2flow.sched._events import Clockwork, Event, Task, ring_seconds
from m2flow.sched.errors import InputError

_EMISSIONS = 4096  # a curve lets its items out in at most so many steps
_SPAN_DEVICES = 200_000  # device ids in a timeline: more would be a file that nobody opens
_KINDS = {"busy": flow_pb2.SPAN_KIND_BUSY, "onload": flow_pb2.SPAN_KIND_ONLOAD, "offload": flow_pb2.SPAN_KIND_OFFLOAD}


def simulate(request: sched_pb2.SimulateRequest) -> sched_pb2.SimulateResponse:
    """Returns the iteration's seconds and its timeline; one span a chunk, as rank 0 of its group.

    Args:
        request: The inputs, and the plan to run: from `plan`, or written by hand.

    Raises:
        InputError: the plan does not say what a stage of the workflow needs, names unknown devices, or deadlocks.

    Blocks for about 20 us of CPU a chunk.
    """
    model = build(request.request)
    seconds, tasks, events = run_plan(model, request.plan, record=True)
    response = sched_pb2.SimulateResponse(iteration_s=seconds, searched_s=request.plan.prediction.iteration_s)
    if response.searched_s:
        response.difference = seconds / response.searched_s - 1
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
    known = {d for pool in model.pools.values() for d in pool.ids}
    for node in workflow.nodes:
        for stage in node.stages:
            if stage not in stages:
                raise InputError(f"the plan says nothing of stage {stage!r}, want its granularity: add it to `stages`")
        for group in node.groups:
            if group not in groups or not groups[group].device_ids:
                raise InputError(f"the plan gives group {group!r} no devices, want one or more: add it to `groups`")
            strange = sorted(set(groups[group].device_ids) - known)
            if strange:
                raise InputError(f"group {group!r} has devices {strange[:5]}, want ids of the cluster: use its own")
    tasks = []
    for i, node in enumerate(workflow.nodes):
        first = stages[node.stages[0]]
        curve = next((c for c in model.request.profile.curves if c.stage == node.name), None)
        volume = workflow.volumes[node.stages[0]]
        batches = _batches(model, plan, node.stages) if node.cyclic else 1
        fraction = min(1.0, first.granularity * batches / volume)
        chunks = max(1, ceil(1 / fraction - 1e-9))
        emits: list[float] = []
        if curve is not None and chunks == 1 and not any(e.consumer == i for e in workflow.edges):
            steps = [_consumer_chunks(model, stages, e.consumer) for e in workflow.edges if e.producer == i]
            emits = _curve.chunk_fractions(curve, min(_EMISSIONS, max(steps, default=1))).tolist()
        offloaded = [g for g in node.groups if groups[g].residency == flow_pb2.RESIDENCY_OFFLOADED]
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
                room=_room(model, plan, i),
                seconds=_seconds(model, plan, i, batches),
                emits=emits,
            )
        )
    for publish in workflow.publishes:
        tasks.append(_publication(model, plan, publish))
    return tasks


def _consumer_chunks(model: Model, stages: dict[str, flow_pb2.StagePlan], node: int) -> int:
    stage = model.workflow.nodes[node].stages[0]
    return max(1, ceil(model.workflow.volumes[stage] / stages[stage].granularity - 1e-9))


def _batches(model: Model, plan: flow_pb2.ExecutionPlan, stages: tuple[str, ...]) -> int:
    """Sub-batches of a cycle that are in flight: what its feedback edge holds, in granularities."""
    granularity = next(s.granularity for s in plan.stages if s.stage == stages[0])
    feedback = {(s.producer, s.consumer) for s in model.workflow.graph.streams if s.feedback}
    held = [e.capacity for e in plan.edges if (e.producer, e.consumer) in feedback and e.consumer in stages]
    return max(1, round(max(held, default=0) / max(granularity, 1)))


def _room(model: Model, plan: flow_pb2.ExecutionPlan, node: int) -> tuple[tuple[int, float], ...]:
    """Bounded edges out of a node, through passive stages too, as the fraction of the iteration that they hold."""
    workflow, capacity = model.workflow, {(e.producer, e.consumer): e.capacity for e in plan.edges}
    room = []
    for edge in workflow.edges:
        if edge.producer == node:
            chain = [None, *edge.via, edge.stage]
            last = chain[-2]
            sources = [last] if last else list(workflow.nodes[node].stages)
            held = max((capacity.get((s, edge.stage), 0) for s in sources), default=0)
            if held:
                room.append((edge.consumer, held / workflow.volumes[edge.stage]))
    return tuple(room)


def _seconds(
    model: Model, plan: flow_pb2.ExecutionPlan, node: int, batches: int
) -> Callable[[float, frozenset[str]], float]:
    """Seconds of a chunk of a node, by its fraction of the iteration and its neighbours; remembered."""
    workflow, costs = model.workflow, model.costs
    spec = workflow.nodes[node]
    group_of = {s.name: s.group for s in workflow.graph.stages}
    ids = {g.group: tuple(g.device_ids) for g in plan.groups}
    stages_of = {n.name: n.stages for n in workflow.nodes}
    apart = len({ids[g] for g in spec.groups}) == len(spec.groups) > 1
    memo: dict[tuple[int, frozenset[str]], float] = {}

    def part(stage: str, fraction: float, beside: frozenset[str]) -> float:
        count = np.array([float(len(ids[group_of[stage]]))])
        return float(costs.stage_seconds(stage, workflow.volumes[stage] * fraction, count, beside)[0])

    def seconds(fraction: float, beside: frozenset[str]) -> float:
        key = round(fraction * 1e9), beside
        if key not in memo:
            stages = frozenset(s for name in beside for s in stages_of.get(name, ())) if costs.corun else frozenset()
            if not spec.cyclic:
                memo[key] = part(spec.stages[0], fraction, stages)
            else:
                pieces = batches if apart else 1
                others = frozenset(spec.stages) if apart else frozenset()
                times = {s: part(s, fraction / pieces, stages | others - {s}) for s in spec.stages}
                server = {s: group_of[s] if apart else "all" for s in spec.stages}
                memo[key] = ring_seconds(times, server, max(1, round(spec.rounds)), pieces)
        return memo[key]

    return seconds


def _publication(model: Model, plan: flow_pb2.ExecutionPlan, publish: flow_pb2.Stage) -> Task:
    workflow = model.workflow
    known = {(s.source, s.target): s.seconds for s in model.request.profile.syncs}
    devices = frozenset(d for g in plan.groups if g.group in (publish.group, publish.to) for d in g.device_ids)
    position = max((s.position for s in plan.stages if s.stage == publish.name), default=1 << 30)
    cost = known.get((publish.group, publish.to), 0.0)
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
    group_of = {s.name: s.group for s in model.workflow.graph.stages}
    ids = {g.group: list(g.device_ids) for g in plan.groups}
    named = sum(len(tasks[e.task].devices) for e in events) <= _SPAN_DEVICES
    nodes = model.workflow.nodes
    for event in events:
        stages = nodes[event.task].stages if event.task < len(nodes) else (tasks[event.task].name,)
        for stage in stages:
            group = group_of[stage]
            timeline.spans.add(
                stage=stage,
                group=group,
                rank=0,
                kind=_KINDS[event.kind],
                start_ns=round(event.start_s * 1e9),
                end_ns=round(event.end_s * 1e9),
                iteration=event.iteration,
                items=round(event.fraction * model.workflow.volumes[stage]),
                device_ids=ids[group] if named else (),
            )
