"""Action chunks: T decisions a row, each of K actions of D tokens, [B, T, K, D], brought to [B, L] for the losses.

The level says what one ratio is of, and so what L is:

| level | one log-probability is of | L |
|---|---|---|
| token | a token | T * K * D |
| action | an action: the sum over its D tokens | T * K |
| chunk | a whole decision: the sum over its K * D tokens | T |

An action that was never carried out, because the episode ended inside its chunk, is outside the mask [B, T, K].
"""

from typing import Literal

from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos.errors import SettingError

Level = Literal["token", "action", "chunk"]


@keywords
def sum_logprobs(logprobs: Tensor, mask: Tensor, *, level: Level) -> tuple[Tensor, Tensor]:
    """Return (logprobs [B, L], mask [B, L]) at the level; logprobs are 0 outside the mask.

    Args:
        logprobs: [B, T, K, D], floating; also entropies, which add in the same way.
        mask: [B, T, K], bool: the actions carried out. A chunk is in the mask if one of its actions is.
        level: see above.

    Differentiable. Raises: DtypeError, ShapeError, SettingError.
    Example: T 1, K 2, D 2, logprobs ((-1, -2), (-3, -4)), mask (1, 1): token (-1, -2, -3, -4), action (-3, -7), chunk
    (-10).
    Source: RLinf-VLA 2025 (arXiv 2510.06710).
    """
    _check.rank("sum_logprobs", "logprobs", logprobs, "[B, T, K, D]")
    _check.rank("sum_logprobs", "mask", _check.boolean("sum_logprobs", "mask", mask), "[B, T, K]")
    _check.same_shape("sum_logprobs", "mask", mask, "logprobs without D", logprobs.shape[:3])
    filled = _check.floating("sum_logprobs", "logprobs", logprobs).masked_fill(~mask[..., None], 0.0)
    if level == "token":
        return filled.flatten(1), mask[..., None].expand_as(filled).flatten(1)
    if level == "action":
        return filled.sum(3).flatten(1), mask.flatten(1)
    if level == "chunk":
        return filled.sum((2, 3)), mask.any(2)
    raise _unknown("sum_logprobs", level)


@keywords
def sum_rewards(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return [B, T]: each decision's reward, the sum over its actions of gamma^i * reward.

    Args:
        rewards: [B, T, K], floating: by action.
        mask: [B, T, K], bool: the actions carried out.
        gamma: in [0, 1]: the discount by action. A return over decisions then discounts by gamma^K.

    Differentiable. Raises: DtypeError, ShapeError, SettingError. Example: rewards (1, 2, 4), gamma 0.5: 1 + 1 + 1 = 3.
    Source: Sutton, Precup and Singh 1999 (options).
    """
    _check.within("sum_rewards", "gamma", gamma, 0.0, 1.0)
    _check.rank("sum_rewards", "mask", _check.boolean("sum_rewards", "mask", mask), "[B, T, K]")
    _check.same_shape("sum_rewards", "rewards", rewards, "mask", mask)
    filled = _check.floating("sum_rewards", "rewards", rewards).masked_fill(~mask, 0.0)
    discounts = filled.new_tensor([gamma**i for i in range(mask.shape[2])])
    return (filled * discounts).sum(2)


@keywords
def spread(x: Tensor, *, level: Level, num_actions: int, num_tokens: int) -> Tensor:
    """Return [B, L]: each decision's number at each of its places at the level.

    Args:
        x: [B, T], floating: by decision, such as an advantage.
        level: see above.
        num_actions: K. num_tokens: D.

    Raises: DtypeError, ShapeError, SettingError. Example: x (1, 2), K 2, D 1, level action: (1, 1, 2, 2).
    Source: as `sum_logprobs`.
    """
    _check.at_least("spread", "num_actions", num_actions, 1)
    _check.at_least("spread", "num_tokens", num_tokens, 1)
    x = _check.rank("spread", "x", _check.floating("spread", "x", x), "[B, T]")
    if level == "chunk":
        return x
    if level == "action":
        return x.repeat_interleave(num_actions, 1)
    if level == "token":
        return x.repeat_interleave(num_actions * num_tokens, 1)
    raise _unknown("spread", level)


def _unknown(function: str, level: object) -> SettingError:
    """Return the error for a level that is none."""
    return SettingError(f"{function}: level is {level!r}, want token, action or chunk: change level")
