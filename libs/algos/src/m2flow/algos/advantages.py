"""Advantages without a critic, and whitening.

Where a sample has one reward, functions take and give vectors [N]: `group_ids` says which samples answer one prompt, in
any order and in groups of any sizes, and `masks.spread` puts the result on the tokens. Sums over a group are in
float64, so neither the order of its members nor rounding decides a sign. A group that has nothing to compare, because
it has one member or because all its rewards are equal, gets exactly 0. No gradient flows: advantages are data.
GAE, which has a critic, is in `returns`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._groups import Groups
from m2flow.algos._keywords import keywords
from m2flow.algos.masks import spread
from m2flow.algos.returns import reward_to_go


@keywords
def grpo(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return A [N] = (r - mean of the group) / (std of the group + eps), the std with n - 1.

    Args:
        rewards: [N], floating.
        group_ids: [N], integer; rows of one prompt share an id.
        eps: added to the std.

    Raises: DtypeError, ShapeError, SettingError (eps < 0). A group of one, or of equal rewards: 0.
    Example: rewards [1, 0, 0, 1] in one group, eps 0: mean 0.5, std 0.57735, A = [0.86603, -0.86603, -0.86603,
    0.86603].
    Source: Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), section 4.1.2.
    """
    _check.at_least("grpo", "eps", eps, 0.0)
    r, groups = _rewards("grpo", rewards, group_ids)
    return _like(rewards, _standardise(r, groups, eps))


@keywords
def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return A [N] = r - mean of the group: GRPO without the division, which favours the easiest and hardest prompts.

    Args:
        rewards: [N], floating.
        group_ids: [N], integer.

    Raises: DtypeError, ShapeError. A group of one, or of equal rewards: 0. Its loss goes with
    `aggregation.fixed_length`.
    Example: rewards [1, 0, 0, 1] in one group: [0.5, -0.5, -0.5, 0.5].
    Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2.
    """
    r, groups = _rewards("dr_grpo", rewards, group_ids)
    return _like(rewards, _centre(r, groups))


@keywords
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return A [N] = r - mean of the other members of the group.

    Args:
        rewards: [N], floating.
        group_ids: [N], integer.

    Raises: DtypeError, ShapeError. A group of one has no others: 0.
    Example: rewards [1, 0, 0] in one group: [1 - 0, 0 - 0.5, 0 - 0.5] = [1, -0.5, -0.5].
    Source: Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    r, groups = _rewards("rloo", rewards, group_ids)
    return _like(rewards, _centre(r, groups) * groups.sizes / (groups.sizes - 1).clamp_min(1))


@keywords
def opo(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return A [N] = r - b, b the group's mean reward weighted by length: sum(l * r) / sum(l).

    Args:
        rewards: [N], floating.
        group_ids: [N], integer.
        lengths: [N], integer, response tokens, 0 or more. A group whose lengths are all 0 takes its plain mean.

    Raises: DtypeError, ShapeError. A group of one, or of equal rewards: 0.
    Example: rewards [1, 0], lengths [1, 3] in one group: b = 0.25, A = [0.75, -0.25].
    Source: Hao et al. 2025 (arXiv 2505.23585).
    """
    r, groups = _rewards("opo", rewards, group_ids)
    _check.rank("opo", "lengths", _check.integer("opo", "lengths", lengths), "[N]")
    _check.same_shape("opo", "lengths", lengths, "rewards", rewards)
    weights = lengths.to(r.dtype)
    total = groups.sum(weights)
    baseline = torch.where(total > 0, groups.sum(weights * r) / total.clamp_min(1), groups.mean(r))
    return _like(rewards, (r - baseline).masked_fill(groups.constant(r), 0.0))


