"""A GRPO-shaped flow on synthetic workers, run for real: same results under every plan, times as the plan says."""

import itertools
import random
import time

import pytest

from m2flow.flow import (
    PlanError,
    RunError,
    RunStopped,
    Runtime,
    account,
    check_plan,
    hybrid_plan,
    spatial_plan,
    temporal_plan,
    trace,
)
from m2flow.flow._weights import Publication
from m2flow.flow.testing import SyntheticActor, SyntheticReward, SyntheticRollout, grpo, mean_reward
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Cluster, Item, WorkerFailed, launch_run

SAMPLES = 4
PROMPTS = 8


def specs(*, rollout=None, reward=None, actor=None):
    return {
        "rollout": SyntheticRollout.group(
            {"samples": SAMPLES, "tail_every": PROMPTS, **(rollout or {})}, name="rollout", device_kind="virtual"
        ),
        "reward": SyntheticReward.group(reward or {}, name="reward", device_kind="virtual"),
        "actor": SyntheticActor.group(
            {"minibatch": 2, **(actor or {})}, name="actor", device_kind="virtual", devices_per_rank=None
        ),
    }


def make_graph(**options):
    return trace(grpo, specs(**options), source_items=PROMPTS, expansions={"rollout.generate": SAMPLES})


def prompts(iteration):
    return [Item((number,), iteration, {"seed": 7 * number}) for number in range(PROMPTS)]


def busy(result, stage):
    return [s for s in result.timeline.spans if s.stage == stage and s.kind == pb.SPAN_KIND_BUSY]


def facts(results):
    """What must not depend on the plan."""
    return [
        [(item.id, item.fields["rewards"], item.fields["advantages"], item.fields["versions"]) for item in r.outputs]
        for r in results
    ]


CLUSTER = Cluster.virtual(4)


@pytest.fixture(scope="module")
def processes():
    """One run of processes for the tests that do not end theirs."""
    with launch_run(CLUSTER, launcher="process", preload=["m2flow.flow.runner", "m2flow.flow.testing"]) as session:
        yield session


@pytest.fixture(scope="module")
def threads():
    """One run of threads for the tests that do not end theirs."""
    with launch_run(CLUSTER, launcher="inproc") as session:
        yield session


def run(session, graph, plan, iterations=3):
    with Runtime(graph, plan, session) as runtime:
        runtime.start()
        results = [runtime.run(number, prompts(number)) for number in range(iterations)]
        weights = runtime.groups["actor"].weights().result(10)[0]
        with runtime.loaded("rollout"):
            versions = runtime.groups["rollout"].version().result(10)
    assert set(versions) == {iterations}
    return results, weights


@pytest.mark.medium
@pytest.mark.parametrize("launcher", ["threads", "processes"])
def test_temporal_and_spatial_plans_give_the_same_results(launcher, request):
    session, graph = request.getfixturevalue(launcher), make_graph()
    results, weights = run(session, graph, temporal_plan(graph, CLUSTER))
    others, other_weights = run(session, graph, spatial_plan(graph, CLUSTER))
    assert [len(result.outputs) for result in results] == [PROMPTS] * 3
    assert facts(results) == facts(others)
    assert weights == other_weights
    # Every sample was made with the weights of its own iteration, and learning changed them.
    assert [item.fields["versions"] for item in results[2].outputs] == [[2]] * PROMPTS
    assert facts(results)[0] != facts(results)[1]


def seconds(spans):
    return [(s.start_ns / 1e9, s.end_ns / 1e9) for s in spans]


def overlap_s(one, other):
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in seconds(one) for b in seconds(other))


def one_iteration(session, graph, plan):
    return run(session, graph, plan, iterations=1)[0][0]


def stage_plan(plan, name):
    return next(stage for stage in plan.stages if stage.stage == name)


