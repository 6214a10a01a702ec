"""Pipeline: how many items move at once on each edge, and how they find their rank.

    before   rollout.generate -> actor.train (gather)                 one batch
    after    rollout.generate -> actor.train (gather), chunks of 4    training starts when 4 groups are there

Independent replicas pull from one queue, so the faster one does more. Where items must meet (gathers, joins, loops) or
ranks move in step, each item is routed by its place at the source: the same rank for the same place, on every run.
"""

from dataclasses import replace

from m2flow.flow.graph import Graph
from m2flow.flow.microflow import MicroFlow, MicroStage, Op
from m2flow.proto.flow.v1 import flow_pb2 as pb

_MEETS = frozenset({pb.STAGE_KIND_GATHER, pb.STAGE_KIND_JOIN, pb.STAGE_KIND_MERGE})


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
    num_ranks = len(flow.group(stage.group).ranks)
    return replace(
        stage,
        granularity=own.granularity,
        share=-(-own.granularity // num_ranks),
        eager=eager,
        inbox=replace(
            stage.inbox,
            ops=tuple(replace(op, local=_is_local(op, graph, num_ranks)) for op in stage.inbox.ops),
            routed=is_routed(graph, stage.name, num_ranks),
            capacity=inbox_capacity(graph, plan, stage.name),
            in_flight=-(-_in_flight(graph, plan, stage.name) // num_ranks),
        ),
    )


def is_routed(graph: Graph, name: str, num_ranks: int) -> bool:
    """Whether items find their rank of a stage by their place, rather than go to whichever asks first."""
    stage = graph.stages[name]
    meets = any(glue.kind in _MEETS for glue in graph.glue_before(name)) or len(graph.inputs(name)) > 1
    # What goes round a loop keeps to its ranks, and so does what enters it by another stage of theirs.
    stays = any(other.name in graph.in_cycles for other in graph.stages_of(stage.group))
    in_step = graph.groups[stage.group].in_step
    return num_ranks > 1 and (meets or stays or in_step or stage.order_window > 0)


def _is_local(op: Op, graph: Graph, num_ranks: int) -> bool:
    """Whether a gather would not see, or not count, what it gathers of several source items."""
    return op.kind == "gather" and (num_ranks > 1 or op.name in graph.before_quotas)


def inbox_capacity(graph: Graph, plan: pb.ExecutionPlan, name: str) -> int:
    """Items that a stage's inbox may hold: the sum over its producers, without bound (0) where one of them has none.

    What goes round a loop always finds room: there is no more of it than has entered, and whoever waited for room
    would wait for itself.
    """
    if name in graph.in_cycles:
        return 0
    ports, edges = graph.workers_before(name), graph.into(name)
    held = {edge.producer: edge.capacity for edge in plan.edges if (edge.producer, edge.consumer) in edges}
    capacities = [held.get(port, 0) for port in ports]
    return sum(capacities) if capacities and all(capacities) else 0


def _in_flight(graph: Graph, plan: pb.ExecutionPlan, name: str) -> int:
    """Items that may be in the loop that a stage is the head of: what its feedback holds; 0 for any number."""
    back = {(s.producer, s.consumer) for s in graph.streams if s.feedback} & graph.into(name)
    return max((edge.capacity for edge in plan.edges if (edge.producer, edge.consumer) in back), default=0)
