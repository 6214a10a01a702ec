"""Importance ratios, kept finite."""

from torch import Tensor

# exp(20) is 5e8: beyond any ratio that a loss could use, and far from overflow in float32.
_LIMIT = 20.0


def hold(x: Tensor) -> Tensor:
    """Return the logarithm of a ratio held to [-20, 20]."""
    return x.clamp(-_LIMIT, _LIMIT)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return logprobs - old_logprobs, held to [-20, 20]."""
    return hold(logprobs - old_logprobs)


def sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum [B] of `x` [B, T] over each row's mask."""
    return x.masked_fill(~mask, 0.0).sum(1)


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean [B] of `x` [B, T] over each row's mask; 0 for an empty row."""
    return sequence_sum(x, mask) / mask.sum(1).clamp_min(1)
