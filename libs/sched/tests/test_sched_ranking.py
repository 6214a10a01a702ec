"""Predictions from noisy profiles against the truth that the profiles were drawn from: error and ranking.

200 random chains with M2FLOW_PROOFS=1, a fixed slice of them otherwise.
"""

import math
import os
import random
from itertools import combinations

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import plan, simulate

NUM_CHAINS = 200 if os.environ.get("M2FLOW_PROOFS") == "1" else 12
NOISE = 0.02
GIB = 2.0**30


def _chain(rng: random.Random) -> sched_pb2.PlanRequest:
    """A chain of stages with start-up and divisible work, some of which must switch; nine exact samples each."""
    graph = flow_pb2.WorkflowGraph(name="chain", source_items=64)
    profile = sched_pb2.Profile()
    for i in range(rng.choice([2, 3, 4])):
        graph.stages.add(name=f"s{i}", kind=flow_pb2.STAGE_KIND_WORK, group=f"g{i}", expansion=1)
        graph.groups.add(name=f"g{i}", device_kind="virtual", can_offload=True)
        if i:
            graph.streams.add(producer=f"s{i - 1}", consumer=f"s{i}")
        fixed, work = rng.uniform(0, 0.3), rng.uniform(0.5, 3)
        for devices in (1, 2, 4):
            for items in (1, 4, 16):
                seconds = fixed + work * items / devices
                profile.samples.add(stage=f"s{i}", devices=devices, items=items, seconds=seconds)
        held = rng.choice([20, 45]) * GIB
        profile.switches.add(group=f"g{i}", onload_s=0.2, offload_s=0.1, resident_bytes=held, offloaded_bytes=GIB)
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n").devices.add(kind="virtual", count=rng.choice([4, 8, 16]), memory_bytes=80 * GIB)
    return sched_pb2.PlanRequest(workflow=graph, profile=profile, cluster=cluster)


def _measured(truth: sched_pb2.PlanRequest, rng: random.Random) -> sched_pb2.PlanRequest:
    noisy = sched_pb2.PlanRequest()
    noisy.CopyFrom(truth)
    for sample in noisy.profile.samples:
        sample.seconds *= math.exp(rng.gauss(0, NOISE))
    return noisy


@pytest.mark.parametrize("first", range(0, NUM_CHAINS, 4))
def test_plans_that_differ_by_more_than_their_errors_rank_as_they_run(first: int) -> None:
    """Of each chain's best twenty, every two; and the truth lies within the stated error of nearly every plan."""
    compared, outside, plans = 0, 0, 0
    for seed in range(first, first + 4):
        rng = random.Random(seed)
        truth = _chain(rng)
        ranked = plan(_measured(truth, rng)).plans
        runs = [simulate(sched_pb2.SimulateRequest(request=truth, plan=p.plan)).iteration_s for p in ranked]
        outside += sum(
            abs(p.simulated_s - run) > p.plan.prediction.error_s for p, run in zip(ranked, runs, strict=True)
        )
        plans += len(ranked)
        for (one, one_s), (other, other_s) in combinations(zip(ranked, runs, strict=True), 2):
            error = one.plan.prediction.error_s + other.plan.prediction.error_s
            if other.simulated_s - one.simulated_s > error:
                compared += 1
                assert one_s < other_s, (seed, one.shape, other.shape)
    assert compared >= 10  # pairs far enough apart to say something of
    assert outside <= 0.3 * plans
