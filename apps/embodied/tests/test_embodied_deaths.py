"""An environment process that is killed in the middle of an iteration costs its episodes, and nothing else."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from m2flow.apps.config import load_config
from m2flow.apps.training import traced
from m2flow.embodied.app import APP
from m2flow.embodied.prepared import prepared
from m2flow.flow import Graph, Runtime, spatial_plan, temporal_plan
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.worker import Cluster, Placement, launch_run

WORDS = ["num_lanes=4", "episodes_per_step=16"]


@pytest.mark.medium
@pytest.mark.parametrize(("make_plan", "num_ranks"), [(temporal_plan, 2), (spatial_plan, 1)])
def test_a_killed_environment_is_restarted_its_episodes_counted_and_training_goes_on(
    tmp_path: Path, make_plan: Callable[[Graph, Cluster], flow_pb2.ExecutionPlan], num_ranks: int
) -> None:
    config = load_config(APP.config_class, APP.recipes["point"], WORDS)
    job = APP.build(config, prepared(config, str(tmp_path)), None)
    cluster = Cluster.local(2)
    graph = traced(job, config, name="embodied")
    outcomes, versions = [], []
    with (
        launch_run(cluster, launcher="process", run_dir=tmp_path / "run") as session,
        Runtime(graph, make_plan(graph, cluster), session) as runtime,
    ):
        runtime.start(1)
        pids = runtime.groups["env"].pids
        assert len(pids) == num_ranks

        def kill() -> None:
            time.sleep(0.05)  # an iteration takes some hundred milliseconds: 20 rounds of several messages
            runtime.groups["env"].kill(0)

        for step in range(1, 7):
            if step in (2, 3):
                threading.Thread(target=kill).start()
            result = runtime.run(step, job.items(step))
            outcomes.append((job.measure(result.outputs).metrics, result.tombstones))
            versions.append(runtime.groups["learner"].method("num_updates")().result()[0])
        assert runtime.groups["env"].pids != pids
    dropped = [metrics["env/episodes_dropped"] for metrics, _ in outcomes]
    assert sum(dropped) > 0
    assert max(dropped) <= 16 / num_ranks
    for number, (metrics, tombstones) in zip(dropped, outcomes, strict=True):
        assert metrics["env/episodes"] == 16 - number
        assert tombstones.get("died", 0) == number / 4  # a lane each
    assert dropped[0] == 0
    assert dropped[-1] == 0
    assert versions[-1] > versions[-2]


@pytest.mark.medium
def test_episodes_of_an_evaluation_whose_process_is_killed_are_played_again(tmp_path: Path) -> None:
    config = load_config(APP.config_class, APP.recipes["point"], [*WORDS, "evaluation.num_episodes=200"])
    job = APP.build(config, prepared(config, str(tmp_path)), None)
    cluster = Cluster.local(2)
    with launch_run(cluster, launcher="process", run_dir=tmp_path / "run") as session:
        groups = {name: session.start(job.groups[name], Placement(((0,), (1,)))) for name in job.evaluated_groups}
        want, pids = job.evaluate(groups, 0), list(groups["env"].pids)
        assassin = threading.Timer(0.05, groups["env"].kill, [0])
        assassin.start()
        assert job.evaluate(groups, 0) == want
        assassin.join()
        assert groups["env"].pids[0] != pids[0]
        assert groups["env"].pids[1] == pids[1]
