"""What to log of a step: dictionaries of 0-d tensors, with no gradient, under the field's names. And pass@k.

Means are over the mask's positions of this call; nothing in the mask gives zeros.
"""

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos._ratio import hold, log_ratio, sequence_sum


@keywords
def policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> dict[str, Tensor]:
    """Return how far the policy has moved, and how often PPO's clip holds it.

    | name | what |
    |---|---|
    | actor/ppo_kl | mean of old_logprobs - logprobs (k1 of old against new) |
    | actor/ppo_k3 | mean of ratio - 1 - log ratio (k3 of the same: never negative) |
    | actor/pg_clipfrac | share of tokens whose clipped term is the loss: ratio over 1 + clip_high with A > 0, or under
    1 - clip_low with A < 0 |
    | actor/ratio_mean | mean ratio |

    Args:
        logprobs, old_logprobs, advantages: [B, T], floating.
        mask: [B, T], bool.
        clip_low: in [0, 1]. clip_high: 0 or more.

    Raises: DtypeError, ShapeError, SettingError.
    Example: ratios (1.5, 1), A (1, 1): ppo_kl -ln(1.5) / 2 = -0.20273, pg_clipfrac 0.5, ratio_mean 1.25.
    Source: verl's names; Schulman 2020, "Approximating KL divergence".
    """
    _check.within("policy", "clip_low", clip_low, 0.0, 1.0)
    _check.at_least("policy", "clip_high", clip_high, 0.0)
    new, old, adv = _check.tokens("policy", mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log = log_ratio(new, old).detach()
    ratio = log.exp()
    held = ((ratio > 1.0 + clip_high) & (adv > 0)) | ((ratio < 1.0 - clip_low) & (adv < 0))
    return {
        "actor/pg_clipfrac": _mean(held.to(ratio.dtype), mask),
        "actor/ppo_k3": _mean(log.expm1() - log, mask),
        "actor/ppo_kl": _mean(-log, mask),
        "actor/ratio_mean": _mean(ratio, mask),
    }


@keywords
def rollout_correction(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the size of the gap that `corrections` is for; w = exp(old_logprobs - rollout_logprobs) by token.

    | name | what |
    |---|---|
    | rollout_corr/abs_gap | mean of abs(old_logprobs - rollout_logprobs) |
    | rollout_corr/kl | mean of rollout_logprobs - old_logprobs (k1 of rollout against trainer) |
    | rollout_corr/k3_kl | mean of w - 1 - log w (k3 of the same) |
    | rollout_corr/ratio_min, _p01, _p50, _p99, _max | percentiles of w, interpolated |
    | rollout_corr/ess | effective sample size by token, as a share: mean(w)^2 / mean(w^2), 1 where all are equal |
    | rollout_corr/seq_ess | the same with a sequence's product of w, over rows with a True position |

    Args:
        old_logprobs, rollout_logprobs: [B, T], floating.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError.
    Example: w (2, 1): kl -0.34657, k3_kl (2 - 1 - 0.69315) / 2 = 0.15343, ess 1.5^2 / 2.5 = 0.9, p50 1.5.
    Source: verl's names; Kong 1992 for the effective sample size.
    """
    old, rollout = _check.tokens(
        "rollout_correction", mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs
    )
    gap = (old - rollout).detach()
    log = hold(gap)
    weights = log.exp()
    product = hold(sequence_sum(gap, mask)).exp()
    named = {
        "rollout_corr/abs_gap": _mean(gap.abs(), mask),
        "rollout_corr/ess": _effective(weights, mask),
        "rollout_corr/k3_kl": _mean(log.expm1() - log, mask),
        "rollout_corr/kl": _mean(-gap, mask),
        "rollout_corr/seq_ess": _effective(product, mask.any(1)),
    }
    shares = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}
    for name, x in zip(shares, _quantiles(weights, mask, list(shares.values())), strict=True):
        named[f"rollout_corr/ratio_{name}"] = x
    return named


@keywords
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return 1 - var(returns - values) / var(returns) over the mask, a 0-d tensor: 1 is a perfect critic.

    Args:
        values, returns: [B, T], floating.
        mask: [B, T], bool.

    Returns that do not vary, or nothing in the mask: 0. Raises: DtypeError, ShapeError.
    Example: returns (0, 2), values (0, 1): 1 - 0.25 / 1 = 0.75.
    Source: PPO's public code (openai/baselines, common/math_util).
    """
    values, returns = _check.tokens("explained_variance", mask, values=values, returns=returns)
    values, returns = values.detach(), returns.detach()
    left, whole = _variance(returns - values, mask), _variance(returns, mask)
    return torch.where(whole > 0, 1.0 - left / torch.where(whole > 0, whole, 1.0), torch.zeros_like(whole))


@keywords
def pass_at_k(num_correct: Tensor, num_samples: Tensor, *, k: int) -> Tensor:
    """Return [N] in float64: the chance that k of a problem's n samples, drawn without return, hold a correct one.

        1 - C(n - c, k) / C(n, k) = 1 - product over j < k of (n - c - j) / (n - j)

    Args:
        num_correct, num_samples: [N], integer, 0 <= c <= n; for n < k all n are drawn.
        k: 1 or more.

    Raises: DtypeError, ShapeError, SettingError. Example: c 1, n 4, k 2: 1 - (3/4)(2/3) = 0.5.
    Source: Chen et al. 2021 (Codex, arXiv 2107.03374), eq. 1.
    """
    _check.at_least("pass_at_k", "k", k, 1)
    _check.integer("pass_at_k", "num_correct", num_correct)
    _check.integer("pass_at_k", "num_samples", num_samples)
    c, n = _check.rows("pass_at_k", num_correct=num_correct, num_samples=num_samples)
    drawn = torch.arange(k, device=n.device)
    wrong = (n - c)[:, None] - drawn
    left = n[:, None] - drawn
    misses = torch.where(left > 0, wrong.clamp_min(0).double() / left.clamp_min(1), 1.0)
    return torch.where(c > 0, 1.0 - misses.prod(1), 0.0)


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `x` over the mask, 0 for an empty one."""
    return x.masked_fill(~mask, 0.0).sum() / mask.sum().clamp_min(1)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    """Return the variance (by n) of `x` over the mask."""
    return _mean((x - _mean(x, mask)).square(), mask)


def _effective(weights: Tensor, mask: Tensor) -> Tensor:
    """Return mean(w)^2 / mean(w^2) over the mask, 0 for an empty one; scaled first, so that squares are finite."""
    kept = weights.masked_fill(~mask, 0.0)
    if kept.numel() == 0:
        return kept.sum()
    top = kept.amax()
    kept = kept / torch.where(top > 0, top, 1.0)
    squares = kept.square().sum()
    return kept.sum().square() / (torch.where(squares > 0, squares, 1.0) * mask.sum().clamp_min(1))


def _quantiles(x: Tensor, mask: Tensor, shares: list[float]) -> list[Tensor]:
    """Return quantiles of `x` over the mask, interpolated between neighbours, with no shape that depends on data."""
    if x.numel() == 0:
        return [x.sum() for _ in shares]
    ordered = x.masked_fill(~mask, float("inf")).flatten().sort().values
    count = mask.sum()
    ordered = torch.where(count > 0, ordered, torch.zeros_like(ordered))
    last = (count - 1).clamp_min(0)
    places = torch.tensor(shares, dtype=torch.float64, device=x.device) * last
    low = places.long()
    high = torch.minimum(low + 1, last)
    return list(torch.lerp(ordered[low], ordered[high], (places - low).to(x.dtype)).unbind())
