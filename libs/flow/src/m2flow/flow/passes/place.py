"""Place: every group gets its ranks and their devices.

before   actor                                                    a name
after    actor on 2 x 2 devices [0, 1, 2, 3]                      rank 0 has 0 and 1, rank 1 has 2 and 3
"""

from dataclasses import replace

from m2flow.flow.graph import Graph
from m2flow.flow.microflow import MicroFlow, MicroGroup
from m2flow.proto.flow.v1 import flow_pb2 as pb


def place(flow: MicroFlow, graph: Graph, plan: pb.ExecutionPlan) -> MicroFlow:
    """Deals each group's device ids to its ranks, in order."""
    plans = {group.group: group for group in plan.groups}
    return replace(flow, groups=tuple(_placed(group, plans[group.name]) for group in flow.groups))


def _placed(group: MicroGroup, plan: pb.GroupPlan) -> MicroGroup:
    width = len(plan.device_ids) // plan.num_ranks
    ids = list(plan.device_ids)
    ranks = tuple(tuple(ids[rank * width : (rank + 1) * width]) for rank in range(plan.num_ranks))
    return replace(group, ranks=ranks)
