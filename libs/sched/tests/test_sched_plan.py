"""Plans of a small workflow: modes, placement, granularity, memory, and what is said when nothing fits."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import InfeasibleError, InputError, best_plan, plan
from m2flow.sched._build import build
from m2flow.sched._infeasible import why_infeasible
from m2flow.sched._plans import Found, best_plans
from m2flow.sched._tree import shape
from m2flow.sched._workflow import reduce_graph
from m2flow.sched.planning import respond, searched

Make = Callable[..., sched_pb2.PlanRequest]
GIB = 2.0**30
GROUPS = ("rollout", "reward", "actor")


def test_two_slots_take_turns(make_request: Make) -> None:
    """0.5 + 0.3*32 + 0.25 + 1 + 0.3*32 + 0.4 s, and two messages of 2 ms."""
    answer = plan(make_request(2, kind="cpu"))
    best = answer.plans[0]
    assert best.plan.mode == "temporal"
    assert best.searched_s == pytest.approx(10.1 + 0.25 + 10.6 + 0.4 + 0.004, rel=1e-6)
    assert {g.group: tuple(g.device_ids) for g in best.plan.groups} == dict.fromkeys(GROUPS, (0, 1))
    assert [(s.stage, s.granularity, s.hold) for s in best.plan.stages] == [
        ("rollout.generate", 64, True),
        ("reward.score", 512, True),
        ("actor.train", 64, True),
        ("publish", 1, False),
    ]
    assert [list(s.groups) for s in best.plan.share_groups] == [["rollout", "reward", "actor"]]
    assert answer.exact
    assert answer.lower_bound_s == pytest.approx(best.searched_s)


def test_spatial_on_two_slots_lets_the_light_group_share(make_request: Make) -> None:
    best = plan(make_request(2, kind="cpu", mode="spatial")).plans[0].plan
    ids = {g.group: set(g.device_ids) for g in best.groups}
    assert best.mode == "spatial"
    assert not ids["rollout"] & ids["actor"]
    chunk = {s.stage: s.granularity for s in best.stages}
    assert chunk["reward.score"] == 8 * chunk["rollout.generate"]
    assert chunk["actor.train"] == chunk["rollout.generate"] < 64


@pytest.mark.parametrize("mode", ["temporal", "spatial", "hybrid"])
def test_a_mode_gives_only_its_plans(make_request: Make, mode: str) -> None:
    answer = plan(make_request(8, mode=mode))
    assert {p.plan.mode for p in answer.plans} == {mode}
    for ranked in answer.plans:
        ids = [set(g.device_ids) for g in ranked.plan.groups]
        shared = any(a & b for i, a in enumerate(ids) for b in ids[:i])
        apart = any(not a & b for i, a in enumerate(ids) for b in ids[:i])
        assert shared == (mode != "spatial")
        assert apart == (mode != "temporal")


def test_plans_are_ranked_by_simulation_and_differ(make_request: Make) -> None:
    answer = plan(make_request(8))
    seconds = [p.simulated_s for p in answer.plans]
    assert seconds == sorted(seconds)
    assert len({(p.shape, p.plan.staleness) for p in answer.plans}) == len(answer.plans) > 5


def test_an_asynchronous_plan_bounds_no_edge(make_request: Make) -> None:
    """A bound would have to hold more than an iteration: a later one's items would keep out this one's."""
    request = make_request(8)
    request.max_staleness = 1
    bounded = [(p.plan.staleness, [e.capacity for e in p.plan.edges]) for p in plan(request).plans if ";" in p.shape]
    assert {staleness for staleness, capacities in bounded if any(capacities)} == {0}
    assert {staleness for staleness, _ in bounded} == {0, 1}


def test_an_edge_to_several_ranks_that_keep_source_order_has_no_bound(make_request: Make) -> None:
    """Their items find them by place: those of one rank would keep out those of another."""
    request = make_request(8)
    bounded = {}
    for window in (0, 1):
        request.workflow.stages[2].order_window = window
        plans = [p.plan for p in plan(request).plans if any(e.capacity for e in p.plan.edges)]
        bounded[window] = {g.num_ranks for p in plans for g in p.groups if g.group == "reward"}
    assert bounded[1] == {1} < bounded[0]


def test_notes_are_of_the_first_plan_also_where_another_has_its_shape(make_request: Make) -> None:
    """The synchronous plan of a shape trains on eight times as many devices as were measured, the asynchronous one on
    fewer."""
    request = make_request(24, mode="spatial")
    request.max_staleness = 1
    del request.profile.samples[:]
    for items in (1, 8, 64):
        for stage, seconds in (("rollout.generate", 4 + 0.3 * items), ("actor.train", 1 + 0.3 * items)):
            request.profile.samples.add(stage=stage, devices=1, items=items, seconds=seconds)
    model = build(request)
    found, _ = searched(model)
    fast, slow = (c for c in found.plans if shape(c.tree) == "(rollout.generate | reward.score | actor.train) x2")
    notes = {}
    for name, plans in (("fast", [fast]), ("slow", [slow]), ("both", [slow, fast])):
        notes[name] = list(respond(model, Found(plans, 0.0), 0.0).notes)
    assert notes["both"] == notes["fast"] != notes["slow"]


def test_planning_twice_gives_the_same_answer(make_request: Make) -> None:
    first, second = plan(make_request(8)), plan(make_request(8))
    assert list(first.plans) == list(second.plans)


def test_memory_makes_groups_offload_and_costs_their_switching(make_request: Make) -> None:
    free = plan(make_request(8, mode="temporal")).plans[0]
    tight = plan(make_request(8, mode="temporal", memory_bytes=80 * GIB, resident_bytes=50 * GIB)).plans[0]
    assert all(g.residency == flow_pb2.RESIDENCY_OFFLOADED for g in tight.plan.groups)
    assert tight.searched_s == pytest.approx(free.searched_s + 3 * 0.5)
    assert tight.peak_bytes == pytest.approx((50 + 2 * 2.5) * GIB)


def test_no_switching_where_memory_suffices(make_request: Make) -> None:
    best = plan(make_request(8, mode="temporal", memory_bytes=80 * GIB, resident_bytes=20 * GIB)).plans[0]
    assert all(g.residency == flow_pb2.RESIDENCY_RESIDENT for g in best.plan.groups)


def test_nothing_fits_says_what_is_missing_and_what_would_help(make_request: Make) -> None:
    request = make_request(8, mode="temporal", memory_bytes=80 * GIB, resident_bytes=50 * GIB, can_offload=False)
    answer = plan(request)
    assert not answer.plans
    assert "GiB are missing" in answer.infeasible
    assert "allow any mode" in answer.infeasible
    with pytest.raises(InfeasibleError, match="are missing"):
        best_plan(request)


def test_too_few_devices_is_said_with_the_number(make_request: Make) -> None:
    request = make_request(2)
    request.workflow.groups[2].min_devices = 8
    assert "needs 8 devices of kind 'cuda', there are 2, 6 are missing" in plan(request).infeasible
    assert "6 cuda devices more (8 in all)" in plan(request).infeasible


def test_an_empty_profile_still_gives_a_plan_and_says_so(make_request: Make) -> None:
    request = make_request(2, kind="cpu", mode="temporal")
    request.profile.Clear()
    answer = plan(request)
    assert answer.plans[0].plan.mode == "temporal"
    assert any("assumed" in note for note in answer.notes)


def test_ranks_are_whole(make_request: Make) -> None:
    request = make_request(12)
    request.workflow.groups[0].devices_per_rank = 4
    for ranked in plan(request).plans:
        rollout = ranked.plan.groups[0]
        assert len(rollout.device_ids) == 4 * rollout.num_ranks


def test_the_single_change_is_the_smallest_that_makes_it_fit(make_request: Make) -> None:
    """Each case says so many devices more: with them a plan fits, with one fewer it does not."""
    spatial = make_request(8, mode="spatial")
    spatial.workflow.groups[0].min_devices, spatial.workflow.groups[2].min_devices = 6, 4
    wide = make_request(8)
    wide.workflow.groups[0].devices_per_rank = 9
    full = make_request(2, memory_bytes=80 * GIB, resident_bytes=50 * GIB, can_offload=False)
    cores = make_request(8, kind="cpu")
    cores.cluster.nodes[0].ClearField("devices")
    cores.cluster.nodes[0].cores = 4
    cores.workflow.groups[2].min_devices = 11
    for request, more in ((spatial, 3), (wide, 1), (full, 1), (cores, 7)):
        assert f"{more} {request.workflow.groups[0].device_kind} device" in plan(request).infeasible
        node = request.cluster.nodes[0]
        for added, fits in ((more - 1, False), (1, True)):
            if node.devices:
                node.devices[0].count += added
            else:
                node.cores += added
            assert bool(plan(request).plans) is fits


def test_memory_that_is_missing_is_enough_when_added(make_request: Make) -> None:
    request = make_request(2, memory_bytes=80 * GIB, resident_bytes=50 * GIB, can_offload=False)
    assert "20.0 GiB are missing" in plan(request).infeasible
    request.cluster.nodes[0].devices[0].memory_bytes = 99.8 * GIB
    assert not plan(request).plans
    request.cluster.nodes[0].devices[0].memory_bytes = 100.2 * GIB
    assert plan(request).plans


def test_one_rank_takes_all_devices_where_no_number_is_given(make_request: Make) -> None:
    request = make_request(12)
    request.workflow.groups[0].devices_per_rank = 0
    ranks = {ranked.plan.groups[0].num_ranks for ranked in plan(request).plans}
    assert ranks == {1}


def test_a_barrier_forbids_a_pipeline_across_it(make_request: Make) -> None:
    request = make_request(8, mode="spatial")
    request.workflow.stages[4].kind = flow_pb2.STAGE_KIND_BARRIER
    best = plan(request).plans[0]
    assert best.shape.endswith("/ actor.train)")
    assert next(s for s in best.plan.stages if s.stage == "actor.train").granularity == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: setattr(r, "mode", "fast"), "mode 'fast'"),
        (lambda r: r.cluster.Clear(), "no devices"),
        (lambda r: r.workflow.streams.add(producer="x", consumer="y"), "a stream joins 'x'"),
        (lambda r: setattr(r.workflow.stages[1], "group", "nobody"), "runs on group 'nobody'"),
        (lambda r: setattr(r.workflow.groups[0], "device_kind", "robot"), "kind 'robot'"),
        (lambda r: r.workflow.streams.add(producer="actor.train", consumer="rollout.generate"), "form a cycle"),
    ],
)
def test_contradictions_are_named(
    make_request: Make, change: Callable[[sched_pb2.PlanRequest], None], message: str
) -> None:
    request = make_request(2)
    change(request)
    with pytest.raises(InputError, match=message):
        plan(request)


def test_a_join_costs_nothing_and_passes_each_item_once() -> None:
    graph = flow_pb2.WorkflowGraph(name="ppo", source_items=8)
    graph.groups.add(name="critic")
    graph.groups.add(name="actor")
    graph.stages.add(name="prompts", kind=flow_pb2.STAGE_KIND_SOURCE)
    graph.stages.add(name="values", kind=flow_pb2.STAGE_KIND_WORK, group="critic")
    graph.stages.add(name="logprobs", kind=flow_pb2.STAGE_KIND_WORK, group="actor")
    graph.stages.add(name="join", kind=flow_pb2.STAGE_KIND_JOIN)
    graph.stages.add(name="train", kind=flow_pb2.STAGE_KIND_WORK, group="actor")
    for ends in ("prompts values", "prompts logprobs", "values join", "logprobs join", "join train"):
        producer, consumer = ends.split()
        graph.streams.add(producer=producer, consumer=consumer)
    workflow = reduce_graph(graph)
    assert workflow.volumes["train"] == 8
    assert {(workflow.nodes[e.producer].name, workflow.nodes[e.consumer].name) for e in workflow.edges} == {
        ("values", "train"),
        ("logprobs", "train"),
    }


def test_links_carry_what_was_not_measured(make_request: Make) -> None:
    """512 items of 1 GB between rollout and reward take 512 s over 1 GB/s in the node, twice that over half of it."""
    request = make_request(8, mode="temporal")
    request.profile.transfer_latency_s = 0
    free = plan(request).lower_bound_s
    stream = next(s for s in request.workflow.streams if s.consumer == "reward.score")
    stream.item_bytes = 1e9
    volume = 512
    request.cluster.nodes[0].link_bytes_per_s = 1e9
    assert plan(request).lower_bound_s == pytest.approx(free + volume)
    request.cluster.nodes[0].devices[0].count = 4
    request.cluster.nodes[0].count = 2
    request.cluster.network_bytes_per_s = 0.5e9
    assert plan(request).lower_bound_s == pytest.approx(free + 2 * volume)
    request.profile.transfer_bytes_per_s = 1e12  # measured
    assert plan(request).lower_bound_s == pytest.approx(free + volume / 1e3)


def _three(least: int, most: int, devices: int) -> sched_pb2.PlanRequest:
    """a1, b, a2 in a chain, of groups a, b and a; a takes `least` to `most` devices, an item of a1 and b 0.3 s."""
    graph = flow_pb2.WorkflowGraph(name="again", source_items=64)
    profile = sched_pb2.Profile()
    for name, group, seconds in (("a1", "a", 0.3), ("b", "b", 0.3), ("a2", "a", 0.001)):
        graph.stages.add(name=name, kind=flow_pb2.STAGE_KIND_WORK, group=group, expansion=1)
        for items in (1, 8, 64):
            profile.samples.add(stage=name, devices=13, items=items, seconds=seconds * items)
    graph.streams.add(producer="a1", consumer="b")
    graph.streams.add(producer="b", consumer="a2")
    graph.groups.add(name="a", device_kind="cuda", min_devices=least, max_devices=most)
    graph.groups.add(name="b", device_kind="cuda", min_devices=devices - most, max_devices=devices - most)
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n").devices.add(kind="cuda", count=devices)
    return sched_pb2.PlanRequest(workflow=graph, profile=profile, cluster=cluster, device_quantum=1)


@pytest.mark.parametrize(("least", "most", "devices"), [(13, 13, 20), (17, 17, 20), (11, 61, 64)])
def test_every_size_of_a_group_with_several_stages_is_tried(least: int, most: int, devices: int) -> None:
    request = _three(least, most, devices)
    request.mode = "spatial"
    answer = plan(request)
    best = answer.plans[0]
    assert answer.exact
    assert best.shape == "((a1 | b) x64 ; a2)"
    assert len(best.plan.groups[0].device_ids) <= most
    assert best.simulated_s == pytest.approx(best.searched_s)


def test_what_was_not_searched_is_under_the_bound() -> None:
    """Four stages of two groups with memory for one: more sizes, overlaps and residencies than there are searches."""
    request = _three(1, 15, 16)
    request.workflow.stages.add(name="b2", kind=flow_pb2.STAGE_KIND_WORK, group="b", expansion=1)
    request.workflow.streams.add(producer="a2", consumer="b2")
    for group in request.workflow.groups:
        group.min_devices, group.max_devices, group.can_offload = 1, 0, True
        request.profile.switches.add(group=group.name, onload_s=0.1, offload_s=0.1, resident_bytes=60)
    for sample in list(request.profile.samples):
        for devices in (1, 4):
            request.profile.samples.add(
                stage=sample.stage, devices=devices, items=sample.items, seconds=13 * sample.seconds / devices
            )
    request.cluster.nodes[0].devices[0].memory_bytes = 100
    answer = plan(request)
    assert not answer.exact
    assert 0.5 * answer.plans[0].searched_s < answer.lower_bound_s < answer.plans[0].searched_s


def test_a_group_with_several_stages_that_needs_more_than_there_is_is_named() -> None:
    request = _three(13, 13, 20)
    request.cluster.nodes[0].devices[0].count = 12
    assert "group 'a' needs 13 devices of kind 'cuda', there are 12" in plan(request).infeasible


def _twice(devices: int, peak_bytes: float) -> sched_pb2.PlanRequest:
    """a1, b1, a2, b2 in a chain; nothing offloads, b's peak divides over its devices, which have 100 bytes each."""
    graph, profile = flow_pb2.WorkflowGraph(name="twice", source_items=64), sched_pb2.Profile()
    stages = [(f"{group}{turn}", group) for turn in (1, 2) for group in "ab"]
    for stage, group in stages:
        graph.stages.add(name=stage, kind=flow_pb2.STAGE_KIND_WORK, group=group)
        for count in (1, 4, 16, 64):
            for items in (1, 8, 64):
                peak = peak_bytes / count if group == "b" else 10
                profile.samples.add(
                    stage=stage, devices=count, items=items, seconds=0.1 * items / count, peak_bytes=peak
                )
    for (producer, _), (consumer, _) in pairwise(stages):
        graph.streams.add(producer=producer, consumer=consumer)
    for group in "ab":
        graph.groups.add(name=group, device_kind="cuda")
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n").devices.add(kind="cuda", count=devices, memory_bytes=100)
    return sched_pb2.PlanRequest(workflow=graph, profile=profile, cluster=cluster, device_quantum=1, max_chunks=2)


