"""Cycles: one node, in turns or spread, with batches in flight; a ring on a clock is the oracle of the formula."""

import heapq
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import plan, simulate
from m2flow.sched._cycle import spread_seconds
from m2flow.sched._loop import Part, longest_of, run_loop


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


def ring_seconds(parts: Mapping[str, float], servers: Mapping[str, str], rounds: int, batches: int) -> float:
    """Seconds until `batches` equal batches have each gone `rounds` times round the parts, first come first served.

    Args:
        parts: Seconds of one batch at each part, in ring order.
        servers: By part, what it occupies: parts with one server take turns on it.
    """
    names = list(parts)
    free = dict.fromkeys(servers.values(), 0.0)
    heap = [(0.0, batch, 0) for batch in range(batches)]  # by arrival: each part serves in that order
    heapq.heapify(heap)
    last, arrivals = 0.0, batches
    while heap:
        ready, _, step = heapq.heappop(heap)
        part = names[step % len(names)]
        end = max(ready, free[servers[part]]) + parts[part]
        free[servers[part]] = end
        last = max(last, end)
        if step + 1 < rounds * len(names):
            arrivals += 1
            heapq.heappush(heap, (end, arrivals, step + 1))
    return last


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


def part(
    ranks: list[set[int]], seconds: float, *, share: int = 1, switch_s: float = 0.0, emits: tuple[float, ...] = ()
) -> Part:
    """A stage whose calls take as long however many items they have."""
    return Part(
        ranks=[frozenset(devices) for devices in ranks],
        share=share,
        hold=True,
        onload_s=switch_s,
        offload_s=switch_s,
        hand_off_s=0.0,
        seconds=lambda _: seconds,
        emits=lambda items: emits[:items] or [1.0] * items,
    )


def test_a_loop_of_single_items_is_a_ring() -> None:
    """Three items, four rounds, parts of 1 and 2 seconds on devices of their own: the slower part is never idle."""
    end, done = run_loop([part([{0}], 1.0), part([{1}], 2.0)], items=3, rounds=4)
    assert end == pytest.approx(1 + 3 * 4 * 2.0)
    assert len(done) == 3


def test_parts_on_one_device_take_turns_and_switch_in_every_round() -> None:
    """Two ranks, each a device that both parts share: three rounds of (0.5 + 1 + 0.5) + (0.5 + 2 + 0.5)."""
    shared: list[set[int]] = [{0}, {1}]
    parts = [part(shared, 1.0, share=2, switch_s=0.5), part(shared, 2.0, share=2, switch_s=0.5)]
    end, done = run_loop(parts, items=4, rounds=3)
    assert end == pytest.approx(3 * (2.0 + 3.0))
    assert done[-1] == pytest.approx(end - 0.5)


def test_items_go_on_before_the_slowest_of_their_call() -> None:
    """The second item of each call of the first part takes 9 s longer than the first, which is through long before."""
    parts = [part([{0}], 10.0, share=2, emits=(0.1, 1.0)), part([{1}], 1.0, share=2)]
    end, done = run_loop(parts, items=2, rounds=1)
    assert done == pytest.approx([2.0, 11.0])
    assert end == pytest.approx(11.0)


def test_many_items_are_followed_some_at_a_time() -> None:
    """1,000 items of one rank in calls of ten, and of 100 ranks that never meet: as long as it takes one of them."""
    end, _ = run_loop([part([{0}], 1.0, share=1000)], items=1000, rounds=5)
    assert end == pytest.approx(5.0)
    ranks: list[set[int]] = [{r} for r in range(100)]
    end, done = run_loop([part(ranks, 1.0, share=10), part(ranks, 2.0, share=10)], items=1000, rounds=5)
    assert end == pytest.approx(15.0)
    assert len(done) == 10


def test_items_leave_when_they_have_gone_round_as_often_as_they_do() -> None:
    """Two calls of both items, each 1 + 2 s, and a third of the second item, which ends at the first part."""
    shared = [part([{0}], 1.0, share=2), part([{1}], 2.0, share=2)]
    parts = [replace(shared[0], passes=(1, 3)), replace(shared[1], passes=(1, 2))]
    end, done = run_loop(parts, items=2, rounds=99)
    assert done == pytest.approx([3.0, 7.0])
    assert end == pytest.approx(7.0)


