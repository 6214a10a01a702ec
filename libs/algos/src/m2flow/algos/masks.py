"""Masks [B, T]: which positions are the policy's own, and how a number a row becomes a number a token."""

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords


@keywords
def from_lengths(lengths: Tensor, *, num_tokens: int) -> Tensor:
    """Return the bool mask [B, T] whose row b is True at the first lengths[b] positions.

    Args:
        lengths: [B], integer. A row of length 0 is all False; a response longer than T is cut, so its row is all True.
        num_tokens: T.

    Raises: DtypeError, ShapeError, SettingError (num_tokens < 0). Example: lengths [0, 2, 9], T 3 gives 000, 110, 111.
    Source: none; it is this package's convention.
    """
    _check.rank("from_lengths", "lengths", _check.integer("from_lengths", "lengths", lengths), "[B]")
    _check.at_least("from_lengths", "num_tokens", num_tokens, 0)
    return torch.arange(num_tokens, device=lengths.device) < lengths[:, None]


@keywords
def spread(x: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T]: x[b] at every position of row b where the mask is True, 0 elsewhere.

    Args:
        x: [B], floating: a number a row, such as an advantage.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: x [2.0], mask 101 gives [2, 0, 2]. Source: as `from_lengths`.
    """
    return _spread("spread", x, _check.token_mask("spread", mask))


@keywords
def place_last(x: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T]: x[b] at the last True position of row b, 0 elsewhere: a reward for the whole as rewards by token.

    A row without a True position gets nothing: its number is dropped.

    Args:
        x: [B], floating.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: x [2.0], mask 1010 gives [0, 0, 2, 0]. Source: as `from_lengths`.
    """
    later = _check.token_mask("place_last", mask).long().flip(1).cumsum(1).flip(1)
    return _spread("place_last", x, mask & (later == 1))


def _spread(function: str, x: Tensor, mask: Tensor) -> Tensor:
    """Return x[b] [B, T] at every True position of row b, 0 elsewhere."""
    x = _check.floating(function, "x", _check.rank(function, "x", x, "[B]"))
    _check.same_shape(function, "x", x, "the rows of mask", mask.shape[:1])
    return torch.where(mask, x[:, None], torch.zeros_like(x[:, None]))
