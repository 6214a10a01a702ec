"""Whole runs on a model of two layers: a run that was killed goes on as if it had not been."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from m2flow.agentic.cli import main

pytestmark = [pytest.mark.medium, pytest.mark.timeout(120)]

# An untrained model never succeeds by itself: it learns from worked conversations all the way.
WORDS = ["calculator", "plan=temporal", "num_steps=4", "checkpoint.every=1", "supervised.until=1.0"]
SMALL = ["prompts_per_step=2", "samples_per_prompt=2", "minibatch_size=4", "evaluation.num_problems=2"]


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["supervised/nll"] for row in rows if "supervised/nll" in row]


def test_a_killed_run_that_is_resumed_equals_the_unbroken_one(model: Path, tmp_path: Path) -> None:
    words = [*WORDS, *SMALL, f"model.source={model}", "optimiser.lr=1e-3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["train", *words, f"run.dir={whole}"]) == 0
    command = [sys.executable, "-m", "m2flow.agentic", "train", *words, f"run.dir={killed}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 60
        while not any((killed / "checkpoints" / f"step_{step}").exists() for step in (2, 3)):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.kill()
    assert len(losses(killed)) < 4
    assert main(["train", "--resume", str(killed)]) == 0
    assert losses(killed) == losses(whole)
    left, right = (load_file(path / "checkpoints" / "step_4" / "model.safetensors") for path in (killed, whole))
    assert all(left[name].equal(tensor) for name, tensor in right.items())
    assert losses(whole)[-1] < losses(whole)[0]
