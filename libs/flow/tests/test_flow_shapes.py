"""Other shapes of flow, run for real: joins and barriers, epochs, loops, splits."""

import pytest

from m2flow.comm import decode, encode
from m2flow.flow import Runtime, spatial_plan, temporal_plan, trace
from m2flow.flow.testing import (
    SyntheticActor,
    SyntheticCritic,
    SyntheticEngine,
    SyntheticEnvironment,
    SyntheticHand,
    SyntheticPolicy,
    SyntheticReference,
    SyntheticReward,
    SyntheticRollout,
    episodes,
    is_first_odd,
    is_live,
    is_odd,
    mean_reward,
    ppo,
)
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Cluster, Item, WorkerFailed, launch_run

KIND = {"device_kind": "virtual"}


def run_all(graph, plan, num_devices, iterations=2, num_items=6):
    with (
        launch_run(Cluster.virtual(num_devices), launcher="inproc") as session,
        Runtime(graph, plan, session) as runtime,
    ):
        runtime.start()
        for number in range(iterations):
            yield runtime.run(number, [Item((place,), number, {"seed": place}) for place in range(num_items)])


def ppo_graph():
    groups = {
        "rollout": SyntheticRollout.group({"samples": 3}, name="rollout", **KIND),
        "reward": SyntheticReward.group({}, name="reward", devices_per_rank=None, **KIND),
        "critic": SyntheticCritic.group({}, name="critic", devices_per_rank=None, **KIND),
        "reference": SyntheticReference.group({}, name="reference", devices_per_rank=None, **KIND),
        "actor": SyntheticActor.group({"minibatch": 3}, name="actor", devices_per_rank=None, **KIND),
    }
    return trace(ppo, groups, source_items=6, expansions={"rollout.generate": 3})


@pytest.mark.medium
def test_ppo_joins_whitens_and_passes_twice_the_same_under_every_plan():
    graph = ppo_graph()
    facts = []
    for num_devices, make in ((2, temporal_plan), (5, spatial_plan), (3, spatial_plan)):
        plan = make(graph, Cluster.virtual(num_devices))
        results = list(run_all(graph, plan, num_devices))
        facts.append([[(i.id, i.fields["rewards"], i.fields["advantages"]) for i in r.outputs] for r in results])
        # Two epochs over six groups: the second pass comes in the order of the first.
        order = [(item.fields["order"], item.seq) for item in results[0].outputs]
        assert len(results[0].outputs) == 12
        assert [seq for _, seq in sorted(order)] == [(place,) for place in range(6)] * 2
        whitened = [reward for item in results[0].outputs for reward in item.fields["rewards"]]
        assert sum(whitened) == pytest.approx(0.0, abs=1e-9)
    assert facts[0] == facts[1] == facts[2]


@pytest.mark.medium
@pytest.mark.parametrize("num_devices", [2, 4])
def test_a_loop_ends_when_no_episode_is_left_and_keeps_each_on_its_rank(num_devices):
    groups = {
        "env": SyntheticEnvironment.group({"length": 5}, name="env", **KIND),
        "policy": SyntheticPolicy.group({}, name="policy", **KIND),
    }
    graph = trace(episodes, groups, source_items=6)
    seen = []
    for make in (temporal_plan, spatial_plan):
        plan = make(graph, Cluster.virtual(num_devices))
        results = list(run_all(graph, plan, num_devices))
        seen.append([[(item.id, item.fields["actions"]) for item in result.outputs] for result in results])
        for result in results:
            assert [item.seq for item in result.outputs] == [(place,) for place in range(6)]
            assert all(item.fields["done"] for item in result.outputs)
            assert len({len(item.fields["actions"]) for item in result.outputs}) > 1
            rounds = [s for s in result.timeline.spans if s.stage == "policy.act" and s.kind == pb.SPAN_KIND_BUSY]
            assert sum(s.items for s in rounds) == sum(len(item.fields["actions"]) for item in result.outputs)
    assert seen[0] == seen[1]


