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


def _work(groups: list[str], seconds: float, devices: int, memory: float = 0) -> sched_pb2.PlanRequest:
    """A chain of stages of these groups; an item takes `seconds` on any number of devices; a group holds 50 bytes."""
    graph = flow_pb2.WorkflowGraph(name="chain", source_items=64)
    profile = sched_pb2.Profile()
    for i, group in enumerate(groups):
        graph.stages.add(name=f"s{i}", kind=flow_pb2.STAGE_KIND_WORK, group=group, expansion=1)
        for count, items in ((1, 1), (1, 64), (4, 1), (4, 64)):
            profile.samples.add(stage=f"s{i}", devices=count, items=items, seconds=seconds * items)
    for i in range(len(groups) - 1):
        graph.streams.add(producer=f"s{i}", consumer=f"s{i + 1}")
    for group in dict.fromkeys(groups):
        graph.groups.add(name=group, device_kind="cuda", can_offload=True)
        profile.switches.add(group=group, onload_s=1, offload_s=1, resident_bytes=50, offloaded_bytes=1)
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n").devices.add(kind="cuda", count=devices, memory_bytes=memory)
    return sched_pb2.PlanRequest(workflow=graph, profile=profile, cluster=cluster)


def test_pipelines_that_take_turns_as_a_whole_load_once() -> None:
    """Two pipelines of 65 s, one after the other; each group loads once and leaves once, one load being hidden."""
    request = _work(["g0", "g1", "g2", "g3"], 1, 2, memory=80)
    request.workflow.stages[2].after.append("s1")
    answer = plan(request)
    best = answer.plans[0]
    assert best.shape == "((s0 | s1) x64 ; (s2 | s3) x64)"
    assert (best.searched_s, best.simulated_s) == pytest.approx((136, 135))
    assert all(s.hold for s in best.plan.stages)
    assert not any(e.capacity for e in best.plan.edges)


def test_an_edge_from_one_pipeline_to_another_has_no_bound() -> None:
    answer = plan(_work(["a", "b", "c", "a", "b", "c"], 1, 3))
    two = next(p for p in answer.plans if p.shape == "((s0 | (s1 ; s2)) x64 ; (s3 | (s4 ; s5)) x64)")
    held = {(e.producer, e.consumer): e.capacity for e in two.plan.edges}
    assert (held["s1", "s2"], held["s2", "s3"], held["s4", "s5"]) == (1, 0, 1)
    assert two.simulated_s == pytest.approx(two.searched_s, rel=0.01)


def _by_hand(chosen: list[tuple[list[int], int, bool]]) -> flow_pb2.ExecutionPlan:
    """A plan of stages s0, s1, ... of groups g0, g1, ..., in this order: devices, granularity, hold."""
    made = flow_pb2.ExecutionPlan(mode="hybrid")
    for i, (ids, granularity, hold) in enumerate(chosen):
        made.groups.add(group=f"g{i}", device_ids=ids, num_ranks=1)
        made.stages.add(stage=f"s{i}", granularity=granularity, position=i, hold=hold)
    return made


def _starts_s(request: sched_pb2.PlanRequest, chosen: flow_pb2.ExecutionPlan, stage: str) -> list[float]:
    spans = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen)).timeline.spans
    return [s.start_ns / 1e9 for s in spans if s.stage == stage]


def test_what_an_earlier_ticket_waits_for_is_given_to_no_later_one() -> None:
    """s1 needs three devices from 16 s on; s2 has one of them until 32 s, s3 the other until 24 s, and no longer."""
    request = _work(["g0", "g1", "g2", "g3"], 1, 3)
    del request.workflow.streams[1:]
    chosen = _by_hand([([0], 16, False), ([0, 1, 2], 16, False), ([1], 32, False), ([2], 12, False)])
    chosen.edges.add(producer="s0", consumer="s1", capacity=16)
    assert _starts_s(request, chosen, "s1")[0] == pytest.approx(32)


def test_a_turn_of_an_iteration_waits_for_the_turns_before_it() -> None:
    """s2 could begin while s1 waits for its second chunk; but s1, on the same device, comes first with all of its."""
    request = _work(["g0", "g1", "g2"], 1, 2)
    del request.workflow.streams[1]
    chosen = _by_hand([([0], 16, False), ([1], 16, False), ([1], 64, True)])
    assert _starts_s(request, chosen, "s2") == [pytest.approx(80)]


def test_a_producer_goes_on_when_its_consumer_makes_room() -> None:
    """An edge of one chunk: s0 begins its second as s1 takes the first, and both are at work at once."""
    request = _work(["g0", "g1"], 1, 2)
    chosen = _by_hand([([0], 16, False), ([1], 16, False)])
    chosen.edges.add(producer="s0", consumer="s1", capacity=16)
    assert _starts_s(request, chosen, "s0") == pytest.approx([0, 16, 32, 48])


def test_a_stage_that_others_of_its_layer_hold_up_may_be_a_chunk_further_ahead() -> None:
    """s0 may run two chunks ahead of s3; s1, behind it, is then not held up by s3 as well."""
    request = _work(["g0", "g1", "g2", "g3"], 1, 2)
    del request.workflow.streams[:]
    for first, second in ((0, 3), (1, 2), (1, 3), (2, 3)):
        request.workflow.streams.add(producer=f"s{first}", consumer=f"s{second}")
    each = {"s0": 0.87, "s1": 1.27, "s2": 0.57, "s3": 1.07}
    for sample in request.profile.samples:
        sample.seconds = each[sample.stage] * sample.items
    pipe = next(p for p in plan(request).plans if p.shape == "((s0 ; s1) | (s2 ; s3)) x64")
    assert pipe.simulated_s == pytest.approx(pipe.searched_s, rel=0.02)
