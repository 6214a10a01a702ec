"""The simulator itself: FetchReach is checked, trained and filmed; in full, learned from three seeds."""

import json
import os
import resource
import time
from pathlib import Path

import pytest

from m2flow.embodied.cli import main

PROOFS = os.environ.get("M2FLOW_PROOFS") == "1"
SHORT = ["num_steps=2", "evaluation.num_episodes=2", "evaluation.pixels=32"]


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.medium
def test_two_steps_of_the_simulator_are_checked_trained_and_filmed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["reach", f"run.dir={run}", "plan=temporal", *SHORT]
    assert main(["check", *words]) == 0
    assert main(["train", *words]) == 0
    assert [row["env/steps"] for row in rows(run) if "env/steps" in row] == [400, 400]
    assert [row["env/truncated"] for row in rows(run) if "env/truncated" in row] == [1, 1]
    assert sorted(film.stem for film in (run / "films").iterdir()) == ["step_00000", "step_00002"]
    assert "data:image/webp;base64," in (run / "report.html").read_text()


if PROOFS:  # a quarter of a minute a seed

    @pytest.mark.medium
    @pytest.mark.parametrize("seed", range(3))
    def test_reach_is_learned_from_every_seed(tmp_path: Path, seed: int) -> None:
        run = tmp_path / "run"
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        assert main(["train", "reach", f"run.dir={run}", "plan=temporal", f"seed={seed}"]) == 0
        wall_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        success = [row["eval/success_at_end"] for row in rows(run) if "eval/success_at_end" in row]
        cpu_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        print(f"seed {seed}: success {success}, {wall_s:.1f} s, {cpu_s:.1f} CPU seconds of the workers")
        assert success[0] < 0.1
        assert success[-1] >= 0.95
