"""Context switch: groups that share devices take turns.

before   rollout.generate, actor.train            both on devices [0, 1]: they would run into each other
after    turn 0: rollout.generate, then off       lock, onload, run, offload; producers before consumers
         turn 1: actor.train, then off
"""

from dataclasses import replace

from m2flow.flow.graph import Graph
from m2flow.flow.microflow import MicroFlow
from m2flow.proto.flow.v1 import flow_pb2 as pb


def context_switch(flow: MicroFlow, graph: Graph, plan: pb.ExecutionPlan) -> MicroFlow:
    """Marks the stages of sharing groups as locked, and the groups that leave their devices between turns."""
    sharing = {group for share in plan.share_groups for group in share.groups}
    stages = {stage.stage: stage for stage in plan.stages}
    offloaded = {group.group for group in plan.groups if group.residency == pb.RESIDENCY_OFFLOADED}
    changed = {
        stage.name: replace(
            stage,
            locked=stage.group in sharing or stage.to in sharing,
            position=stages[stage.name].position,
            hold=stages[stage.name].hold,
        )
        for stage in flow.stages
        if stage.name in stages
    }
    groups = tuple(replace(g, offload=g.name in offloaded and g.name in sharing) for g in flow.groups)
    return replace(flow.map_stages(changed), groups=groups)
