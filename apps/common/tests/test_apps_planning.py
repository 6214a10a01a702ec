"""Planning from what iterations measured, in runs that are simulated: no worker starts."""

from pathlib import Path

import pytest

from m2flow import sched
from m2flow.apps.config import load_config
from m2flow.apps.forecast import Forecast, ProfileStore, new_profile
from m2flow.apps.planning import AutoPlanning, cluster_spec, difference, probes
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.testing.toy import TOY
from m2flow.apps.training import traced
from m2flow.flow import Graph, check_plan, trace
from m2flow.flow.testing import FakeSpec, dapo, ppo
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.worker import Cluster

CONFIG = load_config(TOY.config_class, TOY.recipes["small"], ["prompts_per_step=16"])
JOB = TOY.build(CONFIG, Path("nowhere"), None)


def truth(graph: Graph, cluster: Cluster, rollout_s: float) -> sched_pb2.PlanRequest:
    """Rollouts that divide over devices and take `rollout_s` for all; training of 4 s that does not divide."""
    profile = sched_pb2.Profile()
    for devices in (1, 2):
        for items in (1, 16):
            seconds = rollout_s * items / 16 / devices
            profile.samples.add(stage="rollout.generate", devices=devices, items=items, seconds=seconds)
            profile.samples.add(stage="actor.train", devices=devices, items=items, seconds=4 * items / 16)
            profile.samples.add(stage="reward.score", devices=devices, items=2 * items, seconds=1e-4)
    profile.syncs.add(source="actor", target="rollout", seconds=0.1)
    return sched_pb2.PlanRequest(workflow=graph.to_proto(), profile=profile, cluster=cluster_spec(cluster))


def lived(request: sched_pb2.PlanRequest, plan: flow_pb2.ExecutionPlan, *, tokens: int = 25) -> flow_pb2.Timeline:
    """What an iteration under a plan would record, with the tokens of a rollout."""
    timeline = sched.simulate(sched_pb2.SimulateRequest(request=request, plan=plan)).timeline
    for span in timeline.spans:
        span.tokens = tokens * span.items if span.stage == "rollout.generate" else 0
    return timeline


def test_a_drift_changes_the_plan_once_it_pays(tmp_path: Path) -> None:
    graph, cluster, said = traced(JOB, CONFIG, name="toy"), Cluster.local(2), list[str]()
    run = RunDirectory.create("toy", root=str(tmp_path))
    forecast = Forecast(graph, cluster_spec(cluster), new_profile("toy", JOB.groups))
    planning = AutoPlanning(graph, cluster, forecast, run, profile_iterations=1, say=said.append)
    planning.switch_s = 1.0
    modes, changes = [], []
    for step in range(1, 41):
        growth = 1 if step <= 10 else 4
        request = truth(graph, cluster, 4.0 * growth)
        modes.append(planning.plan.mode)
        if planning.observe(lived(request, planning.plan, tokens=25 * growth), remaining_iterations=40 - step):
            changes.append(step)
    assert modes[6:10] == ["spatial"] * 4  # 4 s beside 4 s, against 2 s and 4 s in turns
    assert modes[-1] != "spatial"  # 16 s on one device, against 8 s and 4 s in turns
    assert len([step for step in changes if step > 6]) == 1
    assert any("would take" in line for line in said)


def test_nothing_is_predicted_before_every_stage_was_measured() -> None:
    graph, cluster = traced(JOB, CONFIG, name="toy"), Cluster.local(2)
    forecast = Forecast(graph, cluster_spec(cluster), new_profile("toy", JOB.groups))
    request = truth(graph, cluster, 4.0)
    plan = sched.plan(request).plans[0].plan
    assert forecast.seconds(plan) is None
    forecast.learn(lived(request, plan), plan)
    predicted = forecast.seconds(plan)
    assert predicted is not None
    assert abs(predicted / sched.simulate(sched_pb2.SimulateRequest(request=request, plan=plan)).iteration_s - 1) < 0.02


