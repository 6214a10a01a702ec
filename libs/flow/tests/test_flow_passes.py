"""Each pass alone, and the list of them: what goes in, what comes out."""

import pytest

from m2flow.flow import modes, trace
from m2flow.flow.glue import LEFT
from m2flow.flow.passes import PASSES, context_switch, fuse, lift, lower, overlap, pipeline, place
from m2flow.flow.testing import FakeSpec, as_it_is, goes_round
from m2flow.proto.flow.v1 import flow_pb2 as pb


def through(graph, plan, *passes):
    flow = lift(graph)
    for step in passes:
        flow = step(flow, graph, plan)
    return flow


def stage_plan(plan, name):
    return next(stage for stage in plan.stages if stage.stage == name)


@pytest.fixture
def temporal(graph, cluster):
    return modes.temporal_plan(graph, cluster)


@pytest.fixture
def spatial(graph, cluster):
    return modes.spatial_plan(graph, cluster, num_chunks=2)


def test_lift_keeps_every_stage(graph):
    flow = lift(graph)
    assert {stage.name for stage in flow.stages} == set(graph.stages)
    assert flow.stage("gather:prompt").inbox.ports == ("reward.score",)


def test_fuse_moves_glue_to_its_consumer(graph, temporal):
    flow = through(graph, temporal, fuse)
    assert [s.name for s in flow.stages] == [
        "prompts",
        "rollout.generate",
        "reward.score",
        "actor.train",
        "publish:actor->rollout",
        "sink",
    ]
    inbox = flow.stage("actor.train").inbox
    assert inbox.ports == ("reward.score",)
    assert [op.name for op in inbox.ops] == ["gather:prompt", "map:mean_reward"]
    assert inbox.head == "map:mean_reward"
    assert [s.name for s in flow.takers("reward.score")] == ["actor.train"]


def test_fuse_keeps_feedback(loop_graph, cluster):
    flow = through(loop_graph, modes.temporal_plan(loop_graph, cluster), fuse)
    inbox = flow.stage("policy.act").inbox
    assert inbox.ports == ("env.reset", "env.step")
    assert inbox.feedback == ("env.step",)
    assert [op.kind for op in inbox.ops] == ["enter"]
    assert inbox.ops[0].inputs == ("env.reset", "env.step")


def test_fuse_gives_a_filter_in_front_to_the_producer(loop_graph, cluster):
    flow = through(loop_graph, modes.temporal_plan(loop_graph, cluster), fuse)
    (again,) = flow.stage("policy.act").inbox.sieves
    (over,) = flow.stage("sink").inbox.sieves
    assert again.inputs == over.inputs == ("env.step",)
    assert (again.branch, again.reason) == ("yes", LEFT)  # the head hears of those that have left
    assert (over.branch, over.reason) == ("no", "")  # those that have not say nothing yet
    sink = flow.stage("sink").inbox
    assert (sink.head, sink.ops) == ("env.step", ())


def test_place_deals_devices_in_order(graph, temporal):
    actor = next(g for g in temporal.groups if g.group == "actor")
    actor.num_ranks = 2
    flow = through(graph, temporal, place)
    assert flow.group("actor").ranks == ((0, 1), (2, 3))
    assert flow.group("actor").unit(1) == ("actor", (0, 1, 2, 3))
    assert flow.group("rollout").unit(1) == ("rollout.1", (1,))


def test_pipeline_sets_granularity_and_routes_what_must_meet(graph, spatial):
    stage_plan(spatial, "actor.train").granularity = 3
    actor = next(g for g in spatial.groups if g.group == "actor")
    actor.num_ranks = 2
    del actor.device_ids[:]
    actor.device_ids.extend([2, 3])
    flow = through(graph, spatial, fuse, place, pipeline)
    train, score = flow.stage("actor.train"), flow.stage("reward.score")
    assert (train.granularity, train.share, train.inbox.routed) == (3, 2, True)
    assert not score.inbox.routed


def test_pipeline_reads_capacities_of_the_stream_or_of_its_far_producer(graph, spatial):
    spatial.edges.add(producer="reward.score", consumer="gather:prompt", capacity=64)
    spatial.edges.add(producer="rollout.generate", consumer="reward.score", capacity=16)
    flow = through(graph, spatial, fuse, place, pipeline)
    assert flow.stage("actor.train").inbox.capacity == 64
    assert flow.stage("reward.score").inbox.capacity == 16
    assert flow.stage("rollout.generate").inbox.capacity == 0


def test_context_switch_orders_and_offloads_sharing_groups(graph, temporal, spatial):
    flow = through(graph, temporal, fuse, place, pipeline, context_switch)
    turns = [(s.name, s.position, s.locked, s.hold) for s in flow.stages if s.group]
    assert turns == [
        ("rollout.generate", 0, True, True),
        ("reward.score", 1, True, True),
        ("actor.train", 2, True, True),
        ("publish:actor->rollout", 3, True, True),
    ]
    assert all(group.offload for group in flow.groups)
    side_by_side = through(graph, spatial, fuse, place, pipeline, context_switch)
    assert not any(stage.locked for stage in side_by_side.stages)
    assert not any(group.offload for group in side_by_side.groups)


def test_overlap_bounds_the_age_of_weights_where_they_arrive(graph, spatial):
    spatial.staleness = 2
    flow = through(graph, spatial, fuse, place, pipeline, context_switch, overlap)
    lags = {stage.name: stage.lag for stage in flow.stages}
    assert lags["rollout.generate"] == 2
    assert lags["actor.train"] == -1
    assert flow.staleness == 2


def test_lower_is_the_list_of_passes(graph, spatial):
    assert lower(graph, spatial) == through(graph, spatial, *PASSES)
    assert (fuse, place, pipeline, context_switch, overlap) == PASSES
    text = lower(graph, spatial).to_text()
    assert "actor.train" in text
    assert "gather:prompt" in text


def test_passes_change_neither_graph_nor_plan(graph, spatial):
    before = graph.to_proto().SerializeToString(deterministic=True), spatial.SerializeToString(deterministic=True)
    lower(graph, spatial)
    after = graph.to_proto().SerializeToString(deterministic=True), spatial.SerializeToString(deterministic=True)
    assert before == after


def test_endpoints_are_one_per_rank(graph, temporal):
    flow = lower(graph, temporal)
    assert flow.endpoints("rollout.generate") == ("rollout.0", "rollout.1", "rollout.2", "rollout.3")
    assert flow.endpoints("prompts") == ("driver",)
    assert isinstance(temporal, pb.ExecutionPlan)


def test_glue_at_the_head_of_a_loop_keeps_feedback(cluster):
    def program(flow, env, policy):
        seen = flow.loop(env.reset(flow.source("seeds")))
        again, done = flow.split(goes_round, env.step(policy.act(flow.map(as_it_is, seen))))
        seen.feed(again)
        return done

    specs = {"env": FakeSpec("env", ("reset", "step")), "policy": FakeSpec("policy", ("act",))}
    graph = trace(program, specs, source_items=6)
    flow = through(graph, modes.temporal_plan(graph, cluster), fuse)
    assert flow.stage("policy.act").inbox.feedback == ("env.step",)
