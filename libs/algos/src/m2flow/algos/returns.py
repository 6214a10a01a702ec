"""Returns and GAE over rows [B, T] in which steps outside the mask do not exist.

A step whose mask is False is skipped as if cut out: no discount is paid for it, its reward and value are ignored, and
what lies in it, NaN included, changes nothing. So the tool's tokens between two turns of an agent, and padding on
either side, are passed over. Episodes end where `terminated` (nothing follows) or `truncated` (cut off: what would
follow is worth `final_values`) is True; both flags are read inside the mask only. Where a row's last step is neither,
its future is bootstrapped.
"""

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos._scan import onward
from m2flow.algos.errors import SettingError, ShapeError


@keywords
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), each [B, T] and 0 outside the mask.

        delta_t = r_t + gamma * V(next) - V_t
        A_t     = delta_t + gamma * lam * A_(t+1), the second term 0 at an episode's end
        return  = A_t + V_t

    V(next) is 0 where terminated, final_values[:, t] where truncated, else the value of the row's next step in the
    mask, which after the last one is values[:, T].

    Args:
        rewards: [B, T], floating.
        values: [B, T+1], floating; the last column is the bootstrap: the value of the observation after the last step,
            or 0 where the row ends with its episode (a language model's response). It must be finite even where the row
            has ended.
        mask: [B, T], bool.
        gamma, lam: in [0, 1].
        terminated, truncated: [B, T], bool, True at an episode's last step. Absent means nowhere. Where both are True,
            terminated wins.
        final_values: [B, T], floating, read where truncated alone: the value of the observation that the episode was
            cut at (not of the next episode's first, which values[:, t+1] is). It goes with `truncated`: one without the
            other is an error.

    Differentiable in rewards and values. Raises: DtypeError, ShapeError, SettingError.
    Example: rewards [1, 1], values [0.5, 0.5, 0], gamma 1, lam 0.5: deltas [1, 0.5], advantages [1.25, 0.5].
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16; Pardo et al. 2018 (1712.00378) for truncation.
    """
    (rewards,) = _check.tokens("gae", mask, rewards=rewards)
    _check.rank("gae", "values", values, "[B, T+1]")
    if values.shape[1] != mask.shape[1] + 1:
        raise ShapeError(
            f"gae: values has {values.shape[1]} entries, want {mask.shape[1] + 1} (T+1): append the bootstrap value"
        )
    if (truncated is None) != (final_values is None):
        raise SettingError(
            "gae: got one of truncated and final_values, want both or neither: a truncated step is worth the value of "
            "the observation that it was cut at"
        )
    (now,) = _check.tokens("gae", mask, values=values[:, :-1])
    _check.within("gae", "gamma", gamma, 0.0, 1.0)
    _check.within("gae", "lam", lam, 0.0, 1.0)
    bootstrap = _check.floating("gae", "values", values)[:, -1]
    end = None if terminated is None else _flags("gae", "terminated", terminated, mask)
    own = rewards - now
    if truncated is not None and final_values is not None:
        cut = _flags("gae", "truncated", truncated, mask)
        cut, end = (cut, cut) if end is None else (cut & ~end, cut | end)
        (final,) = _check.tokens("gae", cut, final_values=final_values)
        own = own + gamma * final
    # A step hands z_t = V_t + lam * A_t to the one before it, and A_t = own_t + gamma * z_(t+1): one recurrence, in
    # which a step outside the mask hands on what it was given.
    given = torch.add(now, own, alpha=lam)
    future = onward(given, _decay(mask, end, gamma * lam, own), bootstrap)
    if end is not None:
        future = future.masked_fill(end, 0.0)
    advantages = torch.where(mask, torch.add(own, future, alpha=gamma), 0.0)
    return advantages, advantages + now


@keywords
def reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, terminated: Tensor | None = None) -> Tensor:
    """Return G [B, T], 0 outside the mask: G_t = r_t + gamma * G_(t+1), the second term 0 where terminated.

    Args:
        rewards: [B, T], floating.
        mask: [B, T], bool.
        gamma: in [0, 1].
        terminated: [B, T], bool, True at an episode's last step; absent means that a row is one episode.

    Differentiable in rewards. Raises: DtypeError, ShapeError, SettingError.
    Example: rewards [1, 2, 4], gamma 0.5 gives [3, 4, 4].
    Source: Sutton and Barto, Reinforcement Learning, section 3.3.
    """
    (rewards,) = _check.tokens("reward_to_go", mask, rewards=rewards)
    _check.within("reward_to_go", "gamma", gamma, 0.0, 1.0)
    end = None if terminated is None else _flags("reward_to_go", "terminated", terminated, mask)
    decay = _decay(mask, end, gamma, rewards)
    future = onward(rewards, decay, rewards.new_zeros(mask.shape[0]))
    return torch.addcmul(rewards, decay, future).masked_fill(~mask, 0.0)


@keywords
def n_step(
    rewards: Tensor,
    next_values: Tensor,
    mask: Tensor,
    *,
    num_steps: int,
    gamma: float,
    terminated: Tensor,
    truncated: Tensor,
) -> Tensor:
    """Return n-step targets [B, T], 0 outside the mask.

        y_t = sum_(i<m) gamma^i r_(t+i) + gamma^m * next_values_(t+m-1), the last term 0 where that step terminated

    with m = num_steps, or fewer where the episode, or the row, ends before.

    Args:
        rewards: [B, T], floating.
        next_values: [B, T], floating: the value of the observation that step t led to (at a truncation: the one it was
            cut at).
        mask: [B, T], bool. Here time runs over positions: a step outside the mask ends the sum like a truncation.
        num_steps: n, 1 or more.
        gamma: in [0, 1].
        terminated, truncated: [B, T], bool, True at an episode's last step.

    Differentiable in rewards and next_values. Raises: DtypeError, ShapeError, SettingError.
    Example: rewards [1, 2, 4], next_values [8, 8, 8], n 2, gamma 0.5, no end: [1 + 1 + 2, 2 + 2 + 2, 4 + 4] = [4, 6,
    8].
    Source: Sutton and Barto, section 7.1; Barth-Maron et al. 2018 (D4PG, arXiv 1804.08617).
    """
    rewards, next_values = _check.tokens("n_step", mask, rewards=rewards, next_values=next_values)
    _check.at_least("n_step", "num_steps", num_steps, 1)
    _check.within("n_step", "gamma", gamma, 0.0, 1.0)
    stop = _flags("n_step", "terminated", terminated, mask)
    beyond = torch.nn.functional.pad(~mask[:, 1:], (0, 1), value=True)
    end = stop | _flags("n_step", "truncated", truncated, mask) | beyond
    last = rewards + gamma * next_values.masked_fill(stop, 0.0)
    target = last
    for _ in range(min(num_steps, mask.shape[1]) - 1):
        future = torch.nn.functional.pad(target[:, 1:], (0, 1))
        target = torch.where(end, last, rewards + gamma * future)
    return target.masked_fill(~mask, 0.0)


def _flags(function: str, name: str, flags: Tensor, mask: Tensor) -> Tensor:
    """Return the bool flags [B, T], False outside the mask."""
    _check.same_shape(function, name, _check.boolean(function, name, flags), "mask", mask)
    return flags & mask


def _decay(mask: Tensor, end: Tensor | None, factor: float, like: Tensor) -> Tensor:
    """Return what the scan multiplies by: `factor` inside the mask, 0 at an end, 1 outside, where time stands still."""
    decay = torch.where(mask, like.new_tensor(factor), like.new_tensor(1.0))
    return decay if end is None else decay.masked_fill(end, 0.0)
