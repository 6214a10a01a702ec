"""Weights [B, T], without gradient, for the gap between the policy that sampled and the one that is trained.

The engine that samples and the trainer that differentiates run one set of weights through different kernels, and their
probabilities differ; a stale sample comes from older weights besides. Outside the mask every weight is 0. With

    w = exp(old_logprobs - rollout_logprobs)

(old_logprobs: recomputed by the trainer as the step starts; rollout_logprobs: reported by the engine) multiply a loss
from `losses` by one of these before it is aggregated. The level says what w is:

| level | w of token t |
|---|---|
| token | its own ratio |
| sequence | the product over its row's mask: unbiased, and of large variance |
| geometric | the geometric mean over its row's mask |

Logarithms are held to [-20, 20]. A rejected token has weight 0 and still counts in the mean: to take it out, pass
`mask & (weights > 0)` on. Measure the gap with `metrics.rollout_correction`.
"""

from typing import Literal

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos._ratio import hold, sequence_mean, sequence_sum
from m2flow.algos.errors import SettingError

Level = Literal["token", "sequence", "geometric"]


@keywords
def tis(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, level: Level = "token", max_weight: float = 2.0
) -> Tensor:
    """Return min(w, max_weight) [B, T]: truncated importance sampling.

    Args:
        old_logprobs, rollout_logprobs: [B, T], floating.
        mask: [B, T], bool.
        level: what w is; see above.
        max_weight: over 0.

    Raises: DtypeError, ShapeError, SettingError.
    Example: token ratios (3, 0.5), max_weight 2: token (2, 0.5), sequence (1.5, 1.5), geometric (1.22474, 1.22474).
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Ionides 2008.
    """
    _check.above("tis", "max_weight", max_weight, 0.0)
    weights = _weights("tis", old_logprobs, rollout_logprobs, mask, level)
    return weights.clamp_max(max_weight).masked_fill(~mask, 0.0)


@keywords
def mis(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level = "sequence",
    min_weight: float = 0.0,
    max_weight: float = 2.0,
) -> Tensor:
    """Return w where min_weight <= w <= max_weight, else 0 [B, T]: masked importance sampling.

    Args:
        old_logprobs, rollout_logprobs: [B, T], floating.
        mask: [B, T], bool.
        level: what w is; see above.
        min_weight: 0 or more. max_weight: min_weight or more.

    Raises: DtypeError, ShapeError, SettingError.
    Example: token ratios (3, 0.5), max_weight 2: token (0, 0.5), sequence (1.5, 1.5).
    Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference
    mismatch".
    """
    return _within("mis", old_logprobs, rollout_logprobs, mask, level, min_weight, max_weight)


@keywords
def icepop(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, min_weight: float = 0.5, max_weight: float = 5.0
) -> Tensor:
    """Return the token's w where min_weight <= w <= max_weight, else 0 [B, T]: `mis` by token, cut on both sides.

    Args:
        old_logprobs, rollout_logprobs: [B, T], floating.
        mask: [B, T], bool.
        min_weight: 0 or more. max_weight: min_weight or more.

    Raises: DtypeError, ShapeError, SettingError. Example: token ratios (6, 0.6, 0.4): (0, 0.6, 0).
    Source: Ling team 2025 (Ring-1T, arXiv 2510.18855).
    """
    return _within("icepop", old_logprobs, rollout_logprobs, mask, "token", min_weight, max_weight)


@keywords
def staleness_decay(versions: Tensor, mask: Tensor, *, policy_version: int, decay: float) -> Tensor:
    """Return decay ** (policy_version - versions) [B, T] in float32, 0 outside the mask: older tokens weigh less.

    Args:
        versions: [B, T], integer: the version of the weights that sampled each token (a row resumed after an update has
            two).
        mask: [B, T], bool.
        policy_version: the version that the step starts from; a token of a later one weighs 1.
        decay: in [0, 1]; 1 changes nothing, 0 keeps only what is not stale.

    Raises: DtypeError, ShapeError, SettingError. Example: versions (5, 3), policy_version 5, decay 0.5: (1, 0.25).
    Source: the exponential forgetting of old samples, as in Sutton and Barto, section 2.5; no paper's own.
    """
    _check.within("staleness_decay", "decay", decay, 0.0, 1.0)
    _check.token_mask("staleness_decay", mask)
    _check.integer("staleness_decay", "versions", versions)
    _check.same_shape("staleness_decay", "versions", versions, "mask", mask)
    age = (policy_version - versions.long()).clamp_min(0).masked_fill(~mask, 0)
    return torch.pow(decay, age.float()).masked_fill(~mask, 0.0)


def _within(
    function: str,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    level: Level,
    min_weight: float,
    max_weight: float,
) -> Tensor:
    """Return w where it lies in [min_weight, max_weight], else 0 [B, T]."""
    _check.at_least(function, "min_weight", min_weight, 0.0)
    _check.at_least(function, "max_weight", max_weight, min_weight)
    weights = _weights(function, old_logprobs, rollout_logprobs, mask, level)
    kept = (weights >= min_weight) & (weights <= max_weight) & mask
    return torch.where(kept, weights, torch.zeros_like(weights))


def _weights(function: str, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return w [B, T] at the level, with no gradient."""
    old, rollout = _check.tokens(function, mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    gap = (old - rollout).detach()
    if level == "token":
        return hold(gap).exp()
    if level == "sequence":
        return hold(sequence_sum(gap, mask)).exp()[:, None].expand_as(gap)
    if level == "geometric":
        return hold(sequence_mean(gap, mask)).exp()[:, None].expand_as(gap)
    raise SettingError(f"{function}: level is {level!r}, want token, sequence or geometric: change level")
