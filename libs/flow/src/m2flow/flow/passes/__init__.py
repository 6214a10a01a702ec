"""From a graph and a plan to the micro flow that runs it: five passes, in one list.

Each pass is a pure function from a micro flow, the graph and the plan to the next micro flow, and each says one thing:

    fuse            what runs inside its consumer's process needs no channel and no worker
    place           which devices the ranks of each group have
    pipeline        how many items move at once, and how they find their rank
    context_switch  who takes turns, in which order, and what leaves the device between turns
    overlap         how far an iteration may start ahead of its weights
"""

from collections.abc import Callable

from m2flow.flow.graph import Graph
from m2flow.flow.microflow import MicroFlow
from m2flow.flow.passes.fuse import fuse
from m2flow.flow.passes.lift import lift
from m2flow.flow.passes.overlap import overlap
from m2flow.flow.passes.pipeline import pipeline
from m2flow.flow.passes.place import place
from m2flow.flow.passes.switch import context_switch
from m2flow.proto.flow.v1 import flow_pb2 as pb

Pass = Callable[[MicroFlow, Graph, pb.ExecutionPlan], MicroFlow]

PASSES: tuple[Pass, ...] = (fuse, place, pipeline, context_switch, overlap)


def lower(graph: Graph, plan: pb.ExecutionPlan) -> MicroFlow:
    """The micro flow of a graph under a plan that `check_plan` accepts."""
    flow = lift(graph)
    for step in PASSES:
        flow = step(flow, graph, plan)
    return flow


__all__ = ["PASSES", "Pass", "context_switch", "fuse", "lift", "lower", "overlap", "pipeline", "place"]