@pytest.mark.medium
def test_a_policy_serves_others_while_some_wait_and_takes_those_that_have_come_together():
    groups = {
        "env": SyntheticEnvironment.group({"length": 6, "slow_s": 0.2}, name="env", **KIND),
        "policy": SyntheticPolicy.group({"seconds": 0.01}, name="policy", **KIND),
    }
    graph = trace(episodes, groups, source_items=12)
    plan = spatial_plan(graph, Cluster.virtual(3), weights={"env": 2}, num_chunks=1)
    (result,) = run_all(graph, plan, 3, iterations=1, num_items=12)
    acted = [s for s in result.timeline.spans if s.stage == "policy.act" and s.kind == pb.SPAN_KIND_BUSY]
    slow = next(s for s in result.timeline.spans if (s.stage, s.rank, s.kind) == ("env.step", 0, pb.SPAN_KIND_BUSY))
    # The even places are in rank 0's first step: the odd ones have several turns meanwhile, more than one at once.
    meanwhile = [s for s in acted if slow.start_ns < s.start_ns and s.end_ns < slow.end_ns]
    assert len(meanwhile) >= 3
    assert max(s.items for s in meanwhile) > 1
    turns = sum(len(item.fields["actions"]) for item in result.outputs)
    assert sum(s.items for s in acted) == turns
    assert len(acted) <= turns / 2


@pytest.mark.medium
def test_an_engine_pulls_turns_as_they_come_and_gives_what_a_policy_gives():
    def graph(policy):
        env = SyntheticEnvironment.group({"length": 5, "seconds": 0.002}, name="env", **KIND)
        return trace(episodes, {"env": env, "policy": policy}, source_items=12)

    policy = graph(SyntheticPolicy.group({}, name="policy", **KIND))
    engine = graph(SyntheticEngine.group({"lanes": 6, "seconds": 0.01}, name="policy", **KIND))
    seen = []
    for traced, make, num_devices in ((policy, spatial_plan, 2), (engine, spatial_plan, 2), (engine, temporal_plan, 1)):
        plan = make(traced, Cluster.virtual(num_devices))
        results = list(run_all(traced, plan, num_devices, num_items=12))
        seen.append([[(item.id, item.fields["actions"]) for item in result.outputs] for result in results])
        turns = [sum(len(item.fields["actions"]) for item in result.outputs) for result in results]
        spans = [s for s in results[0].timeline.spans if s.kind == pb.SPAN_KIND_BUSY]
        assert sum(s.items for s in spans if s.stage == "policy.act") == turns[0]
        if traced is engine and make is spatial_plan:
            # One call of the engine sees turns come back from the environment while others are under way in it.
            calls = [(s.start_ns, s.end_ns) for s in spans if s.stage == "policy.act"]
            steps = [s for s in spans if s.stage == "env.step"]
            assert any(sum(a < s.start_ns and s.end_ns < b for s in steps) >= 2 for a, b in calls)
            assert len(calls) <= turns[0] / 3
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.medium
def test_an_engine_that_leaves_items_behind_is_told():
    groups = {
        "env": SyntheticEnvironment.group({}, name="env", **KIND),
        "policy": SyntheticEngine.group({"forgets": True}, name="policy", **KIND),
    }
    graph = trace(episodes, groups, source_items=2)
    with pytest.raises(WorkerFailed, match=r"policy\.act: the stage returned and still owes 0:0: want each item"):
        list(run_all(graph, spatial_plan(graph, Cluster.virtual(2)), 2, num_items=1))


def env_first(flow, env, policy):
    """The loop is entered, and gone round, by the environment."""
    seen = flow.loop(policy.act(env.reset(flow.source("seeds"))))
    again, done = flow.split(is_live, env.step(seen))
    seen.feed(policy.act(again))
    return done