@keywords
def gpg(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return A [N] = alpha * (r - mean of the group), alpha = N / (rows in groups whose rewards differ).

    alpha makes up for the groups that teach nothing, so that the gradient does not shrink as they grow in number.

    Args:
        rewards: [N], floating.
        group_ids: [N], integer.

    Raises: DtypeError, ShapeError. Where every group is constant: all 0.
    Example: groups [1, 0] and [1, 1]: alpha = 4 / 2, A = [1, -1, 0, 0].
    Source: Chu et al. 2025 (GPG, arXiv 2504.02546), with F_norm = 1.
    """
    r, groups = _rewards("gpg", rewards, group_ids)
    teaching = (~groups.constant(r)).sum().clamp_min(1)
    return _like(rewards, _centre(r, groups) * (r.shape[0] / teaching))


@keywords
def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Return A [N] = r - the reward of the greedy answer to the same prompt.

    Args:
        rewards: [N], floating.
        greedy_rewards: [N], floating; row n's prompt, answered greedily.

    Raises: DtypeError, ShapeError. Example: rewards [1, 0], greedy [1, 1]: [0, -1].
    Source: Li et al. 2023 (ReMax, arXiv 2310.10505).
    """
    _check.floating("remax", "rewards", rewards)
    _check.floating("remax", "greedy_rewards", greedy_rewards)
    r, baseline = _check.rows("remax", rewards=rewards, greedy_rewards=greedy_rewards)
    return _like(rewards, (r - baseline).detach())


@keywords
def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return A [B, T]: the reward-to-go of each token, whitened over all tokens of the batch, 0 outside the mask.

    Args:
        rewards: [B, T], floating: usually `kl.in_reward` of the reward at the last token.
        mask: [B, T], bool.
        gamma: in [0, 1].
        reduce: as in `whiten`.

    Raises: DtypeError, ShapeError, SettingError.
    Example: rewards [[0, 1], [0, 0]], all in the mask: returns [[1, 1], [0, 0]], mean 0.5, std 0.57735, A = +-0.86603.
    Source: Hu et al. 2025 (arXiv 2501.03262).
    """
    (r,) = _check.tokens("reinforce_plus_plus", mask, rewards=rewards)
    return whiten(reward_to_go(r.detach(), mask, gamma=gamma), mask, reduce=reduce)


@keywords
def reinforce_plus_plus_baseline(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, *, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return A [N, T]: r - mean of the group, on each token, whitened over all tokens of the batch, 0 outside the mask.

    Args:
        rewards: [N], floating.
        group_ids: [N], integer.
        mask: [N, T], bool.
        reduce: as in `whiten`.

    Raises: DtypeError, ShapeError.
    Example: rewards [1, 0] in one group, one token each: centred [0.5, -0.5], std 0.70711, A = [0.70711, -0.70711].
    Source: Hu et al. 2025 (arXiv 2501.03262v3), the baseline form.
    """
    r, groups = _rewards("reinforce_plus_plus_baseline", rewards, group_ids)
    _check.token_mask("reinforce_plus_plus_baseline", mask)
    _check.same_shape("reinforce_plus_plus_baseline", "rewards", rewards, "the rows of mask", mask.shape[:1])
    centred = _like(rewards, _centre(r, groups))
    return whiten(spread(centred, mask), mask, reduce=reduce)


@keywords
def grpo_turn(rewards: Tensor, group_ids: Tensor, turn_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return A [N], a row a turn: GRPO among the turns of one number in one group's trajectories.

    Args:
        rewards: [N], floating: the turn's own reward.
        group_ids: [N], integer: the prompt.
        turn_ids: [N], integer: which turn of its trajectory the row is.
        eps: added to the std.

    To compare a turn with all turns of its group instead, whatever their number, call `grpo` on the rows.
    Raises: DtypeError, ShapeError, SettingError. A turn that no sibling reached: 0.
    Example: one group, two trajectories, turn rewards (0, 1) and (1, 1): turn 0 gives [-0.70711, 0.70711], turn 1 gives
    [0, 0].
    Source: the step-level groups of Feng et al. 2025 (GiGPO, arXiv 2505.10978), with the turn's number as the state.
    """
    _check.at_least("grpo_turn", "eps", eps, 0.0)
    r, groups = _rewards("grpo_turn", rewards, group_ids)
    _check.same_shape("grpo_turn", "turn_ids", _check.integer("grpo_turn", "turn_ids", turn_ids), "rewards", rewards)
    cells = Groups(groups.slots * r.shape[0] + Groups(turn_ids).slots)
    return _like(rewards, _standardise(r, cells, eps))


@keywords
def grpo_trajectory(rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return A [N], a row a turn: GRPO among trajectories by their summed reward, each trajectory counted once.

    Counted by row instead, a trajectory of many turns would weigh more in its group's mean.

    Args:
        rewards: [N], floating: the turn's reward; a trajectory's is the sum over its turns.
        group_ids: [N], integer: the prompt; the turns of one trajectory share it.
        trajectory_ids: [N], integer, unique over the batch: which trajectory the row is a turn of.
        eps: added to the std.

    Raises: DtypeError, ShapeError, SettingError.
    Example: one group; trajectory 0 has turns (0, 0, 1), trajectory 1 has (0): sums 1 and 0, mean 0.5, std 0.70711,
    A = [0.70711, 0.70711, 0.70711, -0.70711].
    Source: GRPO as above over whole trajectories (Wang et al. 2025, RAGEN, arXiv 2504.20073).
    """
    function = "grpo_trajectory"
    _check.at_least(function, "eps", eps, 0.0)
    r, groups = _rewards(function, rewards, group_ids)
    _check.same_shape(
        function, "trajectory_ids", _check.integer(function, "trajectory_ids", trajectory_ids), "rewards", rewards
    )
    trajectories = Groups(trajectory_ids)
    score = trajectories.sum(r)
    share = 1.0 / trajectories.sizes
    count = groups.sum(share)
    centred = score - groups.sum(share * score) / count
    std = (groups.sum(share * centred.square()) / (count - 1).clamp_min(1)).sqrt()
    return _like(rewards, (centred / (std + eps)).masked_fill(groups.constant(score), 0.0))


@keywords
def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) [B, T] over the mask's positions, 0 outside; the variance with n - 1.

    Args:
        x: [B, T], floating.
        mask: [B, T], bool.
        eps: added to the variance.
        reduce: sums a tensor over data-parallel ranks and returns it, so that each rank whitens by the statistics of
            all; it is called twice on every rank (count and sum, then squares), even on one whose mask is empty.

    Fewer than two positions, or equal values: 0. Differentiable in x. Raises: DtypeError, ShapeError, SettingError (eps
    < 0).
    Example: x [1, 3], both in the mask, eps 0: mean 2, var 2, result [-0.70711, 0.70711].
    Source: Andrychowicz et al. 2020 (arXiv 2006.05990), choice C67.
    """
    _check.at_least("whiten", "eps", eps, 0.0)
    (x,) = _check.tokens("whiten", mask, x=x)
    total = torch.stack([mask.sum().to(x.dtype), x.sum()])
    count, summed = (total if reduce is None else reduce(total)).unbind()
    centred = (x - summed / count.clamp_min(1)).masked_fill(~mask, 0.0)
    squares = centred.square().sum()
    squares = squares if reduce is None else reduce(squares)
    variance = squares / (count - 1).clamp_min(1) + eps
    return torch.where(count > 1, centred * torch.where(variance > 0, variance, 1.0).rsqrt(), torch.zeros_like(centred))


def _rewards(function: str, rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Groups]:
    """Return the rewards in float64, detached, and their groups."""
    _check.floating(function, "rewards", rewards)
    _check.integer(function, "group_ids", group_ids)
    r, ids = _check.rows(function, rewards=rewards, group_ids=group_ids)
    return r.detach(), Groups(ids)


def _centre(r: Tensor, groups: Groups) -> Tensor:
    """Return r - mean of its group, exactly 0 where the group is constant."""
    return (r - groups.mean(r)).masked_fill(groups.constant(r), 0.0)


def _standardise(r: Tensor, groups: Groups, eps: float) -> Tensor:
    """Return (r - mean) / (std + eps) by group, exactly 0 where the group is constant."""
    constant = groups.constant(r)
    return ((r - groups.mean(r)) / (groups.std(r) + eps)).masked_fill(constant, 0.0)


def _like(rewards: Tensor, x: Tensor) -> Tensor:
    """Return the float64 result `x` in the dtype that the rewards compute in: their own, or float32 for 16-bit ones."""
    return x.to(torch.promote_types(rewards.dtype, torch.float32))
