"""Whole runs on the point task: it learns, plans change the time alone, a resumed run is the unbroken one."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from m2flow.apps.testing.trace_check import trace_problems
from m2flow.embodied.cli import main

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    path: Path

    @property
    def rows(self) -> list[Row]:
        """metrics.jsonl."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def series(self, metric: str) -> list[float]:
        """The values of one metric, by step."""
        return [row[metric] for row in self.rows if metric in row]

    def busy(self, stage: str) -> list[tuple[float, float]]:
        """Start and end of each time that a stage was at work, in microseconds."""
        events: Sequence[Row] = json.loads((self.path / "timeline.json").read_text())["traceEvents"]
        found = [event for event in events if event["ph"] == "X" and event["name"] == stage]
        return [(event["ts"], event["ts"] + event["dur"]) for event in found]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Trains to the end with these words; a failure is the test's."""

    def run(*words: str) -> Run:
        path = tmp_path_factory.mktemp("run") / "run"
        assert main(["train", "point", f"run.dir={path}", *words]) == 0
        return Run(path)

    return run


pytestmark = pytest.mark.medium
SHORT = ("num_steps=3", "evaluation.num_episodes=4", "evaluation.every=3")


@pytest.fixture(scope="module")
def learned(train: Callable[..., Run]) -> Run:
    return train("plan=temporal", "checkpoint.every=3", "checkpoint.keep=9")


def weights(run: Run, step: int) -> dict[str, list[object]]:
    state = load_file(run.path / "checkpoints" / f"step_{step}" / "model.safetensors")
    return {name: tensor.tolist() for name, tensor in state.items()}


def test_it_learns_and_tells(learned: Run) -> None:
    success = learned.series("eval/success_at_end")
    assert success[0] <= 0.2
    assert success[-1] >= 0.8
    first, last = learned.series("critic/score/mean")[0], learned.series("critic/score/mean")[-1]
    assert last > first + 3
    # This task's episodes end both ways, and each is one of the two.
    ended, cut = learned.series("env/terminated"), learned.series("env/truncated")
    assert ended[-1] > 0.8
    assert cut[0] > 0.5
    assert all(a + b == pytest.approx(1) for a, b in zip(ended, cut, strict=True))
    assert set(learned.series("env/episodes_dropped")) == {0.0}
    assert trace_problems(json.loads((learned.path / "timeline.json").read_text())) == []
    page = (learned.path / "report.html").read_text()
    assert page.count("data:image/webp;base64,") == 2
    assert "held-out success at end, after" in page


@pytest.mark.parametrize("plan", ["spatial", "hybrid"])
def test_a_plan_changes_the_time_and_nothing_else(train: Callable[..., Run], learned: Run, plan: str) -> None:
    other = train(f"plan={plan}", *SHORT)
    # The learner's number of cores, which the plan decides, may change how a sum is rounded.
    for metric in ("critic/score/mean", "actor/pg_loss", "env/steps"):
        assert other.series(metric) == pytest.approx(learned.series(metric)[:3], rel=1e-3, abs=1e-6)
    for name, values in weights(learned, 3).items():
        np.testing.assert_allclose(weights(other, 3)[name], values, atol=1e-5)


def test_one_lane_is_simulated_while_another_is_acted_for(
    train: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("plan=spatial", *SHORT, "num_lanes=4", "episodes_per_step=16")
    # At the end it says where the time of each device went.
    head, *rows = capsys.readouterr().out.partition("where the devices' time went in step 3:\n")[2].splitlines()
    assert head.split()[:3] == ["device", "seconds", "busy"]
    assert head.split()[-1] == "unattributed"
    table = {row.split()[0]: row.split()[1:] for row in takewhile(str.strip, rows)}
    assert list(table) == [*map(str, range(len(table) - 1)), "all"]
    for shares in table.values():
        assert sum(float(share.rstrip("%")) for share in shares[1:]) == pytest.approx(100, abs=0.5)
    steps, acts = run.busy("env.step"), run.busy("policy.act")
    beside = sum(min(a[1], b[1]) > max(a[0], b[0]) for a in steps for b in acts)
    assert beside > 0


def test_auto_measures_chooses_and_goes_on(train: Callable[..., Run]) -> None:
    run = train("plan=auto", "num_steps=6", "evaluation.num_episodes=4", "evaluation.film=false")
    assert len(run.series("critic/score/mean")) == 6
    assert (run.path / "plan.txt").read_text()
    assert len(run.series("plan/predicted_s")) >= 1


def test_a_resumed_run_equals_the_unbroken_one(train: Callable[..., Run], learned: Run) -> None:
    run = train("plan=temporal", *SHORT, "evaluation.film=false")
    assert main(["train", "--resume", str(run.path), "num_steps=6"]) == 0
    assert run.series("critic/score/mean") == learned.series("critic/score/mean")[:6]
    assert weights(run, 6) == weights(learned, 6)


def test_a_resumed_run_keeps_the_shape_of_its_policy(
    train: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("plan=temporal", "num_steps=1", "evaluation.num_episodes=1", "evaluation.film=false")
    before = (run.path / "config.yaml").read_text()
    assert main(["train", "--resume", str(run.path), "num_steps=2", "policy.hidden=[32]", "policy.log_std=-1.0"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "policy.hidden: got [32], want [64, 64], the run's own: a resumed run keeps its policy.hidden",
        "policy.log_std: got -1.0, want -0.5, the run's own: a resumed run keeps its policy.log_std",
    ]
    assert (run.path / "config.yaml").read_text() == before


def test_a_checkpoint_is_measured_by_itself(learned: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--checkpoint", str(learned.path), "launcher=inproc"]) == 0
    said = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(said["eval/success_at_end"]) == pytest.approx(learned.series("eval/success_at_end")[-1], abs=1e-3)
