"""Pipeline: how many items move at once on each edge, and how they find their rank.

    before   rollout.generate -> actor.train (gather)                 one batch
    after    rollout.generate -> actor.train (gather), chunks of 4    training starts when 4 groups are there

Independent replicas pull from one queue, so the faster one does more. Where items must meet (gathers, joins, loops) or
ranks move in step, each item is routed by its place at the source: the same rank for the same place, on every run.
"""

from dataclasses import replace

from m2flow.flow.graph import Graph
from m2flow.flow.microflow import MicroFlow, MicroStage
from m2flow.proto.flow.v1 import flow_pb2 as pb

_MEETS = frozenset({"gather", "join", "merge"})


def pipeline(flow: MicroFlow, graph: Graph, plan: pb.ExecutionPlan) -> MicroFlow:
    """Sets granularity, share, routes and capacities."""
    plans = {stage.stage: stage for stage in plan.stages}
    eager = graph.in_cycles | graph.before_quotas
    return flow.map_stages(
        {
            stage.name: _piped(flow, stage, graph, plans[stage.name], stage.name in eager, plan)
            if stage.name in plans
            else stage
            for stage in flow.stages
        }
    )


def _piped(
    flow: MicroFlow, stage: MicroStage, graph: Graph, own: pb.StagePlan, eager: bool, plan: pb.ExecutionPlan
) -> MicroStage:
    group = flow.group(stage.group)
    num_ranks = len(group.ranks)
    # What goes round a loop keeps to its ranks, and so does what enters it by another stage of theirs.
    stays = any(other.name in graph.in_cycles for other in flow.stages_of(group.name))
    meets = any(op.kind in _MEETS for op in stage.inbox.ops)
    return replace(
        stage,
        granularity=own.granularity,
        share=-(-own.granularity // num_ranks),
        eager=eager,
        inbox=replace(
            stage.inbox,
            routed=num_ranks > 1 and (meets or stays or group.in_step or stage.inbox.window > 0),
            capacity=inbox_capacity(plan, stage.inbox.ports, graph.into(stage.name)),
        ),
    )


def inbox_capacity(plan: pb.ExecutionPlan, ports: tuple[str, ...], edges: set[tuple[str, str]]) -> int:
    """Items that an inbox may hold: the sum over its producers, without bound (0) where one of them has none."""
    held = {edge.producer: edge.capacity for edge in plan.edges if (edge.producer, edge.consumer) in edges}
    capacities = [held.get(port, 0) for port in ports]
    return sum(capacities) if capacities and all(capacities) else 0
