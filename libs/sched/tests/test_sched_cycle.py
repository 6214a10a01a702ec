"""Cycles: one node, in turns or spread, with batches in flight; a ring on a clock is the oracle of the formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import plan
from m2flow.sched._cycle import spread_seconds
from m2flow.sched._events import ring_seconds


def embodied(simulator_s: float, policy_s: float, *, simulator_kind: str = "cuda") -> sched_pb2.PlanRequest:
    """A policy and a simulator in a loop of 20 rounds over 64 environments, then training."""
    graph = flow_pb2.WorkflowGraph(name="embodied", source_items=64)
    for name in ("policy.act", "simulator.step", "actor.train"):
        graph.stages.add(name=name, kind=flow_pb2.STAGE_KIND_WORK, group=name.split(".")[0], expansion=1)
    graph.streams.add(producer="policy.act", consumer="simulator.step")
    graph.streams.add(producer="simulator.step", consumer="policy.act", feedback=True, rounds=20)
    graph.stages.add(name="whiten", kind=flow_pb2.STAGE_KIND_BARRIER, expansion=1)
    graph.streams.add(producer="simulator.step", consumer="whiten")
    graph.streams.add(producer="whiten", consumer="actor.train")
    for group in ("policy", "simulator", "actor"):
        graph.groups.add(name=group, device_kind=simulator_kind if group == "simulator" else "cuda", can_offload=True)
    profile = sched_pb2.Profile()
    for stage, fixed, work in (
        ("policy.act", 0.0, policy_s),
        ("simulator.step", simulator_s, 0.0),
        ("actor.train", 0.5, 2.0),
    ):
        for count in (1, 2, 4):
            for items in (8, 32, 64):
                seconds = max(fixed + work * items / count, 1e-6)
                profile.samples.add(stage=stage, devices=count, items=items, seconds=seconds)
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n", cores=16).devices.add(kind="cuda", count=8)
    return sched_pb2.PlanRequest(workflow=graph, profile=profile, cluster=cluster)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_the_formula_of_a_ring_is_what_a_ring_takes(parts: list[float], rounds: int, batches: int) -> None:
    """Within 1%, and never less than the clock says it must be: the formula may wait where the clock does not."""
    names = {f"p{i}": seconds for i, seconds in enumerate(parts)}
    clock = ring_seconds(names, {n: n for n in names}, rounds, batches)
    formula = float(spread_seconds(np.array(parts)[:, None], rounds, batches)[0])
    assert clock == pytest.approx(formula, rel=0.01)


def test_parts_on_one_server_take_their_sum() -> None:
    parts = {"a": 1.0, "b": 2.0}
    assert ring_seconds(parts, dict.fromkeys(parts, "all"), 3, 1) == pytest.approx(9.0)


def test_a_simulator_that_does_not_scale_gets_few_devices() -> None:
    best = plan(embodied(0.1, 0.05)).plans[0]
    ids = {g.group: set(g.device_ids) for g in best.plan.groups}
    assert best.plan.mode == "hybrid"
    assert not ids["policy"] & ids["simulator"]
    assert len(ids["simulator"]) < len(ids["policy"])
    assert ids["actor"] == set(range(8))
    assert best.simulated_s == pytest.approx(best.searched_s, rel=0.01)


def test_sub_batches_are_told_by_granularity_and_the_feedback_edge() -> None:
    best = plan(embodied(0.1, 0.05)).plans[0].plan
    granularity = {s.stage: s.granularity for s in best.stages}
    feedback = next(e for e in best.edges if e.producer == "simulator.step" and e.consumer == "policy.act")
    assert granularity["policy.act"] == granularity["simulator.step"] < 64
    assert feedback.capacity == 64


def test_a_simulator_on_cores_leaves_the_accelerators_to_the_policy() -> None:
    request = embodied(0.1, 0.05, simulator_kind="cpu")
    best = plan(request).plans[0].plan
    ids = {g.group: list(g.device_ids) for g in best.groups}
    assert best.mode == "temporal"
    assert ids["policy"] == ids["actor"] == list(range(8))
    assert min(ids["simulator"]) >= 8
