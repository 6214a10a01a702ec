"""The simulator against plans whose time is known by hand, and against the closed form."""

import random
from collections.abc import Callable

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import InputError, plan, simulate

Make = Callable[..., sched_pb2.PlanRequest]
GIB = 2.0**30


def _chain(rng: random.Random, stages: int, devices: int) -> sched_pb2.PlanRequest:
    """A chain of synthetic workers: start-up, divisible and serial work drawn at random."""
    graph = flow_pb2.WorkflowGraph(name="chain", source_items=64)
    profile = sched_pb2.Profile()
    for i in range(stages):
        graph.stages.add(name=f"s{i}", kind=flow_pb2.STAGE_KIND_WORK, group=f"g{i}", expansion=1)
        graph.groups.add(name=f"g{i}", device_kind="virtual", can_offload=True)
        if i:
            graph.streams.add(producer=f"s{i - 1}", consumer=f"s{i}")
        fixed, work = rng.uniform(0, 0.3), rng.uniform(0.5, 3)
        for count in (1, 2, 4):
            for items in (1, 4, 16):
                profile.samples.add(stage=f"s{i}", devices=count, items=items, seconds=fixed + work * items / count)
        held = rng.choice([20, 45])
        profile.switches.add(group=f"g{i}", onload_s=0.2, offload_s=0.1, resident_bytes=held * GIB, offloaded_bytes=GIB)
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n").devices.add(kind="virtual", count=devices, memory_bytes=80 * GIB)
    return sched_pb2.PlanRequest(workflow=graph, profile=profile, cluster=cluster)


@pytest.mark.parametrize(("mode", "within"), [("temporal", 0.01), ("spatial", 0.03), ("hybrid", 0.03)])
def test_search_and_simulation_agree_on_synthetic_workers(mode: str, within: float) -> None:
    """The best plan of 12 random chains; the two share no formula."""
    rng = random.Random(7)
    for _ in range(12):
        request = _chain(rng, rng.choice([2, 3, 4]), rng.choice([4, 8, 16]))
        request.mode = mode
        for ranked in plan(request).plans[:1]:
            assert ranked.simulated_s == pytest.approx(ranked.searched_s, rel=within), ranked.shape


def test_a_pipeline_takes_its_fill_and_the_slowest(make_request: Make) -> None:
    """Chunks of 16: rollout 0.5 + 4.8, reward 0.125, training 1 + 4.8; 4 chunks: sum + 3 x 5.8, and 0.4 to publish."""
    request = make_request(3, mode="spatial")
    request.profile.transfer_latency_s = 0
    chosen = flow_pb2.ExecutionPlan(mode="spatial")
    for i, group in enumerate(("rollout", "reward", "actor")):
        chosen.groups.add(group=group, device_ids=[i], num_ranks=1)
    for i, (stage, items) in enumerate((("rollout.generate", 16), ("reward.score", 128), ("actor.train", 16))):
        chosen.stages.add(stage=stage, granularity=items, position=i)
    result = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen))
    assert result.iteration_s == pytest.approx(5.3 + 0.125 + 5.8 + 3 * 5.8 + 0.4)
    busy = [s for s in result.timeline.spans if s.stage == "actor.train"]
    assert [s.items for s in busy] == [16] * 4
    assert list(busy[0].device_ids) == [2]


def test_offloaded_groups_pay_each_turn(make_request: Make) -> None:
    request = make_request(2, mode="temporal", memory_bytes=80 * GIB, resident_bytes=50 * GIB)
    best = plan(request).plans[0]
    result = simulate(sched_pb2.SimulateRequest(request=request, plan=best.plan))
    kinds = [s.kind for s in result.timeline.spans]
    assert kinds.count(flow_pb2.SPAN_KIND_ONLOAD) == kinds.count(flow_pb2.SPAN_KIND_OFFLOAD) == 3
    assert result.iteration_s == pytest.approx(best.searched_s)
    assert result.difference == pytest.approx(0, abs=1e-6)


def test_a_long_tail_is_hidden_by_a_pipeline(make_request: Make) -> None:
    """Nine tenths of the samples are out after half the time: training overlaps the tail in a spatial plan only."""
    request = make_request(8)
    curve = request.profile.curves.add(stage="rollout.generate")
    curve.time_fraction.extend([0.5, 1.0])
    curve.item_fraction.extend([0.9, 1.0])
    spatial = [p for p in plan(request).plans if p.shape.startswith("(rollout.generate |")]
    assert spatial
    granularity = {s.stage: s.granularity for s in spatial[0].plan.stages}
    assert granularity["rollout.generate"] == 64
    assert granularity["actor.train"] < 64
    assert spatial[0].simulated_s == pytest.approx(spatial[0].searched_s, rel=0.03)
    flat = make_request(8)
    slower = [p for p in plan(flat).plans if p.shape == spatial[0].shape]
    assert spatial[0].searched_s < slower[0].searched_s


def test_who_takes_groups_waits_until_they_are_whole(make_request: Make) -> None:
    """Nine tenths of the samples are out after half the time, and none of the groups: training begins at the end."""
    request = make_request(8, mode="spatial")
    curve = request.profile.curves.add(stage="rollout.generate", time_fraction=[0.5, 1.0], item_fraction=[0.9, 1.0])
    (chosen,) = [p.plan for p in plan(request).plans[:1]]
    early = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen))
    curve.group_fraction.extend([0.0, 1.0])
    late = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen))
    begins = [min(s.start_ns for s in run.timeline.spans if s.stage == "actor.train") for run in (early, late)]
    generated = max(s.end_ns for s in late.timeline.spans if s.stage == "rollout.generate")
    assert begins[0] < generated <= begins[1]
    assert early.iteration_s < late.iteration_s