@pytest.mark.medium
def test_in_turns_nothing_overlaps_and_every_turn_loads_and_unloads(processes):
    graph = make_graph(rollout={"seconds": 0.1, "switch_s": 0.02}, actor={"seconds": 0.02, "switch_s": 0.02})
    result = one_iteration(processes, graph, temporal_plan(graph, Cluster.virtual(2)))
    generated, trained = busy(result, "rollout.generate"), busy(result, "actor.train")
    assert overlap_s(generated, trained) == 0.0
    assert max(end for _, end in seconds(generated)) <= min(start for start, _ in seconds(trained))
    switches = {
        (s.group, s.kind) for s in result.timeline.spans if s.kind in (pb.SPAN_KIND_ONLOAD, pb.SPAN_KIND_OFFLOAD)
    }
    assert ("actor", pb.SPAN_KIND_ONLOAD) in switches
    assert ("rollout", pb.SPAN_KIND_OFFLOAD) in switches


@pytest.mark.medium
def test_side_by_side_training_starts_as_soon_as_its_granularity_is_there(processes):
    graph = make_graph(rollout={"seconds": 0.05}, actor={"seconds": 0.01})
    plan = spatial_plan(graph, Cluster.virtual(3))
    stage_plan(plan, "rollout.generate").granularity = 1
    stage_plan(plan, "actor.train").granularity = 2
    result = one_iteration(processes, graph, plan)
    generated, trained = busy(result, "rollout.generate"), busy(result, "actor.train")
    assert [s.items for s in trained] == [2, 2, 2, 2]
    # Two groups are there when two of the eight prompts are done, one after the other on one device.
    first = min(start for start, _ in seconds(trained))
    finished = sorted(end for _, end in seconds(generated))
    assert finished[1] <= first <= finished[3]
    assert overlap_s(generated, trained) > 0.02


@pytest.mark.medium
def test_with_a_long_tail_most_is_trained_before_the_last_rollout_ends(threads):
    def program(flow, rollout, reward, actor):
        groups = flow.gather(reward.score(rollout.generate(flow.source("prompts"))), by="prompt")
        return actor.train(flow.ordered(flow.map(mean_reward, groups), window=PROMPTS))

    # One prompt in eight takes ten times as long as the others.
    graph = trace(
        program,
        specs(rollout={"seconds": 0.05, "tail": 10.0}, actor={"minibatch": PROMPTS}),
        source_items=PROMPTS,
        expansions={"rollout.generate": SAMPLES},
    )
    plan = spatial_plan(graph, Cluster.virtual(3))
    stage_plan(plan, "rollout.generate").granularity = PROMPTS
    with Runtime(graph, plan, threads) as runtime:
        runtime.start()
        result = runtime.run(0, prompts(0))
    last = max(end for _, end in seconds(busy(result, "rollout.generate")))
    before = sum(s.items for s in busy(result, "actor.train") if s.end_ns / 1e9 < last)
    assert before >= 0.8 * PROMPTS
    (span,) = busy(result, "rollout.generate")
    out = list(span.output_after_ns)
    assert out == sorted(out)
    assert len(out) == len(span.outputs) == PROMPTS * SAMPLES
    assert out[-SAMPLES - 1] < 0.5 * (span.end_ns - span.start_ns) < out[-1]


@pytest.mark.medium
def test_ranks_that_move_in_step_are_dealt_the_same_number_of_chunks(threads):
    groups = specs()
    groups["actor"] = SyntheticActor.group({"minibatch": 1}, name="actor", device_kind="virtual", devices_per_rank=1)
    graph = trace(grpo, groups, source_items=7, expansions={"rollout.generate": SAMPLES})
    for plan in (temporal_plan(graph, CLUSTER), spatial_plan(graph, CLUSTER, weights={"actor": 2}, num_chunks=2)):
        with Runtime(graph, plan, threads) as runtime:
            runtime.start()
            result = runtime.run(0, prompts(0)[:7])
            world_size = runtime.groups["actor"].world_size
        assert [item.seq for item in result.outputs] == [(number,) for number in range(7)]
        chunks = {rank: [s.items for s in busy(result, "actor.train") if s.rank == rank] for rank in range(world_size)}
        assert len({len(sizes) for sizes in chunks.values()}) == 1
        # Source item j belongs to rank j mod world_size.
        assert [sum(chunks[rank]) for rank in range(world_size)] == [
            len(range(rank, 7, world_size)) for rank in range(world_size)
        ]


