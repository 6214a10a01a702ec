"""Small workflows, profiles and clusters that the tests of this package share."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2

WORK, GROUPS = flow_pb2.STAGE_KIND_WORK, ("rollout", "reward", "actor")


def grpo_graph(kind: str = "cuda", can_offload: bool = True) -> flow_pb2.WorkflowGraph:
    """Prompts, 8 samples each, a light reward, a gather, training, and publication; 64 prompts."""
    graph = flow_pb2.WorkflowGraph(name="grpo", source_items=64)
    graph.stages.add(name="prompts", kind=flow_pb2.STAGE_KIND_SOURCE, expansion=1)
    graph.stages.add(name="rollout.generate", kind=WORK, group="rollout", method="generate", expansion=8)
    graph.stages.add(name="reward.score", kind=WORK, group="reward", method="score", expansion=1)
    graph.stages.add(name="groups", kind=flow_pb2.STAGE_KIND_GATHER, by="prompt_id", expansion=1 / 8)
    graph.stages.add(name="advantages", kind=flow_pb2.STAGE_KIND_MAP, expansion=1)
    graph.stages.add(name="actor.train", kind=WORK, group="actor", method="train", expansion=1)
    graph.stages.add(name="metrics", kind=flow_pb2.STAGE_KIND_SINK, expansion=1)
    graph.stages.add(
        name="publish", kind=flow_pb2.STAGE_KIND_PUBLISH, group="actor", to="rollout", after=["actor.train"]
    )
    chain = ["prompts", "rollout.generate", "reward.score", "groups", "advantages", "actor.train", "metrics"]
    for producer, consumer in pairwise(chain):
        graph.streams.add(producer=producer, consumer=consumer)
    for group in GROUPS:
        graph.groups.add(
            name=group,
            device_kind=kind,
            devices_per_rank=1,
            min_devices=1,
            can_offload=can_offload,
            in_step=group == "actor",
        )
    return graph


def grpo_profile() -> sched_pb2.Profile:
    """Rollout 0.5 + 0.3 x/n seconds, reward light, training 1 + 0.3 x/n; 0.4 s to publish."""
    profile = sched_pb2.Profile(model="toy", hardware="toy", version="1", transfer_latency_s=0.002)
    for devices in (1, 2, 4):
        for items in (8, 16, 64):
            profile.samples.add(
                stage="rollout.generate", devices=devices, items=items, seconds=0.5 + 0.3 * items / devices
            )
            profile.samples.add(stage="actor.train", devices=devices, items=items, seconds=1.0 + 0.3 * items / devices)
    profile.samples.add(stage="reward.score", devices=1, items=512, seconds=0.5)
    profile.syncs.add(source="actor", target="rollout", seconds=0.4)
    return profile


def grpo_request(
    devices: int = 2,
    *,
    mode: str = "",
    kind: str = "cuda",
    memory_bytes: float = 0.0,
    resident_bytes: float = 0.0,
    can_offload: bool = True,
    quantum: int = 0,
) -> sched_pb2.PlanRequest:
    """The workflow on one node; `resident_bytes` is what each group holds, with half a second of switching."""
    profile = grpo_profile()
    if resident_bytes:
        for group in GROUPS:
            profile.switches.add(
                group=group,
                onload_s=0.3,
                offload_s=0.2,
                resident_bytes=resident_bytes,
                offloaded_bytes=resident_bytes / 20,
            )
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="node", count=1).devices.add(kind=kind, count=devices, memory_bytes=memory_bytes)
    return sched_pb2.PlanRequest(
        workflow=grpo_graph(kind, can_offload), profile=profile, cluster=cluster, mode=mode, device_quantum=quantum
    )


@pytest.fixture
def make_request() -> Callable[..., sched_pb2.PlanRequest]:
    return grpo_request