def test_a_slow_item_is_slow_in_every_round() -> None:
    """Alone in its calls, which take 1 s in the mean; two together take as long as the longer one says."""
    slow = replace(part([{0}, {1}], 1.0), relative=(0.5, 1.5))
    assert run_loop([slow], items=2, rounds=3) == (pytest.approx(4.5), pytest.approx([1.5, 4.5]))
    both = replace(part([{0}], 1.5, share=2), relative=(0.5, 1.5))
    assert run_loop([both], items=2, rounds=1) == (pytest.approx(1.5), pytest.approx([0.5, 1.5]))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7))
def test_the_longest_of_some_items_is_the_mean_over_all_choices(relative: list[float]) -> None:
    choices = [list(map(max, combinations(relative, n))) for n in range(1, len(relative) + 1)]
    found = [longest_of(relative, n) for n in range(1, len(relative) + 1)]
    assert found == pytest.approx([sum(longest) / len(longest) for longest in choices])


def test_items_join_a_part_that_pulls_while_it_runs() -> None:
    """n items take n seconds together. The first has 1 s alone, then half of each second; the other needs as much, and
    goes round once more, alone."""
    first = part([{0}], 1.0, emits=(1.0,))
    pulling = replace(part([{1}], 0.0), seconds=float, pulls=True, passes=(1, 1))
    end, done = run_loop([replace(first, passes=(1, 1)), replace(pulling, relative=(1.5, 0.5))], items=2, rounds=1)
    # The first comes at 1 and has 0.5 left at 2, when the other comes with 0.5: both are done at 3.
    assert done == pytest.approx([3.0, 3.0])
    assert end == pytest.approx(3.0)
    end, done = run_loop([replace(pulling, passes=(1, 2))], items=2, rounds=1)
    # Together until 2; the other once more, alone.
    assert done == pytest.approx([2.0, 3.0])


def test_items_that_end_within_the_clock_s_rounding_both_end() -> None:
    """The second is due half a nanosecond after the first, which the clock takes for the same moment."""
    pulling = replace(part([{0}, {1}], 0.1), pulls=True, relative=(1.0, 1.0 + 5e-9))
    end, done = run_loop([pulling], items=2, rounds=1)
    assert (end, done) == (pytest.approx(0.1), pytest.approx([0.1, 0.1]))


@pytest.mark.parametrize("pulls", [False, True])
def test_a_stage_that_costs_nothing_lets_its_loop_go_on(pulls: bool) -> None:
    """So little for an item that beside a hand-off of 50 ms nothing of it is left: only the policy takes time."""
    request = embodied(0.1, 0.05)
    for sample in request.profile.samples:
        if sample.stage == "simulator.step":
            sample.items, sample.seconds = 1e12, 1e-9
    request.profile.hand_offs.add(stage="simulator.step", seconds=0.05)
    request.profile.loop_items.add(stage="simulator.step", pulls=pulls, one_by_one=True)
    chosen = plan(request).plans[0].plan
    spans = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen)).timeline.spans
    loop_s = max(s.end_ns for s in spans if s.stage == "simulator.step") / 1e9
    assert 20 * 0.05 * 64 / 8 < loop_s < 20 * (0.05 * 64 / 8 + 0.3)


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


def test_a_group_that_moves_in_step_has_one_rank_in_a_loop() -> None:
    request = embodied(0.1, 0.05)
    next(g for g in request.workflow.groups if g.name == "policy").in_step = True
    next(g for g in request.workflow.groups if g.name == "policy").devices_per_rank = 2
    policies = [g for p in plan(request).plans for g in p.plan.groups if g.group == "policy"]
    assert {(len(g.device_ids), g.num_ranks) for g in policies} == {(2, 1)}


def test_a_loop_runs_on_where_the_edge_behind_it_is_bounded() -> None:
    """Its outputs wait for room one by one: an edge that holds eight of 64 stops no loop that takes all 64."""
    request = embodied(0.1, 0.05)
    next(s for s in request.workflow.stages if s.name == "whiten").kind = flow_pb2.STAGE_KIND_MAP
    request.mode = "spatial"
    chosen = plan(request).plans[0].plan
    free = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen)).iteration_s
    next(e for e in chosen.edges if e.consumer == "actor.train").capacity = 8
    assert simulate(sched_pb2.SimulateRequest(request=request, plan=chosen)).iteration_s == pytest.approx(free)