@pytest.mark.medium
def test_items_that_are_dropped_are_counted_and_groups_still_complete(threads):
    graph = make_graph(reward={"drop": True}, actor={"minibatch": PROMPTS})
    result = one_iteration(threads, graph, spatial_plan(graph, CLUSTER))
    kept = sum(len(item.fields["rewards"]) for item in result.outputs)
    assert result.tombstones["too long"] == PROMPTS * SAMPLES - kept > 0
    assert len(result.outputs) == PROMPTS


@pytest.mark.medium
@pytest.mark.parametrize("launcher", ["inproc", "process"])
def test_the_first_failure_reaches_the_caller_with_its_stage(launcher):
    graph, cluster = make_graph(actor={"fail_at": 1}), Cluster.virtual(3)
    plan = spatial_plan(graph, cluster)
    with launch_run(cluster, launcher=launcher) as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        runtime.run(0, prompts(0))
        start = time.monotonic()
        with pytest.raises(WorkerFailed, match="told to fail at iteration 1") as caught:
            runtime.run(1, prompts(1))
        assert time.monotonic() - start < 10
    assert (caught.value.group, caught.value.phase) == ("actor", "flow.finish")
    assert "in train" in caught.value.traceback


@pytest.mark.medium
def test_a_rollout_that_dies_is_restarted_and_changes_no_result(processes):
    plans = []
    for die_at in (None, 1):
        graph = make_graph(rollout={"die_at": die_at})
        plan = spatial_plan(graph, CLUSTER, weights={"rollout": 2})
        plans.append(run(processes, graph, plan))
    (wanted, weights), (got, same_weights) = plans
    assert facts(got) == facts(wanted)
    assert weights == same_weights


@pytest.mark.medium
def test_iterations_come_in_order_with_their_places(threads):
    graph = make_graph()
    with Runtime(graph, spatial_plan(graph, CLUSTER), threads) as runtime:
        with pytest.raises(RunStopped, match=r"want start\(\)"):
            runtime.submit(0, prompts(0))
        runtime.start(5)
        with pytest.raises(ValueError, match="got iteration 4, want 5"):
            runtime.submit(4, prompts(4))
        with pytest.raises(ValueError, match="got item 5:1, want 5:0"):
            runtime.submit(5, prompts(5)[1:])
        pending = runtime.submit(5, prompts(5))
        with pytest.raises(RunError, match="staleness is 0"):
            runtime.submit(6, prompts(6))
        assert {v for item in pending.result().outputs for v in item.fields["versions"]} == {5}
    with pytest.raises(RunStopped):
        runtime.submit(6, prompts(6))


@pytest.mark.medium
def test_stopping_with_an_iteration_under_way_ends_it():
    graph, cluster = make_graph(rollout={"seconds": 30.0}), Cluster.virtual(3)
    with (
        launch_run(cluster, launcher="process") as session,
        Runtime(graph, spatial_plan(graph, cluster), session) as runtime,
    ):
        runtime.start()
        runtime.submit(0, prompts(0))
        start = time.monotonic()
        runtime.stop()
        assert time.monotonic() - start < 15


