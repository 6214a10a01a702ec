"""What a policy loss is given: its settings, and the members of graded groups."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from m2flow.worker import Item
from m2flow.worker.engines.trainer import Sample

__all__ = ["Aggregation", "Correction", "GradedSample", "PolicyLossConfig", "graded_samples", "own_versions"]

Aggregation = Literal["token_mean", "sequence_mean"]
Correction = Literal["none", "tis", "mis", "icepop"]


@dataclass(frozen=True)
class PolicyLossConfig:
    """Attributes:
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    aggregation: "token_mean": each token of the minibatch weighs the same (DAPO); "sequence_mean": each sample does,
      by the mean over its tokens (GRPO).
    correction: weighs each token by how likely the policy before the step was to sample it, against the one that did,
      which is another where weights changed in the middle of a sample:
      "tis" cuts that ratio at `max_weight`, "mis" drops sequences and "icepop" tokens beyond it (`m2flow.algos`).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token_mean"
    correction: Correction = "none"
    max_weight: float = 2.0


@dataclass(frozen=True)
class GradedSample:
    """A member of a graded group, as the loss needs it; logprobs are float32 [T].

    `staleness` is how many updates the weights of its oldest token were behind those that its step begins to train.
    """

    sample: Sample
    advantage: float
    rollout_logprobs: NDArray[np.float32]
    old_logprobs: NDArray[np.float32] | None
    staleness: int


def graded_samples(group: Item) -> list[GradedSample]:
    """Returns the members of a graded group, in their order."""
    return [
        GradedSample(
            Sample(m.fields["prompt_ids"], m.fields["completion_ids"], m.fields.get("loss_mask")),
            float(advantage),
            m.fields["logprobs"],
            m.fields.get("old_logprobs"),
            group.iteration - int(own_versions(m).min()),
        )
        for m, advantage in zip(group.members, group.fields["advantages"], strict=True)
    ]


def own_versions(sample: Item) -> NDArray[np.int32]:
    """Returns the policy version of each token that the policy drew, int32."""
    versions: NDArray[np.int32] = sample.fields["token_versions"]
    mask = sample.fields.get("loss_mask")
    return versions if mask is None else versions[mask]
