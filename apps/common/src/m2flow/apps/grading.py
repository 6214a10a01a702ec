"""A gathered group's rewards into its advantages."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from m2flow.algos import advantages
from m2flow.worker import Item

__all__ = ["grade", "grade_dr_grpo"]


def grade(group: Item) -> Item:
    """Returns the group with `rewards` and `advantages` (GRPO), float32 [n] each, in the order of its members.

    Rewards that are all equal give advantages of exactly 0: there is nothing to compare.
    """
    return _graded(group, advantages.grpo)


def grade_dr_grpo(group: Item) -> Item:
    """Returns the group graded by Dr.GRPO: reward minus the group's mean, not divided by its deviation."""
    return _graded(group, advantages.dr_grpo)


def _graded(group: Item, rule: Callable[[Tensor, Tensor], Tensor]) -> Item:
    rewards = torch.tensor([float(member.fields["reward"]) for member in group.members], dtype=torch.float32)
    one_group = torch.zeros(len(rewards), dtype=torch.int64)
    graded = rule(rewards, one_group)
    return group.with_fields(rewards=np.asarray(rewards), advantages=np.asarray(graded))