@pytest.mark.medium
def test_with_staleness_the_next_iteration_generates_while_this_one_trains(threads, monkeypatch):
    def send_late(self, iteration, version):
        time.sleep(0.05)
        send(self, iteration, version)

    send = Publication.send
    monkeypatch.setattr(Publication, "send", send_late)
    graph = make_graph(rollout={"seconds": 0.02}, actor={"seconds": 0.08, "minibatch": 4})
    plan = spatial_plan(graph, CLUSTER)
    plan.staleness = 1
    with Runtime(graph, plan, threads) as runtime:
        runtime.start()
        under_way = [runtime.submit(number, prompts(number)) for number in range(2)]
        results = []
        for number in range(2, 6):
            results.append(under_way.pop(0).result())
            if number < 4:
                under_way.append(runtime.submit(number, prompts(number)))
    ages = {r.iteration - v for r in results for item in r.outputs for v in item.fields["versions"]}
    assert ages <= {0, 1}
    assert 1 in ages
    # What an iteration left behind is on its way before the next one changes it.
    for one, two in itertools.pairwise(results):
        sent_ns = max(s.end_ns for s in busy(one, "publish:actor->rollout") if s.group == "actor")
        assert sent_ns <= min(s.start_ns for s in busy(two, "actor.train"))
    both = itertools.pairwise(results)
    assert any(overlap_s(busy(one, "actor.train"), busy(two, "rollout.generate")) > 0.05 for one, two in both)


@pytest.mark.medium
def test_a_new_plan_between_iterations_carries_state_and_changes_no_result(threads, processes):
    graph = make_graph(actor={"minibatch": 3})
    wanted, weights = run(threads, graph, temporal_plan(graph, CLUSTER), iterations=4)
    plans = [spatial_plan(graph, CLUSTER), temporal_plan(graph, CLUSTER), spatial_plan(graph, CLUSTER, num_chunks=2)]
    with Runtime(graph, plans[0], processes) as runtime:
        runtime.start()
        results = [runtime.run(0, prompts(0))]
        for number, plan in enumerate(plans[1:], start=1):
            runtime.apply(plan)
            results.append(runtime.run(number, prompts(number)))
        pids = {name: group.pids for name, group in runtime.groups.items()}
        runtime.apply(spatial_plan(graph, CLUSTER, num_chunks=4))  # other granularities, and no group moves
        assert {name: group.pids for name, group in runtime.groups.items()} == pids
        results.append(runtime.run(3, prompts(3)))
        assert busy(results[3], "rollout.generate")[0].items < busy(results[2], "rollout.generate")[0].items
        assert runtime.groups["actor"].weights().result(10)[0] == weights
    assert facts(results) == facts(wanted)


def random_grpo_plan(chance, graph):
    """Any plan of the program on four devices that is accepted: devices may be shared, chunks are of any size."""
    while True:
        plan = pb.ExecutionPlan()
        for name in graph.groups:
            ids = sorted(chance.sample(range(4), chance.randint(1, 4)))
            num_ranks = 1 if name == "actor" else len(ids)
            residency = chance.choice([pb.RESIDENCY_RESIDENT, pb.RESIDENCY_OFFLOADED])
            plan.groups.add(group=name, device_ids=ids, num_ranks=num_ranks, residency=residency)
        shared = {n for own in plan.groups for n in own.device_ids}
        plan.share_groups.add(groups=list(graph.groups), device_ids=sorted(shared))
        for position, stage in enumerate(graph.kinds(pb.STAGE_KIND_WORK, pb.STAGE_KIND_PUBLISH)):
            size = chance.randint(1, graph.volume(stage.name))
            plan.stages.add(stage=stage.name, granularity=size, position=position, hold=chance.random() < 0.5)
        try:
            check_plan(graph, plan, CLUSTER)
        except PlanError:
            continue
        return plan


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(4))
def test_random_hybrid_plans_give_the_same_results(threads, seed):
    graph = make_graph(actor={"minibatch": 3})
    wanted, weights = run(threads, graph, temporal_plan(graph, CLUSTER), iterations=2)
    got, same_weights = run(threads, graph, random_grpo_plan(random.Random(seed), graph), iterations=2)
    assert facts(got) == facts(wanted)
    assert weights == same_weights