def test_waiting_for_groups_stops_no_turn(make_request: Make) -> None:
    """Rewards and training take turns; half of the rewards are given before the first group is whole, none waits."""
    request = make_request(8, mode="hybrid")
    request.profile.curves.add(
        stage="rollout.generate", time_fraction=[0.5, 1.0], item_fraction=[0.9, 1.0], group_fraction=[0.1, 1.0]
    )
    response = plan(request)
    assert not [note for note in response.notes if "left out" in note]
    assert "(rollout.generate | (reward.score ; actor.train)) x8" in [p.shape for p in response.plans]


def test_ranks_of_one_queue_take_their_share_as_it_comes(make_request: Make) -> None:
    """512 samples come evenly within 19.7 s; a chunk is 128 of them. Four ranks begin with 32 each, one with 128."""
    request = make_request(6)
    steps = [n / 512 for n in range(1, 513)]
    request.profile.curves.add(stage="rollout.generate", time_fraction=steps, item_fraction=steps)
    chosen = flow_pb2.ExecutionPlan(mode="spatial")
    for group, devices in (("rollout", [0]), ("reward", [1, 2, 3, 4]), ("actor", [5])):
        chosen.groups.add(group=group, device_ids=devices, num_ranks=len(devices))
    for i, (stage, items) in enumerate((("rollout.generate", 64), ("reward.score", 128), ("actor.train", 16))):
        chosen.stages.add(stage=stage, granularity=items, position=i)
    timeline = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen)).timeline
    spans = [s for s in timeline.spans if s.stage == "reward.score"]
    assert [s.start_ns / 1e9 for s in spans] == pytest.approx([19.7 * n / 16 for n in range(1, 17)], rel=1e-6)
    assert {(s.items, tuple(s.device_ids)) for s in spans} == {(32, (1,))}
    chosen.groups[1].num_ranks = 1
    timeline = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen)).timeline
    assert [s.items for s in timeline.spans if s.stage == "reward.score"] == [128] * 4


def test_lanes_of_a_group_pay_their_own_onload(make_request: Make) -> None:
    request = make_request(6)
    request.profile.switches.add(group="reward", onload_s=0.25, offload_s=0.125)
    chosen = flow_pb2.ExecutionPlan(mode="spatial")
    for group, devices in (("rollout", [0]), ("reward", [1, 2]), ("actor", [5])):
        chosen.groups.add(group=group, device_ids=devices, num_ranks=len(devices))
    chosen.groups[1].residency = flow_pb2.RESIDENCY_OFFLOADED
    for i, (stage, items) in enumerate((("rollout.generate", 16), ("reward.score", 128), ("actor.train", 16))):
        chosen.stages.add(stage=stage, granularity=items, position=i)
    timeline = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen)).timeline
    spans = [s for s in timeline.spans if s.group == "reward"]
    kinds = [s.kind for s in spans]
    assert kinds.count(flow_pb2.SPAN_KIND_ONLOAD) == kinds.count(flow_pb2.SPAN_KIND_BUSY) == 8
    assert kinds.count(flow_pb2.SPAN_KIND_OFFLOAD) == 4
    assert {tuple(s.device_ids) for s in spans} == {(1,), (2,), (1, 2)}


def test_an_asynchronous_plan_overlaps_iterations(make_request: Make) -> None:
    synchronous = plan(make_request(8, mode="spatial")).plans[0]
    request = make_request(8, mode="spatial")
    request.max_staleness = 1
    best = plan(request).plans[0]
    assert best.plan.staleness == 1
    assert best.simulated_s < 0.9 * synchronous.simulated_s
    assert best.simulated_s == pytest.approx(best.searched_s, rel=0.03)


def test_neighbours_slow_each_other_where_that_was_measured(make_request: Make) -> None:
    request = make_request(8, mode="spatial")
    before = plan(request).plans[0]
    request.profile.samples.add(
        stage="actor.train", devices=4, items=16, seconds=2 * (1 + 0.3 * 16 / 4), beside=["rollout.generate"]
    )
    after = plan(request).plans[0]
    assert after.searched_s > 1.2 * before.searched_s
    assert before.simulated_s < after.simulated_s <= after.searched_s  # on the clock they overlap only partly


def test_a_plan_that_deadlocks_is_named(make_request: Make) -> None:
    request = make_request(2, mode="temporal")
    chosen = plan(request).plans[0].plan
    chosen.edges[1].capacity = 100  # rollout to reward, of 512: the turn's output does not fit
    with pytest.raises(InputError, match="never ends"):
        simulate(sched_pb2.SimulateRequest(request=request, plan=chosen))


def test_a_plan_without_a_group_is_refused(make_request: Make) -> None:
    request = make_request(2, mode="temporal")
    chosen = plan(request).plans[0].plan
    del chosen.groups[2]
    with pytest.raises(InputError, match="gives group 'actor' no devices"):
        simulate(sched_pb2.SimulateRequest(request=request, plan=chosen))
