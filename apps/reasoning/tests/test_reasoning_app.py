"""The recipe as it is traced, planned and checked: nothing starts, and no model is read."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from m2flow.apps.config import load_config
from m2flow.apps.testing.tiny import save_tiny_language_model
from m2flow.apps.training import traced
from m2flow.flow import Graph, load_plan
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.reasoning import recipe
from m2flow.reasoning.app import APP
from m2flow.reasoning.cli import main


def graph_of(name: str, *overrides: str) -> Graph:
    config = load_config(APP.config_class, APP.recipes[name], overrides)
    return traced(APP.build(config, Path("no/model"), None), config, name="grpo")


def test_the_recipe_is_short() -> None:
    assert len(inspect.getsource(recipe).splitlines()) < 100


@pytest.mark.parametrize("name", sorted(APP.recipes))
def test_every_shipped_recipe_traces(name: str) -> None:
    graph = graph_of(name).to_proto()
    kinds = {stage.name: stage.kind for stage in graph.stages}
    assert kinds["rollout.generate"] == flow_pb2.STAGE_KIND_WORK
    assert kinds["actor.train"] == flow_pb2.STAGE_KIND_WORK
    assert sorted(kinds.values()).count(flow_pb2.STAGE_KIND_GATHER) == 1
    (publish,) = [stage for stage in graph.stages if stage.kind == flow_pb2.STAGE_KIND_PUBLISH]
    assert (publish.group, publish.to) == ("actor", "rollout")


def test_the_graph_does_not_depend_on_the_plan() -> None:
    assert graph_of("one_digit", "plan=spatial").to_proto() == graph_of("one_digit", "plan=temporal").to_proto()


def test_samples_per_prompt_reaches_the_graph() -> None:
    graph = graph_of("one_digit", "samples_per_prompt=4", "minibatch_size=32").to_proto()
    (generate,) = [stage for stage in graph.stages if stage.name == "rollout.generate"]
    assert generate.expansion == 4.0
    assert graph.source_items == 8


def test_the_same_step_has_the_same_prompts_and_another_step_others() -> None:
    config = load_config(APP.config_class, APP.recipes["two_digit"])
    job = APP.build(config, Path("no/model"), None)
    first, again, second = (
        [item.fields["prompt"] for item in job.items(1)],
        [item.fields["prompt"] for item in job.items(1)],
        [item.fields["prompt"] for item in job.items(2)],
    )
    assert first == again
    assert first != second


def test_one_number_of_the_measured_profile_flips_the_plan(tmp_path: Path) -> None:
    """Measured, taking turns is best; did two cores generate half as fast, stages would work side by side."""
    cluster, profile, plan = (tmp_path / name for name in ("cluster.yaml", "profile.yaml", "plan.json"))
    cluster.write_text("nodes: [{name: n, count: 1, devices: [{kind: cpu, count: 2}]}]\n")
    measured = yaml.safe_load(APP.default_profile.read_text())
    asked = ("rollout.generate", 2, 16)
    (whole,) = [s for s in measured["samples"] if (s["stage"], s["devices"], s["items"]) == asked]
    files = ["--cluster", str(cluster), "--profile", str(profile), "--output", str(plan)]
    chosen = []
    for seconds in (whole["seconds"], 2 * whole["seconds"]):
        whole["seconds"] = seconds
        profile.write_text(yaml.safe_dump(measured))
        assert main(["plan", "two_digit", *files]) == 0
        chosen.append(load_plan(plan).mode)
    assert chosen[0] == "temporal"
    assert chosen[1] in {"spatial", "hybrid"}


def test_an_unknown_key_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "one_digit", "sampling.temperatur=0.5"]) == 2
    assert "temperature" in capsys.readouterr().err


def test_config_show_prints_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "one_digit", "num_steps=3"]) == 0
    out = capsys.readouterr().out
    assert "num_steps: 3" in out
    assert "total_samples: 192" in out


REWARD = """
def by_length(fields):
    if sum(map(ord, fields["completion"])) % 3 == 0:
        raise ValueError("one in three")
    return {"reward": len(fields["completion"]), "is_right": float(fields["completion"] == fields["answer"])}


def never(fields):
    raise ValueError("none is right")
"""


def train(tmp_path: Path, function: str, on_failure: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": {n + 1}}}\n' for n in range(12)))
    words = {
        "task": "file/sums.jsonl",
        "reward.function": f"my_rewards:{function}",
        "reward.on_failure": on_failure,
        "model.source": save_tiny_language_model(tmp_path / "model"),
        "run.dir": tmp_path / "run",
        "run.profiles": '""',
        "num_steps": 2,
        "evaluation.num_problems": 3,
        "evaluation.every": 2,
        "plan": "temporal",
    }
    return subprocess.run(
        [sys.executable, "-m", "m2flow.reasoning", "train", "one_digit", *(f"{k}={v}" for k, v in words.items())],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.large
@pytest.mark.timeout(120)
@pytest.mark.parametrize("on_failure", ["score", "skip"])
def test_problems_and_rewards_of_the_users_own(tmp_path: Path, on_failure: str) -> None:
    done = train(tmp_path, "by_length", on_failure)
    assert done.returncode == 0, done.stderr
    assert ("the reward function failed on" in done.stdout + done.stderr) == (on_failure == "score")
    assert "failed: ValueError: one in three" in (tmp_path / "run" / "logs" / "reward.0.log").read_text()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "critic/score/mean" in row]
    assert len(steps) == 2
    for row in steps:
        failed = row["reward/errors"] if on_failure == "score" else row["tombstones/reward/errors"]
        assert failed > 0
        assert row["reward/scored"] + failed == 64
        assert row["reward_part/is_right"] == 0
        assert (row["critic/score/min"] == 0) == (on_failure == "score")
    assert all(row["eval/greedy_accuracy"] > 1 for row in rows if "eval/greedy_accuracy" in row)


@pytest.mark.large
@pytest.mark.timeout(120)
def test_a_step_of_which_all_is_lost_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, "never", "skip")
    assert done.returncode == 1
    assert "step 1: got nothing to learn from (reward/errors 64), want a sample" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_whose_reward_function_is_to_stop_it_stops_at_once() -> None:
    for on_failure, on_death in [("stop", "stop"), ("skip", "retry"), ("score", "retry")]:
        words = ["reward.function=m:f", f"reward.on_failure={on_failure}"]
        config = load_config(APP.config_class, APP.recipes["one_digit"], words)
        assert APP.build(config, Path("no/model"), None).groups["reward"].on_death == on_death


def test_a_reward_that_cannot_be_found_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "one_digit", "reward.function=no_such_module:score"]) == 2
    assert "reward.function: got 'no_such_module:score', which cannot be found" in capsys.readouterr().err