@pytest.mark.medium
def test_idle_time_has_its_causes(threads):
    """Whole batches, side by side: each group waits for as long as the other works, whatever that comes to."""
    graph = make_graph(rollout={"seconds": 0.4}, actor={"seconds": 0.05, "minibatch": PROMPTS})
    plan = spatial_plan(graph, Cluster.virtual(3), num_chunks=1)
    result = one_iteration(threads, graph, plan)
    lines = account(result.timeline, result.start_ns, result.end_ns)
    devices = {own.group: own.device_ids[0] for own in plan.groups}
    rollout, actor = (lines[devices[name]].causes for name in ("rollout", "actor"))
    assert rollout["busy"] >= 0.4
    assert actor["busy"] >= 0.4
    assert rollout["waiting for weights"] >= 0.7 * actor["busy"]
    assert actor["waiting for input"] >= 0.7 * rollout["busy"]
    assert all(line.unattributed < 0.02 for line in lines)


def causes_of(session, graph, plan):
    """Seconds by cause of each device, in one iteration in which next to nothing has none."""
    result = one_iteration(session, graph, plan)
    lines = account(result.timeline, result.start_ns, result.end_ns)
    assert all(line.unattributed < 0.02 for line in lines)
    return [line.causes for line in lines]


@pytest.mark.medium
def test_turns_and_full_inboxes_are_causes_of_idle_time(threads):
    switch = {"seconds": 0.02, "switch_s": 0.03}
    graph = make_graph(rollout=switch, actor=switch)
    [shared] = causes_of(threads, graph, temporal_plan(graph, Cluster.virtual(1)))
    assert shared["switching"] >= 3 * 0.03  # the rollout goes, the actor comes and goes

    # The trainer has its first groups early, and needs both devices: the rollout's turn comes first on one of them.
    graph = make_graph(rollout={"seconds": 0.1, "tail_every": 0})
    plan = hybrid_plan(graph, Cluster.virtual(2), num_chunks=4)
    stage_plan(plan, "actor.train").granularity = 1
    rollout, reward = causes_of(threads, graph, plan)
    assert reward["waiting for the lock"] >= 0.5 * rollout["busy"] >= 0.2

    # An inbox of one prompt's samples fills at once. The trainer takes all groups in the end, when the others are done.
    graph = make_graph(reward={"seconds": 0.01}, actor={"seconds": 0.02, "minibatch": PROMPTS})
    plan = spatial_plan(graph, Cluster.virtual(3))
    plan.edges.add(producer="rollout.generate", consumer="reward.score", capacity=SAMPLES)
    stage_plan(plan, "actor.train").granularity = PROMPTS
    rollout, reward, actor = causes_of(threads, graph, plan)
    assert rollout["waiting for output"] >= 0.5 * reward["busy"] >= 0.16
    assert reward["bubble"] >= 0.9 * actor["busy"] >= 0.14


@pytest.mark.medium
def test_after_a_silence_the_watchdog_hears_what_waits_where(capsys):
    graph = make_graph(rollout={"seconds": 1.0, "tail_every": 1}, actor={"minibatch": PROMPTS})
    cluster = Cluster.virtual(1)
    with (
        launch_run(cluster, launcher="inproc", silence_s=0.4) as session,
        Runtime(graph, temporal_plan(graph, cluster), session) as runtime,
    ):
        runtime.start()
        runtime.run(0, prompts(0))
    assert f"iteration 0: rollout.generate: 0 items wait for it, {PROMPTS} are with it" in capsys.readouterr().err


@pytest.mark.medium
def test_what_a_worker_holds_is_claimed_for_as_long_as_it_is_there():
    graph, cluster = make_graph(rollout={"bytes": 600}, actor={"bytes": 600}), Cluster.virtual(1, memory_bytes=1000)
    with launch_run(cluster, launcher="inproc") as session:
        with Runtime(graph, temporal_plan(graph, cluster), session) as runtime:
            runtime.start()
            runtime.run(0, prompts(0))
            assert session.residency.held() == {}
            with runtime.loaded("rollout"):
                assert session.residency.held() == {0: {"rollout.0": 600}}
        with (
            Runtime(graph, spatial_plan(graph, cluster), session) as runtime,
            pytest.raises(WorkerFailed, match=r"asks for 600 bytes on .* want at most 400"),
        ):
            runtime.start()


