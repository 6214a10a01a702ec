"""Which samples to train on: bool masks, [N] over samples or [B, T] over tokens."""

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._groups import Groups
from m2flow.algos._keywords import keywords


@keywords
def zero_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return bool [N], True where all rewards of the row's group are equal: it has advantage 0 and teaches nothing.

    Args:
        rewards: [N], floating.
        group_ids: [N], integer.

    A group of one is True. Equal means equal to the bit. Raises: DtypeError, ShapeError.
    Example: rewards (1, 1, 1, 0), groups (0, 0, 1, 1): (True, True, False, False).
    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2.
    """
    _check.floating("zero_variance", "rewards", rewards)
    _check.integer("zero_variance", "group_ids", group_ids)
    rewards, group_ids = _check.rows("zero_variance", rewards=rewards, group_ids=group_ids)
    return Groups(group_ids).constant(rewards)


@keywords
def dynamic_sampling(correct: Tensor, group_ids: Tensor) -> Tensor:
    """Return bool [N], True where the row's group has a correct and a wrong answer: keep these, draw more for others.

    It asks for correctness, not for rewards: a group that is all correct stays solved however its lengths are rewarded.

    Args:
        correct: [N], bool.
        group_ids: [N], integer.

    Raises: DtypeError, ShapeError.
    Example: correct (1, 1, 1, 0), groups (0, 0, 1, 1): (False, False, True, True).
    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2.
    """
    _check.boolean("dynamic_sampling", "correct", correct)
    _check.integer("dynamic_sampling", "group_ids", group_ids)
    correct, group_ids = _check.rows("dynamic_sampling", correct=correct, group_ids=group_ids)
    return ~Groups(group_ids).constant(correct.double())


@keywords
def best_of_n(rewards: Tensor, group_ids: Tensor, *, num_best: int = 1) -> Tensor:
    """Return bool [N], True at the num_best rows of the highest reward in each group; ties go to the earlier row.

    Args:
        rewards: [N], floating.
        group_ids: [N], integer.
        num_best: 1 or more; a smaller group is kept whole.

    Raises: DtypeError, ShapeError, SettingError.
    Example: rewards (1, 2, 2, 0), groups (0, 0, 0, 1): (False, True, False, True).
    Source: Dong et al. 2023 (RAFT, arXiv 2304.06767).
    """
    _check.at_least("best_of_n", "num_best", num_best, 1)
    _check.floating("best_of_n", "rewards", rewards)
    _check.integer("best_of_n", "group_ids", group_ids)
    rewards, group_ids = _check.rows("best_of_n", rewards=rewards, group_ids=group_ids)
    slots = Groups(group_ids).slots
    order = torch.argsort(rewards, descending=True, stable=True)
    order = order[torch.argsort(slots[order], stable=True)]
    place = torch.arange(len(rewards), device=rewards.device)
    owner = slots[order]
    first = torch.zeros_like(place).scatter_reduce_(0, owner, place, "amin", include_self=False)
    return torch.zeros_like(owner, dtype=torch.bool).scatter_(0, order, place - first[owner] < num_best)


@keywords
def drop_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the mask [B, T] with the rows that were cut off emptied: an answer that was not finished is not judged.

    Args:
        mask: [B, T], bool.
        truncated: [B], bool.

    Raises: DtypeError, ShapeError. Example: mask (11, 11), truncated (False, True): (11, 00).
    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.4: overlong filtering.
    """
    _check.token_mask("drop_truncated", mask)
    _check.rank("drop_truncated", "truncated", _check.boolean("drop_truncated", "truncated", truncated), "[B]")
    _check.same_shape("drop_truncated", "truncated", truncated, "the rows of mask", mask.shape[:1])
    return mask & ~truncated[:, None]
