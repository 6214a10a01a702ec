"""What length adds to a reward: [N] in float32, to be added to the task's own reward."""

import math

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._groups import Groups
from m2flow.algos._keywords import keywords
from m2flow.algos.errors import SettingError


@keywords
def overlong(lengths: Tensor, *, max_length: int, buffer_length: int) -> Tensor:
    """Return the soft overlong punishment [N]: 0 up to max_length - buffer_length, then falling to -1 at max_length.

    Args:
        lengths: [N], integer, tokens; over max_length: -1.
        max_length: tokens, buffer_length or more.
        buffer_length: tokens, 1 or more.

    Raises: DtypeError, ShapeError, SettingError. Example: lengths (6, 9, 20), max_length 10, buffer_length 4: (0,
    -0.75, -1).
    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 13.
    """
    _check.at_least("overlong", "buffer_length", buffer_length, 1)
    _check.at_least("overlong", "max_length", max_length, buffer_length)
    left = max_length - buffer_length - _lengths("overlong", lengths)
    return (left / buffer_length).clamp(-1.0, 0.0).float()


@keywords
def group_length(lengths: Tensor, correct: Tensor, group_ids: Tensor) -> Tensor:
    """Return Kimi k1.5's length reward [N]: from 0.5 for the group's shortest answer to -0.5 for its longest.

    With x = 0.5 - (length - shortest) / (longest - shortest): x where correct, else min(x, 0), so a wrong answer is
    never paid for being short.

    Args:
        lengths: [N], integer, tokens.
        correct: [N], bool.
        group_ids: [N], integer.

    A group of equal lengths: 0. Raises: DtypeError, ShapeError.
    Example: lengths (10, 20, 30), correct (1, 1, 0) in one group: (0.5, 0, -0.5).
    Source: Kimi team 2025 (arXiv 2501.12599), section 2.3.3.
    """
    _check.boolean("group_length", "correct", correct)
    _check.integer("group_length", "group_ids", group_ids)
    sizes, correct, group_ids = _check.rows(
        "group_length", lengths=_lengths("group_length", lengths), correct=correct, group_ids=group_ids
    )
    groups = Groups(group_ids)
    low, high = groups.low(sizes), groups.high(sizes)
    x = torch.where(high > low, 0.5 - (sizes - low) / (high - low).clamp_min(1.0), 0.0)
    return torch.where(correct, x, x.clamp_max(0.0)).float()


@keywords
def cosine(
    lengths: Tensor,
    correct: Tensor,
    *,
    max_length: int,
    correct_range: tuple[float, float] = (2.0, 1.0),
    wrong_range: tuple[float, float] = (-10.0, 0.0),
    exceeded: float = -10.0,
) -> Tensor:
    """Return the cosine length reward [N], in the place of the task's: it moves along half a cosine with length.

        end + (start - end) * (1 + cos(pi * length / max_length)) / 2, and `exceeded` at max_length or beyond

    Args:
        lengths: [N], integer, tokens.
        correct: [N], bool.
        max_length: tokens, 1 or more.
        correct_range, wrong_range: the reward at length 0 and at max_length: a short correct answer is best, a short
            wrong one worst.
        exceeded: the reward of an answer that ran to max_length.

    Raises: DtypeError, ShapeError, SettingError.
    Example: lengths (0, 5, 5, 10), correct (1, 1, 0, 1), max_length 10: (2, 1.5, -5, -10).
    Source: Yeo et al. 2025 (arXiv 2502.03373), section 4.2.
    """
    _check.at_least("cosine", "max_length", max_length, 1)
    _check.boolean("cosine", "correct", correct)
    if not all(math.isfinite(x) for x in (*correct_range, *wrong_range, exceeded)):
        raise SettingError(f"cosine: got {correct_range}, {wrong_range}, {exceeded}, want finite rewards: change them")
    sizes, correct = _check.rows("cosine", lengths=_lengths("cosine", lengths), correct=correct)
    share = (1.0 + torch.cos(sizes * math.pi / max_length)) / 2.0
    right = correct_range[1] + (correct_range[0] - correct_range[1]) * share
    wrong = wrong_range[1] + (wrong_range[0] - wrong_range[1]) * share
    return torch.where(sizes >= max_length, exceeded, torch.where(correct, right, wrong)).float()


def _lengths(function: str, lengths: Tensor) -> Tensor:
    """Return the lengths, checked to be integer [N], in float64: a narrow integer would wrap round."""
    return _check.rank(function, "lengths", _check.integer(function, "lengths", lengths), "[N]").double()