@pytest.mark.medium
@pytest.mark.parametrize("late", [False, True], ids=["in the first iteration", "after two publications"])
def test_a_rank_that_dies_while_iterations_overlap_goes_on_with_the_oldest(processes, late):
    """It waited for weights that only its own part of the iteration before could bring, or for withdrawn ones."""
    graph = make_graph(rollout={"seconds": 0.05})
    plan = spatial_plan(graph, Cluster.virtual(3))
    plan.staleness = 1
    with Runtime(graph, plan, processes) as runtime:
        runtime.start()
        under_way = [runtime.submit(0, prompts(0))]
        if late:
            under_way.append(runtime.submit(1, prompts(1)))
            while processes.endpoint.newest_weights("actor.0", "publish:actor->rollout") < 2:
                time.sleep(0.01)
        [pid] = runtime.groups["rollout"].pids
        runtime.groups["rollout"].kill(0)
        while runtime.groups["rollout"].pids == [pid]:
            time.sleep(0.01)
        if not late:
            under_way.append(runtime.submit(1, prompts(1)))
        assert [len(pending.result().outputs) for pending in under_way] == [PROMPTS] * 2


@pytest.mark.medium
@pytest.mark.parametrize("plan_of", [temporal_plan, spatial_plan])
def test_a_rank_that_died_between_iterations_is_loaded_with_the_newest_weights(processes, plan_of):
    """It had those of its setup until the next iteration: an evaluation was one of them."""
    graph = make_graph()
    with Runtime(graph, plan_of(graph, Cluster.virtual(3)), processes) as runtime:
        runtime.start()
        runtime.run(0, prompts(0))
        rollout = runtime.groups["rollout"]
        pids = rollout.pids
        rollout.kill(0)
        while rollout.pids[0] == pids[0]:
            time.sleep(0.01)
        with runtime.loaded("rollout"):
            assert rollout.version().result(20) == [1] * rollout.world_size
        assert len(runtime.run(1, prompts(1)).outputs) == PROMPTS
        with runtime.loaded("rollout"):
            assert rollout.version().result(20) == [2] * rollout.world_size


@pytest.mark.medium
def test_a_failure_ends_a_submit_that_waits_for_room():
    graph, cluster = make_graph(), Cluster.virtual(3)
    plan = spatial_plan(graph, cluster)
    plan.edges.add(producer="prompts", consumer="rollout.generate", capacity=2)
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        with pytest.raises(WorkerFailed, match="invalid literal for int"):
            runtime.submit(0, [Item((number,), 0, {"seed": "none"}) for number in range(PROMPTS)])


def test_calls_between_iterations_keep_out_what_would_wait_for_them(threads):
    graph = make_graph()
    plan = temporal_plan(graph, CLUSTER)
    runtime = Runtime(graph, plan, threads)
    for ask in (lambda: runtime.apply(plan), lambda: runtime.loaded("rollout").__enter__(), runtime.carried):
        with pytest.raises(RunStopped, match=r"want start\(\) before it"):
            ask()
    with runtime:
        runtime.start()
        with (
            pytest.raises(RunError, match=r"rollout and actor take turns on devices \[0, .*, want one"),
            runtime.loaded("rollout", "actor"),
        ):
            pass
        with (
            pytest.raises(RunError, match=r"got groups \['rolout'\], want some of rollout, "),
            runtime.loaded("rolout"),
        ):
            pass
        with runtime.loaded("rollout"):
            for ask in (lambda: runtime.run(0, prompts(0)), lambda: runtime.apply(plan)):
                with pytest.raises(RunError, match="keeps rollout on their devices, want its `with` to end"):
                    ask()
        pending = runtime.submit(0, prompts(0))
        with pytest.raises(RunError, match="loaded: iteration 0 is under way"), runtime.loaded("rollout"):
            pass
        assert len(pending.result().outputs) == PROMPTS
    with pytest.raises(RunStopped):
        runtime.apply(plan)
