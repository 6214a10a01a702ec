"""Value losses, one number a step: [B, T], to be minimised, 0 outside the mask; `aggregation` makes the scalar.

With the error e = values - returns, each is a half of a square, or Huber's form of it, so that the gradient is e.
A gradient flows to `values` alone.
"""

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords


@keywords
def mse(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return e^2 / 2 [B, T], 0 outside the mask.

    Args:
        values, returns: [B, T], floating.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: values 3, returns 1: 2.
    Source: Sutton and Barto, section 9.3.
    """
    values, returns = _check.tokens("mse", mask, values=values, returns=returns)
    return _huber(values - returns.detach(), float("inf"))


@keywords
def huber(values: Tensor, returns: Tensor, mask: Tensor, *, delta: float) -> Tensor:
    """Return e^2 / 2 where abs(e) is under delta, else delta * (abs(e) - delta / 2) [B, T], 0 outside the mask.

    Args:
        values, returns: [B, T], floating.
        mask: [B, T], bool.
        delta: over 0; infinity gives `mse`.

    Raises: DtypeError, ShapeError, SettingError. Example: values 3, returns 1, delta 1: 1 * (2 - 0.5) = 1.5.
    Source: Huber 1964.
    """
    _check.above("huber", "delta", delta, 0.0)
    values, returns = _check.tokens("huber", mask, values=values, returns=returns)
    return _huber(values - returns.detach(), delta)


@keywords
def clipped(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    delta: float = float("inf"),
) -> Tensor:
    """Return the larger of the losses of values, and of values held to old_values +- clip [B, T], 0 outside the mask.

    A value that has moved by more than the clip towards its return gets no gradient.

    Args:
        values, old_values, returns: [B, T], floating; old_values are those that the advantages were made with.
        mask: [B, T], bool.
        clip: 0 or more.
        delta: as in `huber`.

    Raises: DtypeError, ShapeError, SettingError.
    Example: values 1, old_values 0, returns 1, clip 0.2: max(0, 0.8^2 / 2) = 0.32.
    Source: Schulman et al., PPO's public code (openai/baselines, ppo2); Andrychowicz et al. 2020
    (arXiv 2006.05990).
    """
    _check.at_least("clipped", "clip", clip, 0.0)
    _check.above("clipped", "delta", delta, 0.0)
    values, old, returns = _check.tokens("clipped", mask, values=values, old_values=old_values, returns=returns)
    old, returns = old.detach(), returns.detach()
    held = old + (values - old).clamp(-clip, clip)
    return torch.maximum(_huber(values - returns, delta), _huber(held - returns, delta))


def _huber(error: Tensor, delta: float) -> Tensor:
    """Return Huber's loss of the error; delta may be infinite."""
    if delta == float("inf"):
        return 0.5 * error.square()
    size = error.abs()
    near = size.clamp_max(delta)
    return near * (size - 0.5 * near)
