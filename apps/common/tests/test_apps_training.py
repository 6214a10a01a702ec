"""The driver on synthetic workers: what a run leaves behind, how it goes on, and how it ends when something fails."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from m2flow.apps.checkpoint import latest_checkpoint
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.testing.trace_check import trace_problems
from m2flow.apps.training import _skipped
from m2flow.flow import load_plan

Toy = Callable[..., Any]

pytestmark = pytest.mark.medium


def _state(run: RunDirectory) -> dict[str, object]:
    newest = latest_checkpoint(run.checkpoints)
    assert newest is not None
    state: dict[str, object] = json.loads((newest / "state.json").read_text())
    return state


def _rewards(run: RunDirectory) -> list[object]:
    return [row["critic/score/mean"] for row in run.read_metrics() if "critic/score/mean" in row]


def _train(toy: Toy, path: Path, *words: str) -> tuple[RunDirectory, Any]:
    ended = toy("train", f"run.dir={path}", "launcher=inproc", *words)
    return RunDirectory(path), ended


def test_a_run_leaves_everything_that_it_promises(toy: Toy, tmp_path: Path) -> None:
    run, ended = _train(toy, tmp_path / "run")
    assert ended.code == 0, ended.err
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 4, 4]
    names = {"critic/score/mean", "response_length/mean", "timing_s/step", "timing_s/actor.train", "plan/measured_s"}
    assert all(names <= set(row) for row in rows if "critic/score/mean" in row)
    assert sorted(run.read_samples()) == [1, 2, 3, 4]
    assert len(run.read_samples()[4]) == 8
    assert latest_checkpoint(run.checkpoints) == run.checkpoints / "step_4"
    assert load_plan(run.plan).mode == "temporal"
    assert yaml.safe_load(run.config.read_text())["num_steps"] == 4
    assert "held-out greedy accuracy: 1.000 before, 5.000 after" in ended.out
    assert "total_optimiser_steps     4" in ended.out
    assert 'id="reward-curve"' in run.report.read_text()


def test_the_timeline_is_one_that_perfetto_shows(toy: Toy, tmp_path: Path) -> None:
    run, _ = _train(toy, tmp_path / "run", "num_steps=2")
    trace = json.loads(run.timeline.read_text())
    assert trace_problems(trace) == []
    busy = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "busy"}
    assert {"rollout.generate", "reward.score", "actor.train", "publish:actor->rollout"} <= busy
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "s", "f"}
    assert set(trace["otherData"]["devices"]) == {"0", "1"}


def test_plans_change_the_time_and_nothing_else(toy: Toy, tmp_path: Path) -> None:
    temporal, _ = _train(toy, tmp_path / "temporal", "num_steps=3")
    spatial, ended = _train(toy, tmp_path / "spatial", "num_steps=3", "plan=spatial")
    assert ended.code == 0, ended.err
    assert temporal.read_samples() == spatial.read_samples()
    assert _rewards(temporal) == _rewards(spatial)


def test_a_resumed_run_equals_the_unbroken_one(toy: Toy, tmp_path: Path) -> None:
    whole, _ = _train(toy, tmp_path / "whole", "num_steps=6")
    broken, _ = _train(toy, tmp_path / "broken", "num_steps=5", "fails_at=4")
    assert _rewards(broken) == _rewards(whole)[:3]
    ended = toy("train", "--resume", str(broken.path), "num_steps=6", "fails_at=0", "plan=spatial")
    assert ended.code == 0, ended.err
    assert _rewards(broken) == _rewards(whole)
    assert broken.read_samples() == whole.read_samples()
    assert _state(broken) == _state(whole)


def test_with_staleness_steps_run_ahead_and_none_is_lost_or_doubled(toy: Toy, tmp_path: Path) -> None:
    words = ("launcher=process", "plan=spatial", "staleness=1", "generate_s=0.03", "train_s=0.03", "evaluation.every=4")
    run, ended = _train(toy, tmp_path / "run", "num_steps=8", "checkpoint.every=4", "dies_at=6", *words)
    assert ended.code == 1
    assert latest_checkpoint(run.checkpoints) == run.checkpoints / "step_4"
    ended = toy("train", "--resume", str(run.path), "dies_at=0")
    assert ended.code == 0, ended.err
    assert [row["step"] for row in run.read_metrics() if "critic/score/mean" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert _state(run)["counts"] == [8 * 4, 8]
    ages = {
        step: {step - version for row in rows for version, _ in row["policy_versions"]}
        for step, rows in run.read_samples().items()
    }
    assert len(ages) == 8
    assert all(found <= {0, 1} for found in ages.values())
    # None runs ahead of an evaluation or a checkpoint, the others do.
    assert ages[1] == ages[5] == {0}
    assert any(1 in found for found in ages.values())


def test_staleness_is_refused_where_the_plan_is_searched(toy: Toy) -> None:
    ended = toy("check", "plan=auto", "staleness=1")
    assert ended.code == 2
    assert "want plan=temporal, spatial or hybrid" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "nothing to do: 2 of 2 steps are done: raise num_steps"), (("seed=1", "num_steps=3"), "seed: got 1, want 0")],
)
def test_a_resume_that_would_do_nothing_or_something_else_is_refused(
    toy: Toy, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    run, _ = _train(toy, tmp_path / "run", "num_steps=2")
    before = run.metrics.read_text()
    ended = toy("train", "--resume", str(run.path), *words)
    assert ended.code == 2
    assert said in ended.err
    assert run.metrics.read_text() == before


def test_a_run_is_measured_by_its_own_settings_unless_a_recipe_is_named(toy: Toy, tmp_path: Path) -> None:
    run, _ = _train(toy, tmp_path / "run", "num_steps=2")
    assert "cpu_slots: 2" in run.config.read_text()
    run.config.write_text(run.config.read_text().replace("cpu_slots: 2", "cpu_slots: 4096"))
    for checkpoint in (run.path, run.checkpoints / "step_2"):
        (run.checkpoints / "step_2" / "config.json").touch()
        assert "cpu_slots: got 4096, want" in toy("eval", "--checkpoint", str(checkpoint)).err
        ended = toy("eval", "small", "--checkpoint", str(checkpoint), "launcher=inproc")
        assert ended.code == 0, ended.err


def test_a_failing_worker_is_named_first_and_the_files_are_kept(toy: Toy, tmp_path: Path) -> None:
    run, ended = _train(toy, tmp_path / "run", "fails_at=3")
    assert ended.code == 1
    first, *rest = ended.err.splitlines()
    assert first.startswith("actor rank 0 on ")
    assert "RuntimeError: the toy was told to fail" in "\n".join([first, *rest])
    assert latest_checkpoint(run.checkpoints) == run.checkpoints / "step_2"
    assert trace_problems(json.loads(run.timeline.read_text())) == []
    assert run.report.exists()


def test_the_plan_is_written_before_the_first_step(toy: Toy, tmp_path: Path) -> None:
    run, ended = _train(toy, tmp_path / "run", "fails_at=1")
    assert ended.code == 1
    assert _rewards(run) == []
    assert load_plan(run.plan).mode == "temporal"


def test_auto_measures_then_explains_and_goes_on_with_its_choice(toy: Toy, tmp_path: Path) -> None:
    run, ended = _train(toy, tmp_path / "run", "plan=auto", "num_steps=8", "generate_s=0.05", "train_s=0.02")
    assert ended.code == 0, ended.err
    profile = json.loads(run.profile.read_text())
    stages = {sample["stage"] for sample in profile["samples"]}
    assert {"rollout.generate", "actor.train"} <= stages
    assert profile["model"]
    assert profile["hardware"]
    assert run.explanation.read_text().strip() in ended.out
    predicted = [row["step"] for row in run.read_metrics() if "plan/predicted_s" in row]
    assert predicted == [3, 4, 5, 6, 7, 8]
    assert load_plan(run.plan).HasField("prediction")
    fixed, _ = _train(toy, tmp_path / "fixed", "num_steps=8", f"plan={run.plan}")
    assert fixed.read_samples() == run.read_samples()


def test_a_second_run_plans_from_what_the_first_measured(toy: Toy, tmp_path: Path) -> None:
    words = ("plan=auto", "generate_s=0.05", "train_s=0.02", f"run.profiles={tmp_path / 'profiles'}")
    first, _ = _train(toy, tmp_path / "first", *words, "num_steps=7")
    second, ended = _train(toy, tmp_path / "second", *words, "num_steps=3", "seed=1")
    assert ended.code == 0, ended.err
    assert load_plan(first.plan).HasField("prediction")
    assert [row["step"] for row in second.read_metrics() if "plan/predicted_s" in row] == [1, 2, 3]
    assert ended.out.index("s an iteration") < ended.out.index("step 1/3")
    assert str(tmp_path / "profiles") in toy("plan", *words).out
    other, _ = _train(toy, tmp_path / "other", *words, "num_steps=1", "train_s=0.03")
    assert not [row for row in other.read_metrics() if "plan/predicted_s" in row]


def test_a_fixed_plan_is_predicted_from_its_own_iterations(toy: Toy, tmp_path: Path) -> None:
    run, _ = _train(toy, tmp_path / "run", "num_steps=4", "generate_s=0.05", "train_s=0.02")
    rows = {row["step"]: row for row in run.read_metrics() if "plan/predicted_s" in row}
    assert sorted(rows) == [3, 4]
    assert rows[4]["plan/predicted_s"] == pytest.approx(4 * 0.05 / 2 + 4 * 0.02, rel=0.5)


def test_several_epochs_take_several_optimiser_steps(toy: Toy, tmp_path: Path) -> None:
    run, ended = _train(toy, tmp_path / "run", "num_steps=2", "num_epochs=3")
    assert ended.code == 0, ended.err
    assert _state(run)["counts"] == [6 * 4, 6]  # groups, optimiser steps


def test_items_that_are_lost_unasked_are_said_and_counted() -> None:
    graph = SimpleNamespace(stages={"source": 0, "filter:is_mixed": 1})
    assert _skipped({"filter:is_mixed": 3, "surplus": 1}, graph) == ""
    assert _skipped({"reward/timeouts": 2, "filter:is_mixed": 3, "died": 1}, graph) == (
        "3 items were skipped (reward/timeouts 2, died 1): logs/ says why"
    )
