"""KL(policy || reference): estimates from sampled tokens, and the exact sum over the vocabulary.

Every function takes the policy first and the reference second; the samples are the policy's. With
d = logprobs - ref_logprobs, held to [-20, 20]:

| name | value | value's mean is KL | gradient's mean is KL's (as a loss) |
|---|---|---|---|
| k1 | d | yes | no: its mean is 0 |
| k2 | d^2 / 2 | no, biased | yes |
| k3 | exp(-d) - 1 + d | yes, and never negative | no: it is that of KL(reference || policy) |
| absolute | abs(d) | no | no |
| full | sum over V | exact | exact |

So k2 or `full` where it is added to the loss, k1 or k3 where `in_reward` takes it from the reward.
"""

from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos._ratio import log_ratio
from m2flow.algos._vocab import full_kl_op


@keywords
def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return d [B, T], 0 outside the mask.

    Args:
        logprobs, ref_logprobs: [B, T], floating: of the same tokens.
        mask: [B, T], bool.

    Differentiable in both. Raises: DtypeError, ShapeError. Example: logprobs -1, ref -1.5: 0.5.
    Source: Schulman 2020, "Approximating KL divergence".
    """
    return _log_ratio("k1", logprobs, ref_logprobs, mask)


@keywords
def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return d^2 / 2 [B, T], 0 outside the mask.

    Args: as `k1`. Raises: as `k1`. Example: logprobs -1, ref -1.5: 0.125. Source: Schulman 2020.
    """
    return 0.5 * _log_ratio("k2", logprobs, ref_logprobs, mask).square()


@keywords
def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d [B, T], 0 outside the mask: the low-variance form.

    Args: as `k1`. Raises: as `k1`. Example: logprobs -1, ref -1.5: exp(-0.5) - 1 + 0.5 = 0.10653. Source: Schulman
    2020.
    """
    d = _log_ratio("k3", logprobs, ref_logprobs, mask)
    return (-d).expm1() + d


@keywords
def absolute(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return abs(d) [B, T], 0 outside the mask.

    Args: as `k1`. Raises: as `k1`. Example: logprobs -1.5, ref -1: 0.5. Source: verl and TRL name it "abs".
    """
    return _log_ratio("absolute", logprobs, ref_logprobs, mask).abs()


@keywords
def full(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
    """Return sum over v of p(v) (log p(v) - log q(v)) [B, T], 0 outside the mask.

    Args:
        logits, ref_logits: [B, T, V], floating: p and q before the softmax.
        mask: [B, T], bool.

    Works in pieces, forward and backward: [B, T, V] is never held in float32. Where p(v) is 0, v adds 0.
    Differentiable once, in both. Raises: DtypeError, ShapeError.
    Example: p uniform over 2, q = (0.8, 0.2): 0.5 ln 0.625 + 0.5 ln 2.5 = 0.22314.
    Source: Kullback and Leibler 1951.
    """
    _check.logits("full", mask, logits=logits, ref_logits=ref_logits)
    divergence: Tensor = full_kl_op(logits, ref_logits, mask)[0]
    return divergence


@keywords
def in_reward(rewards: Tensor, divergence: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """Return rewards - coef * divergence [B, T], 0 outside the mask, with no gradient: KL as a part of the reward.

    Args:
        rewards: [B, T], floating.
        divergence: [B, T], floating: from a function above.
        mask: [B, T], bool.
        coef: 0 or more.

    Raises: DtypeError, ShapeError, SettingError. Example: reward 1, divergence 0.5, coef 0.1: 0.95.
    Source: Ziegler et al. 2019 (arXiv 1909.08593).
    """
    _check.at_least("in_reward", "coef", coef, 0.0)
    rewards, divergence = _check.tokens("in_reward", mask, rewards=rewards, divergence=divergence)
    return (rewards - coef * divergence).detach()


def _log_ratio(function: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return d [B, T], 0 outside the mask."""
    new, ref = _check.tokens(function, mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return log_ratio(new, ref)