def test_what_a_run_under_one_plan_measured_does_not_spare_the_probes(tmp_path: Path) -> None:
    """In turns on both devices says nothing of one device: auto still measures side by side."""
    graph, cluster = traced(JOB, CONFIG, name="toy"), Cluster.local(2)
    forecast = Forecast(graph, cluster_spec(cluster), new_profile("toy", JOB.groups))
    request, (turns, *others) = truth(graph, cluster, 4.0), probes(graph, cluster)
    forecast.learn(lived(request, turns), turns)
    assert forecast.complete
    assert not forecast.covers([turns, *others])
    run = RunDirectory.create("toy", root=str(tmp_path))
    planning = AutoPlanning(graph, cluster, forecast, run, profile_iterations=1, say=lambda text: None)
    assert planning.plan == turns
    assert not run.explanation.exists()
    for plan in others:
        forecast.learn(lived(request, plan), plan)
    assert forecast.covers([turns, *others])


def test_no_plan_is_probed_twice() -> None:
    config = load_config(TOY.config_class, TOY.recipes["small"], ["prompts_per_step=1", "minibatch_size=2"])
    plans = probes(traced(TOY.build(config, Path("nowhere"), None), config, name="toy"), Cluster.local(2))
    assert len({plan.SerializeToString(deterministic=True) for plan in plans}) == len(plans)


def test_plans_of_one_mode_are_told_apart() -> None:
    graph, cluster = traced(JOB, CONFIG, name="toy"), Cluster.local(2)
    turns, finer, beside, coarser = probes(graph, cluster)
    assert difference(turns, finer) == "rollout.generate by 4, reward.score by 8, actor.train by 4"
    assert difference(finer, beside) == "rollout on 0, reward on 1, actor on 1"
    assert beside.mode == coarser.mode
    assert "rollout.generate by 8" in difference(beside, coarser)
    held = flow_pb2.ExecutionPlan()
    held.CopyFrom(turns)
    held.stages[0].hold = not held.stages[0].hold
    assert difference(turns, held) == "in other turns"


def test_profiles_of_another_workload_or_machine_and_broken_ones_are_not_used(tmp_path: Path) -> None:
    store, empty = ProfileStore(str(tmp_path)), new_profile("toy", JOB.groups)
    measured = sched_pb2.Profile()
    measured.CopyFrom(empty)
    measured.samples.add(stage="actor.train", devices=1, items=1, seconds=1)
    store.keep(measured)
    assert store.find(empty) == measured
    elsewhere = sched_pb2.Profile(model=empty.model, hardware="another", version=empty.version)
    assert not store.find(elsewhere).samples
    slower = TOY.build(load_config(TOY.config_class, TOY.recipes["small"], ["train_s=1"]), Path("nowhere"), None)
    assert not store.find(new_profile("toy", slower.groups)).samples
    path = store.path(empty)
    assert path is not None
    path.write_text("{")
    assert store.find(empty) == empty
    assert ProfileStore("").find(empty) == empty


@pytest.mark.parametrize("devices", [4, 8])
def test_the_runtime_takes_plans_with_barriers_and_quotas(devices: int) -> None:
    actor = FakeSpec("actor", ("train",), in_step=True)
    small = {"rollout": FakeSpec("rollout", ("generate",)), "reward": FakeSpec("reward", ("score",)), "actor": actor}
    judges = {"critic": FakeSpec("critic", ("values",)), "reference": FakeSpec("reference", ("logprobs",))}
    cluster = Cluster.virtual(devices)
    for program, groups in ((ppo, small | judges), (dapo, small)):
        graph = trace(program, groups, source_items=8, expansions={"rollout.generate": 4})
        request = sched_pb2.PlanRequest(workflow=graph.to_proto(), cluster=cluster_spec(cluster))
        plans = sched.plan(request).plans
        assert plans
        for ranked in plans:
            check_plan(graph, ranked.plan, cluster)