@pytest.mark.parametrize("peak_bytes", [5400, 5700])
def test_a_plan_that_fits_far_from_equal_shares_is_found(peak_bytes: float) -> None:
    best = plan(_twice(64, peak_bytes)).plans[0]
    assert best.plan.mode == "temporal"
    assert best.peak_bytes <= 100


def test_that_no_plan_fits_is_said_only_where_it_is_proved() -> None:
    model = build(_twice(4, 320))
    cut_short, whole = best_plans(model.problem, "", 1, first_searches=0), best_plans(model.problem, "", 1)
    assert not cut_short.exact
    assert "no plan was found in 0 searches: the plan that needs least" in why_infeasible(model, cut_short)
    assert whole.plans
    model = build(_twice(4, 480))
    none = best_plans(model.problem, "", 1)
    assert not none.plans
    assert none.exact
    assert "no plan fits: the plan that needs least" in why_infeasible(model, none)


def _behind(kind: str) -> sched_pb2.PlanRequest:
    """8 prompts, 4 samples each, scored, gathered and trained on in step: all at once behind a barrier in front of the
    gather, or the first 3 groups behind a quota."""
    graph = flow_pb2.WorkflowGraph(name=kind, source_items=8)
    stages = {
        "prompts": "",
        "rollout.generate": "rollout",
        "reward.score": "reward",
        "groups": "",
        "actor.train": "actor",
    }
    for name, group in stages.items():
        stage = graph.stages.add(name=name, group=group, kind=flow_pb2.STAGE_KIND_WORK, expansion=1)
        if not group:
            stage.kind = flow_pb2.STAGE_KIND_GATHER if name == "groups" else flow_pb2.STAGE_KIND_SOURCE
    graph.stages[1].expansion, graph.stages[3].expansion = 4, 1 / 4
    chain = list(stages)
    if kind == "barrier":
        graph.stages.add(name="whiten", kind=flow_pb2.STAGE_KIND_BARRIER, expansion=1)
        chain.insert(3, "whiten")
    else:
        graph.stages.add(name="first", kind=flow_pb2.STAGE_KIND_FILTER, expansion=1).quota.count = 3
        chain.insert(4, "first")
    for producer, consumer in pairwise(chain):
        graph.streams.add(producer=producer, consumer=consumer)
    for group in ("rollout", "reward", "actor"):
        graph.groups.add(name=group, device_kind="cuda", devices_per_rank=1, in_step=group != "reward")
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n").devices.add(kind="cuda", count=8)
    return sched_pb2.PlanRequest(workflow=graph, cluster=cluster)


@pytest.mark.parametrize(("kind", "single", "trained"), [("barrier", {"actor"}, 8), ("quota", {"actor", "rollout"}, 3)])
def test_who_sees_a_barrier_or_a_quota_has_one_rank(kind: str, single: set[str], trained: int) -> None:
    """Before a quota also who moves in step; behind it there are as many items as it lets pass."""
    request = _behind(kind)
    plans = [ranked.plan for ranked in plan(request).plans]
    assert plans
    most = {g: max(own.num_ranks for p in plans for own in p.groups if own.group == g) for g in GROUPS}
    assert {g for g, ranks in most.items() if ranks == 1} == single
    assert max(s.granularity for p in plans for s in p.stages if s.stage == "actor.train") == trained
