"""One-digit sums for ten steps: the model learns, and the run directory holds what a person looks for afterwards."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.large, pytest.mark.timeout(420)]


def test_accuracy_on_held_out_problems_rises(temporal) -> None:
    greedy, sampled = temporal.series("eval/greedy_accuracy"), temporal.series("eval/sampled_accuracy")
    assert greedy[0] <= 0.5
    assert greedy[-1] >= 0.75
    assert sampled[-1] >= 0.6
    assert len(greedy) >= 3


def test_reward_rises(temporal) -> None:
    rewards = temporal.series("critic/score/mean")
    assert len(rewards) == 10
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_what_is_printed_says_so(temporal) -> None:
    assert "held-out greedy accuracy" in temporal.output
    assert "mean training reward of the last 5 steps" in temporal.output


def test_every_file_of_the_run_directory_is_there(temporal) -> None:
    for name in ("config.yaml", "metrics.jsonl", "plan.json", "timeline.json", "report.html"):
        assert (temporal.path / name).stat().st_size > 0, name
    assert list(temporal.path.rglob("events.out.tfevents.*"))
    assert len(temporal.samples(10)) == 64


def test_transformers_loads_the_checkpoint(temporal) -> None:
    (checkpoint,) = (temporal.path / "checkpoints").glob("step_*")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    sample = temporal.samples(10)[0]
    ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.isfinite(logits).all()
    assert logits.shape == (1, ids.shape[1], model.config.vocab_size)


def test_the_trained_checkpoint_differs_from_the_model(temporal) -> None:
    (checkpoint,) = (temporal.path / "checkpoints").glob("step_*")
    trained = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True).state_dict()
    source = Path(temporal.path / "config.yaml").read_text()
    assert "smollm2" in source
    from m2flow.apps.model import prepare_model

    base = AutoModelForCausalLM.from_pretrained(prepare_model("smollm2"), local_files_only=True).state_dict()
    moved = sum(float((trained[name] - base[name]).abs().sum()) for name in base)
    assert moved > 0
