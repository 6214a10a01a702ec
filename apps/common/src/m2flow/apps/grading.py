"""A gathered group's rewards into its advantages."""

from typing import Literal

import numpy as np

from m2flow.worker import Item

__all__ = ["grade", "grade_dr_grpo"]


def grade(group: Item) -> Item:
    """Returns the group with `rewards` and `advantages` (GRPO), float32 [n] each, in the order of its members.

    Rewards that are all equal give advantages of exactly 0: there is nothing to compare.
    """
    return _graded(group, "grpo")


def grade_dr_grpo(group: Item) -> Item:
    """Returns the group graded by Dr.GRPO: reward minus the group's mean, not divided by its deviation."""
    return _graded(group, "dr_grpo")


def _graded(group: Item, rule: Literal["grpo", "dr_grpo"]) -> Item:
    # Here, because a driver names `grade` in its recipe and never calls it.
    import torch  # noqa: PLC0415

    from m2flow.algos import advantages  # noqa: PLC0415

    rewards = torch.tensor([float(member.fields["reward"]) for member in group.members], dtype=torch.float32)
    one_group = torch.zeros(len(rewards), dtype=torch.int64)
    graded = getattr(advantages, rule)(rewards, one_group)
    return group.with_fields(rewards=np.asarray(rewards), advantages=np.asarray(graded))
