"""Plans that cannot run are refused before anything starts, each with its reason."""

import pytest

from m2flow.flow import Graph, PlanError, check_plan, trace
from m2flow.flow.modes import hybrid_plan, spatial_plan, temporal_plan
from m2flow.flow.testing import FakeSpec, episodes, grpo_graph, is_mixed
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Cluster


def group(plan, name):
    return next(own for own in plan.groups if own.group == name)


def stage(plan, name):
    return next(own for own in plan.stages if own.stage == name)


def rename_group(plan):
    group(plan, "actor").group = "acter"


def drop_stage(plan):
    del plan.stages[0]


def twice(plan):
    plan.groups.append(group(plan, "actor"))


def no_device(plan):
    group(plan, "actor").device_ids[0] = 9


def odd_ranks(plan):
    group(plan, "actor").num_ranks = 3


def unshared(plan):
    del plan.share_groups[:]


def share_of_nothing(plan):
    plan.share_groups[0].device_ids.append(7)


def no_granularity(plan):
    stage(plan, "rollout.generate").granularity = 0


def too_coarse(plan):
    stage(plan, "rollout.generate").granularity = 5


def reversed_turns(plan):
    stage(plan, "rollout.generate").position, stage(plan, "actor.train").position = 2, 0


def small_turn_edge(plan):
    plan.edges.add(producer="rollout.generate", consumer="reward.score", capacity=31)


def unknown_edge(plan):
    plan.edges.add(producer="rollout.generat", consumer="reward.score", capacity=8)


