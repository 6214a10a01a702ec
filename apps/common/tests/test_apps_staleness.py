"""Weights that change in the middle of a real engine's samples, and what the trainer makes of such samples."""

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from m2flow.apps.actor import ActorWorker
from m2flow.apps.grading import grade
from m2flow.apps.outcome import measure
from m2flow.apps.rollout import RolloutWorker
from m2flow.apps.testing.tiny import save_tiny_language_model
from m2flow.flow import Flow, Runtime, StageProxy, Stream, spatial_plan, trace
from m2flow.worker import Item, find_cluster, launch_run

pytestmark = [pytest.mark.medium, pytest.mark.timeout(60)]

PROMPTS, SAMPLES, TOKENS, STEPS = 4, 4, 60, 4
CAP = 1.05


class SlowRollout(RolloutWorker):
    """Takes 5 ms more for each token; keeps the weights that it was given, by version."""

    kept: dict[int, dict[str, Tensor]]

    def setup(self) -> None:
        """Slows the engine."""
        super().setup()
        decode = self._engine._decode

        def slow(*args: Any) -> Tensor:
            time.sleep(0.005)
            return decode(*args)

        self._engine._decode = slow  # type: ignore[method-assign]

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Keeps them."""
        super().load_weights(weights, version)
        KEPT[version] = {name: tensor.clone() for name, tensor in weights.items()}


KEPT: dict[int, dict[str, Tensor]] = {}


def odd(sample: Item) -> Item:
    """Its reward: how many of its tokens have odd numbers."""
    return sample.with_fields(reward=float((sample.fields["completion_ids"] % 2).sum()), answer="")


def program(flow: Flow, rollout: StageProxy, actor: StageProxy) -> Mapping[str, Stream]:
    graded = flow.map(grade, flow.gather(flow.map(odd, rollout.generate(flow.source("prompts"))), by="prompt"))
    metrics = actor.train(flow.ordered(graded, window=PROMPTS))
    flow.publish(actor, to=rollout)
    return {"metrics": metrics, "groups": graded}


def logprobs(model: Any, version: int, sample: Item) -> NDArray[np.float32]:
    """Of each token of a sample under weights that were published, by one plain forward pass."""
    model.load_state_dict(KEPT[version], strict=False)
    prompt, completion = sample.fields["prompt_ids"].tolist(), sample.fields["completion_ids"].tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).numpy()[np.arange(len(completion)), completion]


def test_weights_change_in_the_middle_of_a_sample_and_each_token_has_its_own(tmp_path: Path) -> None:
    save_tiny_language_model(tmp_path)
    KEPT.clear()
    sampling = {"model": str(tmp_path), "samples_per_prompt": SAMPLES, "max_new_tokens": TOKENS, "seed": 3}
    training = {"model": str(tmp_path), "groups_per_minibatch": PROMPTS, "lr": 3e-3}
    correction = {"correction": "tis", "max_weight": CAP}
    groups = {
        "rollout": SlowRollout.group(sampling, name="rollout", devices_per_rank=None),
        "actor": ActorWorker.group({**training, **correction}, name="actor", devices_per_rank=None),
    }
    graph = trace(program, groups, source_items=PROMPTS, expansions={"rollout.generate": float(SAMPLES)})
    cluster = find_cluster("inproc", 2)
    plan = spatial_plan(graph, cluster, num_chunks=1)
    plan.staleness = 1
    prompts = [{"prompt": f"{n}+1=", "chat": False} for n in range(PROMPTS)]
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        under_way, results = deque(), []
        for step in range(STEPS):
            under_way.append(runtime.submit(step, [Item((n,), step, fields) for n, fields in enumerate(prompts)]))
            if len(under_way) > plan.staleness:
                results.append(under_way.popleft().result())
        results += [pending.result() for pending in under_way]
    swapped = 0
    # How far the other version's logprobs are from those of the tokens before and after a change. A sample may have but
    # one token of either, on which both agree: all of them tell.
    apart = [0.0, 0.0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for result in results:
        receipts = [item for item in result.outputs if "versions" in item.fields]
        members = [member for item in result.outputs for member in item.members]
        assert len(members) == PROMPTS * SAMPLES
        weights = []
        for sample in members:
            versions, got = sample.fields["token_versions"], sample.fields["logprobs"]
            assert len(versions) == len(got)
            assert versions.tolist() == sorted(versions.tolist())
            assert set(versions.tolist()) <= {result.iteration - 1, result.iteration}
            under = {int(version): logprobs(model, version, sample) for version in {*versions, result.iteration}}
            want = np.array([under[int(version)][place] for place, version in enumerate(versions)])
            np.testing.assert_allclose(got, want, atol=2e-4)
            if len(under) == 2 and len(set(versions.tolist())) == 2:
                swapped += 1
                moved = np.array([under[result.iteration - 1], under[result.iteration]])
                own = versions - result.iteration + 1
                other = np.abs(got - moved[1 - own, np.arange(len(own))])
                for tokens in (0, 1):
                    apart[tokens] = max(apart[tokens], *other[own == tokens])
            weights += np.minimum(np.exp(under[result.iteration] - got), CAP).tolist()
        # A token of the weights that are trained weighs 1, one before the change what its own ratio is.
        metrics = measure(receipts).metrics
        assert metrics["rollout_corr/weight"] == pytest.approx(np.mean(weights), abs=1e-4)
        assert metrics["staleness/swapped"] == sum(len(set(m.fields["token_versions"].tolist())) == 2 for m in members)
    assert swapped >= SAMPLES
    assert min(apart) > 1e-2
