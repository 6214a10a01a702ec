"""Masks [B, T]: which positions are the policy's own, and how a number a row becomes a number a token."""

import torch
from torch import Tensor

from m2flow.algos import _check


def from_lengths(lengths: Tensor, *, num_tokens: int) -> Tensor:
    """Return the bool mask [B, T] whose row b is True at the first lengths[b] positions.

    Args:
        lengths: [B], integer. A row of length 0 is all False; a response longer than T is cut, so its row is all True.
        num_tokens: T.

    Raises: DtypeError, ShapeError, SettingError (num_tokens < 0). Example: lengths [0, 2, 9], T 3 gives 000, 110, 111.
    """
    _check.rank("from_lengths", "lengths", _check.integer("from_lengths", "lengths", lengths), "[B]")
    _check.at_least("from_lengths", "num_tokens", num_tokens, 0)
    return torch.arange(num_tokens, device=lengths.device) < lengths[:, None]


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T]: x[b] at every position of row b where the mask is True, 0 elsewhere.

    Args:
        x: [B], floating: a number a row, such as an advantage.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: x [2.0], mask 101 gives [2, 0, 2].
    """
    _check.token_mask("spread", mask)
    x = _check.floating("spread", "x", _check.rank("spread", "x", x, "[B]"))
    _check.same_shape("spread", "x", x, "the rows of mask", mask[:, 0] if mask.shape[1] else mask.any(1))
    return torch.where(mask, x[:, None], torch.zeros_like(x[:, None]))


def place_last(x: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T]: x[b] at the last True position of row b, 0 elsewhere: a reward for the whole as rewards by token.

    A row without a True position gets nothing: its number is dropped.

    Args:
        x: [B], floating.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: x [2.0], mask 1010 gives [0, 0, 2, 0].
    """
    later = mask.long().flip(1).cumsum(1).flip(1)
    return spread(x, mask & (later == 1))