def no_memory(plan):
    plan.prediction.peak_bytes[1] = 17 << 30


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (rename_group, "unknown group 'acter', did you mean 'actor'"),
        (drop_stage, "stage rollout.generate has no plan"),
        (twice, "group actor is planned 2 times"),
        (no_device, "group actor has device 9, want one of 0 to 3"),
        (odd_ranks, "group actor has 3 ranks on 4 devices"),
        (unshared, "rollout and reward both have devices .* and no share group"),
        (share_of_nothing, r"names devices \[7\] that none of them has"),
        (no_granularity, "rollout.generate has granularity 0, want 1 to 4"),
        (too_coarse, "rollout.generate has granularity 5, want 1 to 4"),
        (reversed_turns, "actor.train .position 0. takes its turn before rollout.generate .*cycle across the lock"),
        (small_turn_edge, "into reward.score holds 31 items, and one turn of rollout.generate gives 32"),
        (unknown_edge, "unknown stage 'rollout.generat', did you mean 'rollout.generate'"),
        (no_memory, "device 1 would hold 17.00 GiB .* and has 16.00"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_with_its_reason(graph, cluster, spoil, reason):
    plan = temporal_plan(graph, cluster)
    check_plan(graph, plan, cluster)
    spoil(plan)
    with pytest.raises(PlanError, match=reason) as caught:
        check_plan(graph, plan, cluster)
    assert caught.value.reasons


def test_an_edge_outside_a_turn_may_be_small(graph, cluster):
    plan = spatial_plan(graph, cluster, num_chunks=4)
    plan.edges.add(producer="rollout.generate", consumer="reward.score", capacity=8)
    check_plan(graph, plan, cluster)


def test_a_small_edge_on_the_way_round_a_turn_is_refused(graph, cluster):
    """rollout and actor share; reward, between them, does not: its inbox must still hold what one turn gives."""
    plan = spatial_plan(graph, cluster, num_chunks=4)
    rollout, actor = group(plan, "rollout"), group(plan, "actor")
    del actor.device_ids[:]
    actor.device_ids.extend(rollout.device_ids)
    actor.num_ranks = len(actor.device_ids)
    plan.share_groups.add(groups=["rollout", "actor"], device_ids=rollout.device_ids)
    stage(plan, "rollout.generate").hold = True
    check_plan(graph, plan, cluster)
    plan.edges.add(producer="rollout.generate", consumer="reward.score", capacity=16)
    with pytest.raises(PlanError, match=r"only actor\.train can make"):
        check_plan(graph, plan, cluster)


def test_a_small_edge_behind_one_without_bound_may_be_on_the_way_round_a_turn():
    """Nothing that waits in front of the small one keeps the first from its end, unless that has a bound too."""

    def there_and_back(flow, one, two, three):
        return one.back(three.go(two.go(one.go(flow.source("items")))))

    groups = {"one": ("go", "back"), "two": ("go",), "three": ("go",)}
    graph = trace(there_and_back, {name: FakeSpec(name, stages) for name, stages in groups.items()}, source_items=8)
    cluster = Cluster.virtual(3)
    plan = spatial_plan(graph, cluster, num_chunks=4)
    stage(plan, "one.go").hold = True
    plan.edges.add(producer="two.go", consumer="three.go", capacity=2)
    check_plan(graph, plan, cluster)
    plan.edges.add(producer="one.go", consumer="two.go", capacity=8)
    with pytest.raises(PlanError, match=r"into three\.go holds 2 items, and one turn of one\.go gives 8"):
        check_plan(graph, plan, cluster)


def test_iterations_that_overlap_need_room_for_each(graph, cluster):
    plan = temporal_plan(graph, cluster)
    plan.edges.add(producer="rollout.generate", consumer="reward.score", capacity=32)
    check_plan(graph, plan, cluster)
    plan.staleness = 1
    with pytest.raises(PlanError, match=r"one turn of rollout\.generate gives 64"):
        check_plan(graph, plan, cluster)


def test_a_rank_that_no_launcher_would_place_is_refused(graph, cluster):
    message = graph.to_proto()
    for own in message.groups:
        own.devices_per_rank = 0
    wide = Graph(message)
    plan = temporal_plan(wide, cluster)
    check_plan(wide, plan, cluster)
    actor = group(plan, "actor")
    actor.num_ranks = 2
    del actor.device_ids[:]
    actor.device_ids.extend([0, 2, 1, 3])
    with pytest.raises(PlanError, match=r"group actor: .*with a gap, want consecutive"):
        check_plan(wide, plan, cluster)


def test_items_that_nobody_takes_yet_must_not_fill_an_inbox(graph):
    cluster = Cluster.virtual(8)
    plan = spatial_plan(graph, cluster, weights={"rollout": 2, "reward": 2, "actor": 2})
    plan.edges.add(producer="reward.score", consumer="gather:prompt", capacity=31)
    with pytest.raises(PlanError, match=r"into actor\.train holds 31 items, want at least 32.*of one rank"):
        check_plan(graph, plan, cluster)
    plan.edges[0].CopyFrom(pb.EdgePlan(producer="rollout.generate", consumer="reward.score", capacity=32))
    check_plan(graph, plan, cluster)
    plan.staleness = 1
    with pytest.raises(PlanError, match=r"into reward\.score holds 32 items, want at least 33.*a later iteration"):
        check_plan(graph, plan, cluster)


def test_the_source_has_room_for_all_iterations_that_may_be_under_way(graph, cluster):
    plan = spatial_plan(graph, cluster)
    plan.edges.add(producer="prompts", consumer="rollout.generate", capacity=4)
    check_plan(graph, plan, cluster)
    plan.staleness = 1
    with pytest.raises(PlanError, match=r"into rollout\.generate holds 4 items, want at least 8, or 0"):
        check_plan(graph, plan, cluster)


def test_ranks_in_step_inside_a_loop_are_refused():
    specs = {"env": FakeSpec("env", ("reset", "step")), "policy": FakeSpec("policy", ("act",), in_step=True)}
    graph, cluster = trace(episodes, specs, source_items=6), Cluster.virtual(4)
    with pytest.raises(PlanError, match=r"policy\.act is inside a loop .* want one rank of policy, got 2"):
        check_plan(graph, spatial_plan(graph, cluster), cluster)
    check_plan(graph, spatial_plan(graph, cluster, weights={"env": 3}), cluster)


def quota_graph(*, in_step):
    """Sixteen samples, the first of which that pass are trained on."""

    def program(flow, rollout, reward, actor):
        scored = reward.score(rollout.generate(flow.source("prompts")))
        return actor.train(flow.first(2, flow.gather(scored, by="prompt"), where=is_mixed))

    specs = {
        "rollout": FakeSpec("rollout", ("generate",)),
        "reward": FakeSpec("reward", ("score",), in_step=in_step),
        "actor": FakeSpec("actor", ("train",)),
    }
    return trace(program, specs, source_items=4, expansions={"rollout.generate": 4})


def test_ranks_in_step_before_a_quota_are_refused():
    graph, cluster = quota_graph(in_step=True), Cluster.virtual(4)
    with pytest.raises(PlanError, match=r"reward\.score has a quota behind it .* want one rank of reward, got 2"):
        check_plan(graph, spatial_plan(graph, cluster, weights={"reward": 2}), cluster)
    check_plan(graph, spatial_plan(graph, cluster, weights={"rollout": 2}), cluster)


def test_what_a_quota_may_ask_for_without_end_is_not_bounded_where_it_could_crowd():
    graph, cluster = quota_graph(in_step=False), Cluster.virtual(4)
    plan = spatial_plan(graph, cluster, weights={"rollout": 2})
    plan.edges.add(producer="reward.score", consumer="actor.train", capacity=1)
    check_plan(graph, plan, cluster)
    plan.edges.add(producer="rollout.generate", consumer="reward.score", capacity=16)
    check_plan(graph, plan, cluster)
    plan.staleness = 1
    with pytest.raises(PlanError, match=r"into reward\.score holds 16 items, want 0, as a quota decides how many come"):
        check_plan(graph, plan, cluster)


def test_a_kind_that_the_device_is_not_is_refused(graph):
    plan = temporal_plan(graph, Cluster.virtual(2))
    with pytest.raises(PlanError, match="a robot; want devices of kind virtual"):
        check_plan(graph, plan, Cluster(()).with_resource("robot", count=2))


def test_temporal_gives_every_group_everything(graph, cluster):
    plan = temporal_plan(graph, cluster)
    assert plan.mode == "temporal"
    assert all(list(own.device_ids) == [0, 1, 2, 3] for own in plan.groups)
    assert all(own.residency == pb.RESIDENCY_OFFLOADED for own in plan.groups)
    assert [own.granularity for own in plan.stages] == [4, 32, 4, 1]
    assert [list(share.groups) for share in plan.share_groups] == [["rollout", "reward", "actor"]]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 64])