@pytest.mark.medium
@pytest.mark.parametrize("program", [episodes, env_first], ids=["behind the head", "the head"])
def test_episodes_that_die_with_their_process_are_counted_and_the_rest_go_on(program):
    def run(die_at):
        groups = {
            # Steps take long enough for a reset to be committed before the death: else the episode would begin anew.
            "env": SyntheticEnvironment.group({"length": 5, "die_at": die_at, "seconds": 0.05}, name="env", **KIND),
            "policy": SyntheticPolicy.group({}, name="policy", **KIND),
        }
        graph = trace(program, groups, source_items=6)
        cluster = Cluster.virtual(3)
        plan = spatial_plan(graph, cluster, weights={"env": 2})
        with launch_run(cluster, launcher="process") as session, Runtime(graph, plan, session) as runtime:
            runtime.start()
            return [runtime.run(number, wave(number, 0)) for number in range(3)]

    results, undisturbed = run(1), run(None)
    # Rank 0 of two has the even places; those that were not over yet are lost, the odd ones go on.
    assert [len(results[0].outputs), len(results[2].outputs)] == [6, 6]
    assert 1 <= results[1].tombstones["died"] <= 3
    assert len(results[1].outputs) + results[1].tombstones["died"] == 6
    assert {(1,), (3,), (5,)} <= {item.seq for item in results[1].outputs}
    for got, want in zip(results, undisturbed, strict=True):
        actions = {item.id: item.fields["actions"] for item in want.outputs}
        assert all(item.fields["actions"] == actions[item.id] for item in got.outputs)


@pytest.mark.medium
@pytest.mark.parametrize("policy", [SyntheticPolicy, SyntheticEngine])
def test_the_head_of_a_loop_that_dies_comes_back_and_changes_no_result(policy):
    seen = []
    for die_at in (None, 1):
        env = SyntheticEnvironment.group({"length": 5, "seconds": 0.002}, name="env", **KIND)
        groups = {"env": env, "policy": policy.group({"die_at": die_at}, name="policy", **KIND)}
        graph = trace(episodes, groups, source_items=6)
        cluster = Cluster.virtual(3)
        plan = spatial_plan(graph, cluster, weights={"policy": 2})
        with launch_run(cluster, launcher="process") as session, Runtime(graph, plan, session) as runtime:
            runtime.start()
            results = [runtime.run(number, wave(number, 0)) for number in range(3)]
        seen.append([[(item.id, item.fields["actions"]) for item in result.outputs] for result in results])
    assert seen[0] == seen[1]


