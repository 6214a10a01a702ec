"""Runs of the real recipe on the real model, each made once for all tests that look at it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TRAIN = [sys.executable, "-m", "m2flow.reasoning", "train", "one_digit", 'run.profiles=""']


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    path: Path
    output: str

    @property
    def rows(self) -> list[dict[str, float]]:
        """metrics.jsonl: one row a step, and one an evaluation."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def series(self, metric: str) -> list[float]:
        """The values of one metric, by step."""
        return [row[metric] for row in self.rows if metric in row]

    @property
    def plan(self) -> dict[str, object]:
        return json.loads((self.path / "plan.json").read_text())

    @property
    def spans(self) -> list[dict[str, object]]:
        """The complete events of timeline.json."""
        events = json.loads((self.path / "timeline.json").read_text())["traceEvents"]
        return [event for event in events if event["ph"] == "X"]

    def samples(self, step: int) -> list[dict[str, object]]:
        """The rollouts of a step, in source order."""
        lines = (self.path / "samples" / f"step_{step:05d}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@dataclass
class Started:
    """A run that goes on in another process."""

    process: subprocess.Popen[str]
    path: Path


Train = Callable[..., Run]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains to the end with these overrides; a failure is the test's."""

    def run(*overrides: str) -> Run:
        path = tmp_path_factory.mktemp("run") / "run"
        command = [*TRAIN, f"run.dir={path}", "run.samples=64", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return Run(path, done.stdout)

    return run


@pytest.fixture(scope="session")
def temporal(train: Train) -> Run:
    return train("plan=temporal")


@pytest.fixture(scope="session")
def spatial(train: Train) -> Run:
    return train("plan=spatial", "num_steps=3", "evaluation.every=3", "evaluation.num_problems=20")


@pytest.fixture(scope="session")
def auto(train: Train) -> Run:
    return train("plan=auto", "num_steps=7", "evaluation.every=7", "evaluation.num_problems=20")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts a run in its own process group; what is left of it is killed when the test ends."""
    started: list[Started] = []

    def run(*overrides: str) -> Started:
        path = tmp_path / "run"
        small = ("prompts_per_step=2", "minibatch_size=16", "evaluation.num_problems=4")
        command = [*TRAIN, f"run.dir={path}", "num_steps=200", *small, *overrides]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        started.append(Started(process, path))
        return started[-1]

    yield run
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, 9)
        one.process.communicate()
