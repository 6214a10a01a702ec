"""PPO's clipped loss of graded groups, as the sums that a trainer engine accumulates.

The policy before the step is one of three, in this order: `old_logprobs` of the items, where a stage computed them; the
forward pass's own logprobs, where the iteration has one optimiser step, so that the sampler's weights are the ones
that are trained and the ratio is 1; else the sampler's logprobs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m2flow.algos import aggregation, corrections, losses, metrics
from m2flow.apps.graded import GradedSample, PolicyLossConfig
from m2flow.worker.engines.trainer import LossFn, LossInputs, Metrics, Sample

__all__ = ["PolicyLoss"]


class PolicyLoss:
    """What a minibatch is averaged over, and the loss of a part of it."""

    def __init__(self, config: PolicyLossConfig, *, on_policy: bool) -> None:
        """`on_policy`: whether an iteration has one optimiser step."""
        self._config = config
        self._on_policy = on_policy

    def weight(self, sample: Sample) -> float:
        """What a sample adds to the number that its minibatch's sums are divided by."""
        if self._config.aggregation == "sequence_mean":
            return 1.0
        mask = sample.loss_mask
        return float(len(sample.completion_ids) if mask is None else mask.sum())

    def bind(self, samples: Sequence[GradedSample]) -> LossFn:
        """Returns the loss of microbatches of `samples`; its metrics are sums over tokens, but for the loss itself."""

        def loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
            chosen = [samples[number] for number in inputs.samples]
            rollout = _padded([sample.rollout_logprobs for sample in chosen], inputs.logprobs)
            old = self._old(chosen, inputs.logprobs, rollout)
            given = torch.tensor([sample.advantage for sample in chosen], device=inputs.logprobs.device)
            advantages = given[:, None].expand_as(inputs.logprobs)
            clips = {"clip_low": self._config.clip_low, "clip_high": self._config.clip_high}
            per_token = losses.ppo_clip(inputs.logprobs, old, advantages, inputs.mask, **clips)
            weights = self._weights(old, rollout, inputs.mask)
            total = self._sum(per_token if weights is None else per_token * weights, inputs.mask)
            num_tokens = float(inputs.mask.sum())
            means = metrics.policy(inputs.logprobs.detach(), old, advantages, inputs.mask, **clips)
            gap = metrics.rollout_correction(inputs.logprobs.detach(), rollout, inputs.mask)
            means |= {name: gap[name] for name in ("rollout_corr/abs_gap", "rollout_corr/kl", "rollout_corr/k3_kl")}
            sums = {name: float(value) * num_tokens for name, value in means.items()}
            if weights is not None:
                sums["rollout_corr/weight"] = float(weights.sum())
                cut = (weights == 0) | (weights >= self._config.max_weight)
                sums["rollout_corr/cut"] = float((cut & inputs.mask).sum())
            sums["actor/entropy"] = float((inputs.entropy * inputs.mask).sum())
            return total, {"actor/pg_loss": float(total.detach()), "tokens": num_tokens, **sums}

        return loss

    def _old(self, samples: Sequence[GradedSample], logprobs: Tensor, rollout: Tensor) -> Tensor:
        kept = [sample.old_logprobs for sample in samples]
        given = [values for values in kept if values is not None]
        if len(given) == len(kept):
            return _padded(given, logprobs)
        return logprobs.detach() if self._on_policy else rollout

    def _weights(self, old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor | None:
        """What each token weighs because another policy sampled it; None where that is not corrected."""
        limit = self._config.max_weight
        match self._config.correction:
            case "tis":
                return corrections.tis(old, rollout, mask, max_weight=limit)
            case "mis":
                return corrections.mis(old, rollout, mask, max_weight=limit)
            case "icepop":
                return corrections.icepop(old, rollout, mask, max_weight=limit)
        return None

    def _sum(self, per_token: Tensor, mask: Tensor) -> Tensor:
        if self._config.aggregation == "sequence_mean":
            return aggregation.sequence_mean_token_mean(per_token, mask, num_sequences=1.0)
        return aggregation.token_mean(per_token, mask, num_tokens=1.0)


def _padded(rows: Sequence[NDArray[np.float32]], like: Tensor) -> Tensor:
    """Rows of different lengths as one tensor of the shape and device of `like`, 0 where they end."""
    padded = np.zeros(like.shape, dtype=np.float32)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return torch.from_numpy(padded).to(like.device)