@pytest.mark.medium
def test_halves_of_a_split_take_two_ways_and_meet_again():
    groups = {
        "one": SyntheticPolicy.group({}, name="one", **KIND),
        "two": SyntheticPolicy.group({}, name="two", **KIND),
    }

    def program(flow, one, two):
        yes, no = flow.split(is_live, flow.source("items"))
        return two.act(flow.merge(one.act(yes), no))

    graph = trace(program, groups, source_items=6)
    plan = spatial_plan(graph, Cluster.virtual(2))
    with launch_run(Cluster.virtual(2), launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        items = [Item((place,), 0, {"observation": 0.0, "done": place % 3 == 0}) for place in range(6)]
        result = runtime.run(0, items)
    assert [item.seq for item in result.outputs] == [(place,) for place in range(6)]
    assert not result.tombstones
    halves = {s.stage: sum(t.items for t in result.timeline.spans if t.stage == s.stage) for s in result.timeline.spans}
    assert halves == {"one.act": 4, "two.act": 6}


def dapo_graph(carry_surplus, count=4):
    def program(flow, rollout, reward, actor):
        groups = flow.gather(reward.score(rollout.generate(flow.source("prompts"))), by="prompt")
        first = flow.first(count, groups, where=is_first_odd, carry_surplus=carry_surplus)
        return actor.train(flow.map(mean_reward, first))

    groups = {
        "rollout": SyntheticRollout.group({"samples": 2}, name="rollout", **KIND),
        "reward": SyntheticReward.group({}, name="reward", **KIND),
        "actor": SyntheticActor.group({"minibatch": 2}, name="actor", devices_per_rank=None, **KIND),
    }
    return trace(program, groups, source_items=6, expansions={"rollout.generate": 2})


def wave(iteration, start, size=6):
    return [Item((place,), iteration, {"seed": place}) for place in range(start, start + size)]


@pytest.mark.medium
@pytest.mark.parametrize("carry_surplus", [False, True])
def test_a_quota_takes_the_first_by_source_order_and_the_source_feeds_on(carry_surplus):
    graph = dapo_graph(carry_surplus, count=8)
    got = []
    for make, num_devices in ((temporal_plan, 2), (spatial_plan, 4)):
        cluster = Cluster.virtual(num_devices)
        plan = make(graph, cluster)
        asked, taken = [], []
        with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
            runtime.start()
            for number in range(2):

                def more(start, number=number, asked=asked):
                    asked.append((number, start))
                    return wave(number, start)

                result = runtime.run(number, wave(number, 0), more=more)
                assert [item.seq for item in result.outputs] == [(place,) for place in range(8)]
                taken.append([item.fields["rewards"] for item in result.outputs])
                assert result.tombstones["first:is_first_odd"] > 0
        got.append((asked, taken))
    assert got[0] == got[1]
    # Every other group passes: three waves of six hold nine, one more than the quota.
    assert got[0][0][:2] == [(0, 6), (0, 12)]
    assert ("surplus" in result.tombstones) is not carry_surplus


@pytest.mark.medium
def test_what_a_quota_carries_over_outlives_its_group_and_its_run():
    graph, cluster = dapo_graph(True, count=8), Cluster.virtual(4)
    plans = [spatial_plan(graph, cluster), temporal_plan(graph, cluster)]

    def run(runtime, number):
        result = runtime.run(number, wave(number, 0), more=lambda start: wave(number, start))
        return [item.fields["rewards"] for item in result.outputs]

    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plans[0], session) as runtime:
        runtime.start()
        wanted = [run(runtime, number) for number in range(3)]
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plans[0], session) as runtime:
        runtime.start()
        got = [run(runtime, 0)]
        runtime.apply(plans[1])
        got.append(run(runtime, 1))
        kept = encode(runtime.carried()).to_bytes()
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plans[0], session) as runtime:
        runtime.start(2, carried=decode(kept))
        got.append(run(runtime, 2))
    assert got == wanted


@pytest.mark.medium
def test_a_quota_that_the_source_cannot_fill_takes_what_there_is():
    graph = dapo_graph(False, count=4)
    cluster = Cluster.virtual(3)
    plan = spatial_plan(graph, cluster)
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        assert len(runtime.run(0, wave(0, 0)).outputs) == 3


@pytest.mark.medium
@pytest.mark.parametrize(("samples", "size"), [(1, 1), (4, 1), (4, 4)], ids=["item by item", "samples", "waves"])
def test_the_source_feeds_a_quota_as_much_as_it_takes_whoever_is_fast(samples, size):
    """Six samples of prompts with an odd place are wanted: of 1 a prompt that takes 12 prompts, of 4 a prompt 4."""

    def program(flow, rollout, one):
        return one.work(flow.first(6, rollout.generate(flow.source("prompts")), where=is_odd))

    rollout = SyntheticRollout.group({"samples": samples}, name="rollout", **KIND)
    groups = {"rollout": rollout, "one": SyntheticHand.group({}, name="one", **KIND)}
    graph = trace(program, groups, source_items=4, expansions={"rollout.generate": samples})
    needed = {1: 12, 4: 4}[samples]

    def prompts(start):
        return [Item((place,), 0, {"seed": place, "left": place}) for place in range(start, start + size)]

    for make, num_devices in ((temporal_plan, 1), (spatial_plan, 3)):
        cluster = Cluster.virtual(num_devices)
        fed = [0]

        def more(start, fed=fed):
            fed.append(start)
            return prompts(start)

        with (
            launch_run(cluster, launcher="inproc") as session,
            Runtime(graph, make(graph, cluster), session) as runtime,
        ):
            runtime.start()
            result = runtime.run(0, prompts(0), more=more)
        assert [item.seq for item in result.outputs] == [(place,) for place in range(6)]
        assert fed == list(range(0, needed, size))
