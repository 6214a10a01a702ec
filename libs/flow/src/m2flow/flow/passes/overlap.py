"""Overlap: how far an iteration may start ahead of its weights.

before   rollout.generate waits for the weights of the last iteration
after    rollout.generate, weights at most 1 old: iteration t+1 generates while t trains
"""

from dataclasses import replace

from m2flow.flow.graph import Graph
from m2flow.flow.microflow import MicroFlow
from m2flow.proto.flow.v1 import flow_pb2 as pb


def overlap(flow: MicroFlow, graph: Graph, plan: pb.ExecutionPlan) -> MicroFlow:
    """Bounds the age of weights in every stage of a group that receives them."""
    receivers = {stage.to for stage in flow.stages if stage.kind == "publish"}
    changed = {
        stage.name: replace(stage, lag=plan.staleness)
        for stage in flow.stages
        if stage.kind == "work" and stage.group in receivers
    }
    return replace(flow.map_stages(changed), staleness=plan.staleness)