def test_spatial_plans_can_run(num_devices):
    cluster = Cluster.virtual(num_devices)
    graph = grpo_graph(source_items=64)
    plan = spatial_plan(graph, cluster, weights={"rollout": 4, "reward": 1, "actor": 2})
    check_plan(graph, plan, cluster)
    used = [number for own in plan.groups for number in own.device_ids]
    assert set(used) == set(range(num_devices))
    disjoint = len(used) == len(set(used))
    assert (plan.mode == "spatial") is disjoint is (num_devices >= 3)
    counts = {own.group: len(own.device_ids) for own in plan.groups}
    assert counts["rollout"] >= counts["actor"] >= counts["reward"]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_a_hybrid_plan_has_the_learner_everywhere_and_the_others_side_by_side(num_devices):
    cluster = Cluster.virtual(num_devices)
    graph = grpo_graph(source_items=64)
    plan = hybrid_plan(graph, cluster, num_chunks=4)
    check_plan(graph, plan, cluster)
    placed = {own.group: list(own.device_ids) for own in plan.groups}
    assert placed["actor"] == list(range(num_devices))
    if num_devices > 1:
        assert sorted(placed["rollout"] + placed["reward"]) == list(range(num_devices))
    assert [stage(plan, name).granularity for name in ("rollout.generate", "actor.train")] == [16, 64]
    assert plan.mode == "hybrid"


def test_modes_refuse_a_cluster_without_the_kind():
    graph = grpo_graph()
    with pytest.raises(PlanError, match="needs 1 devices of kind virtual, and the cluster has 0"):
        temporal_plan(graph, Cluster(()).with_resource("robot"))
    with pytest.raises(PlanError, match="needs 1 devices"):
        spatial_plan(graph, Cluster(()).with_resource("robot"))


def test_a_quota_as_a_result_is_refused():
    def program(flow, rollout):
        return flow.first(2, flow.gather(rollout.generate(flow.source("prompts")), by="prompt"))

    specs = {"rollout": FakeSpec("rollout", ("generate",))}
    graph, cluster = trace(program, specs, source_items=4), Cluster.virtual(1)
    with pytest.raises(PlanError, match=r"first is a result of the program, .* want a stage after it"):
        check_plan(graph, temporal_plan(graph, cluster), cluster)


def restart_graph(**options):
    """Like `quota_graph`, with what the actor learns published."""

    def program(flow, rollout, actor):
        groups = flow.gather(rollout.generate(flow.source("prompts")), by="prompt")
        metrics = actor.train(flow.first(2, groups) if options["quota"] else groups)
        if options["publishes"]:
            flow.publish(actor, to=rollout)
        return metrics

    specs = {
        "rollout": FakeSpec("rollout", ("generate",), on_death="retry"),
        "actor": FakeSpec("actor", ("train",), in_step=options["in_step"], on_death=options["on_death"]),
    }
    return trace(program, specs, source_items=4, expansions={"rollout.generate": 4})


@pytest.mark.parametrize("on_death", ["retry", "drop"])
@pytest.mark.parametrize(
    ("asked", "reason"),
    [("publishes", "publishes what it has learned"), ("quota", "what first has let pass"), ("in_step", "3 ranks that")],
)
def test_groups_that_no_fresh_process_could_go_on_for_are_not_restarted(asked, reason, on_death):
    """After a death a quota's order waited for ever, ranks in step met nobody, and what was learned was gone."""
    options = {"publishes": False, "quota": False, "in_step": False, asked: True}
    cluster, weights = Cluster.virtual(4), {"rollout": 1, "actor": 3} if asked == "in_step" else {"rollout": 3}
    graph = restart_graph(**options, on_death=on_death)
    with pytest.raises(PlanError, match=rf"group actor .*{reason}.* got on_death = '{on_death}', want 'stop'"):
        check_plan(graph, spatial_plan(graph, cluster, weights=weights), cluster)
    graph = restart_graph(**options, on_death="stop")
    check_plan(graph, spatial_plan(graph, cluster, weights=weights), cluster)


@pytest.mark.parametrize("make", [temporal_plan, spatial_plan, hybrid_plan])
def test_a_group_without_a_stage_has_its_devices_too(make):
    def program(flow, rollout, spare):
        return rollout.generate(flow.source("prompts"))

    specs = {name: FakeSpec(name, ("generate",)) for name in ("rollout", "spare")}
    graph, cluster = trace(program, specs, source_items=4), Cluster.virtual(2)
    check_plan(graph, make(graph, cluster), cluster)
