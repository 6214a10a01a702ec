"""Policy losses, one number a token: [B, T], to be minimised, 0 outside the mask.

`aggregation` turns them into a scalar; between the two, multiply by weights from `corrections` and add `coef * kl`.
Every function takes (logprobs, [old_logprobs, ...], advantages, mask) in that order; a gradient flows to `logprobs`
alone. The ratio is exp(logprobs - old_logprobs), its logarithm held to [-20, 20] so that no ratio is infinite.
`chunks` sums log-probabilities first where a ratio is to be of an action, or a chunk of actions, not of a token.
Equations below give the objective J; the loss is -J.
"""

import torch
from torch import Tensor

from m2flow.algos import _check, kl
from m2flow.algos._keywords import keywords
from m2flow.algos._ratio import log_ratio, sequence_mean


@keywords
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Return the loss of J = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    DAPO's clip-higher is clip_high over clip_low (0.28 and 0.2).

    Args:
        logprobs, old_logprobs, advantages: [B, T], floating.
        mask: [B, T], bool.
        clip_low: in [0, 1]. clip_high: 0 or more.

    Raises: DtypeError, ShapeError, SettingError.
    Example: ratio 1.5, A 1: loss -1.2 (clipped); ratio 1.5, A -1: loss 1.5; ratio 0.5, A -1: loss 0.8.
    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.1.
    """
    _clip_range("ppo_clip", clip_low, clip_high)
    new, old, adv = _operands("ppo_clip", logprobs, old_logprobs, advantages, mask)
    return _clipped(log_ratio(new, old).exp(), adv, clip_low, clip_high)


@keywords
def dual_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_max: float = 3.0,
) -> Tensor:
    """Return the loss of PPO's J, and where A < 0 of max(J, clip_max * A), so that a large ratio cannot make it huge.

    Args:
        logprobs, old_logprobs, advantages: [B, T], floating.
        mask: [B, T], bool.
        clip_low: in [0, 1]. clip_high: 0 or more. clip_max: over 1.

    Raises: DtypeError, ShapeError, SettingError. Example: ratio 5, A -1: loss 3, where ppo_clip gives 5.
    Source: Ye et al. 2020 (arXiv 1912.09729), eq. 5.
    """
    _clip_range("dual_clip", clip_low, clip_high)
    _check.above("dual_clip", "clip_max", clip_max, 1.0)
    new, old, adv = _operands("dual_clip", logprobs, old_logprobs, advantages, mask)
    loss = _clipped(log_ratio(new, old).exp(), adv, clip_low, clip_high)
    return torch.where(adv < 0, torch.minimum(loss, -clip_max * adv), loss)


@keywords
def decoupled_ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_weight: float = float("inf"),
) -> Tensor:
    """Return the loss of J = (proximal / behaviour) * min(ratio * A, clip(ratio) * A), ratio against proximal.

    The behaviour policy sampled (`rollout_logprobs`); the proximal policy is what the step stays near (`old_logprobs`:
    the weights as the step starts, recomputed). So samples may be stale and the trust region still is where the policy
    is.

    Args:
        logprobs, old_logprobs, rollout_logprobs, advantages: [B, T], floating.
        mask: [B, T], bool.
        clip_low: in [0, 1]. clip_high: 0 or more. max_weight: over 0; the weight is cut there.

    Raises: DtypeError, ShapeError, SettingError. Example: proximal / behaviour 2, ratio 1.5, A 1: loss 2 * -1.2 = -2.4.
    Source: Hilton et al. 2021 (arXiv 2110.00641); Fu et al. 2025 (AReaL, arXiv 2505.24298).
    """
    _clip_range("decoupled_ppo", clip_low, clip_high)
    _check.above("decoupled_ppo", "max_weight", max_weight, 0.0)
    new, old, adv = _operands("decoupled_ppo", logprobs, old_logprobs, advantages, mask)
    (rollout,) = _check.tokens("decoupled_ppo", mask, rollout_logprobs=rollout_logprobs)
    weight = log_ratio(old, rollout.detach()).exp().clamp_max(max_weight)
    return weight * _clipped(log_ratio(new, old).exp(), adv, clip_low, clip_high)


@keywords
def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Return PPO's clipped loss of the sequence ratio s = exp(mean over the row's tokens of log ratio), on each token.

    A token's own advantage meets its row's ratio; with one advantage a row, aggregated by `sequence_mean_token_mean`,
    value and gradient are the paper's.

    Args:
        logprobs, old_logprobs, advantages: [B, T], floating.
        mask: [B, T], bool.
        clip_low: in [0, 1]. clip_high: 0 or more.

    Raises: DtypeError, ShapeError, SettingError.
    Example: token ratios 2 and 0.5: s = 1; A 1: loss -1 on both tokens.
    Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 and 7.
    """
    _clip_range("gspo", clip_low, clip_high)
    new, old, adv = _operands("gspo", logprobs, old_logprobs, advantages, mask)
    ratio = sequence_mean(log_ratio(new, old), mask)[:, None].exp()
    return _clipped(ratio, adv, clip_low, clip_high).masked_fill(~mask, 0.0)


@keywords
def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Return GSPO-token's loss: the value of `gspo`, but each token's gradient is weighed by its own advantage.

        s_t = stop(s) * exp(logprobs_t - stop(logprobs_t))

    Equal to `gspo`, gradient included, where a row has one advantage; for advantages that differ by turn, this one.

    Args: as `gspo`. Raises: as `gspo`.
    Example: token ratios 2 and 0.5, A 1: s = 1, loss -1 and d loss / d logprobs = -1 on both tokens.
    Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 14.
    """
    _clip_range("gspo_token", clip_low, clip_high)
    new, old, adv = _operands("gspo_token", logprobs, old_logprobs, advantages, mask)
    row = sequence_mean(log_ratio(new, old), mask)[:, None].detach()
    ratio = (row + new - new.detach()).exp()
    return _clipped(ratio, adv, clip_low, clip_high).masked_fill(~mask, 0.0)


@keywords
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> Tensor:
    """Return the loss of J = stop(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprobs.

    The weight is clipped, not the token's gradient: no token is dropped. The default has no lower bound (clip_low 1).

    Args:
        logprobs, old_logprobs, advantages: [B, T], floating.
        mask: [B, T], bool.
        clip_low: in [0, 1]. clip_high: 0 or more.

    Raises: DtypeError, ShapeError, SettingError.
    Example: logprobs -1, ratio 2, clip_high 0.28, A 1: loss 1.28, d loss / d logprobs = -1.28.
    Source: MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), eq. 4 and 5.
    """
    _clip_range("cispo", clip_low, clip_high)
    new, old, adv = _operands("cispo", logprobs, old_logprobs, advantages, mask)
    weight = log_ratio(new, old).exp().clamp(1.0 - clip_low, 1.0 + clip_high).detach()
    return -weight * adv * new


@keywords
def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """Return the loss of J = (4 / tau) * sigmoid(tau * (ratio - 1)) * A: a soft gate in place of a clip.

    tau is tau_positive where A > 0, else tau_negative. At ratio 1 the gradient is REINFORCE's.

    Args:
        logprobs, old_logprobs, advantages: [B, T], floating.
        mask: [B, T], bool.
        tau_positive, tau_negative: over 0.

    Raises: DtypeError, ShapeError, SettingError. Example: ratio 1, A 1, tau 1: loss -2, d loss / d logprobs = -1.
    Source: Gao et al. 2025 (SAPO, arXiv 2511.20347).
    """
    _check.above("sapo", "tau_positive", tau_positive, 0.0)
    _check.above("sapo", "tau_negative", tau_negative, 0.0)
    new, old, adv = _operands("sapo", logprobs, old_logprobs, advantages, mask)
    tau = torch.full_like(adv, tau_negative).masked_fill(adv > 0, tau_positive)
    return -(4.0 / tau) * torch.sigmoid(tau * (log_ratio(new, old).exp() - 1.0)) * adv


@keywords
def reinforce(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of J = A * logprobs.

    Args:
        logprobs, advantages: [B, T], floating.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: logprobs -2, A 3: loss 6, d loss / d logprobs = -3.
    Source: Williams 1992; Sutton and Barto, section 13.3.
    """
    new, adv = _check.tokens("reinforce", mask, logprobs=logprobs, advantages=advantages)
    return -adv.detach() * new


@keywords
def gpg(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return GPG's loss, which is that of `reinforce`; what is GPG's own lies in `advantages.gpg` and the token mean.

    Args: as `reinforce`. Raises: as `reinforce`. Example: logprobs -2, A 3: loss 6.
    Source: Chu et al. 2025 (arXiv 2504.02546).
    """
    new, adv = _check.tokens("gpg", mask, logprobs=logprobs, advantages=advantages)
    return -adv.detach() * new


@keywords
def distill_forward_kl(logits: Tensor, teacher_logits: Tensor, mask: Tensor) -> Tensor:
    """Return KL(teacher || student) over the whole vocabulary [B, T]: the student covers all that the teacher does.

    Args:
        logits: [B, T, V], floating: the student's, which alone gets a gradient.
        teacher_logits: [B, T, V], floating.
        mask: [B, T], bool.

    [B, T, V] is never held in float32. Raises: DtypeError, ShapeError.
    Example: student uniform over 2, teacher (0.8, 0.2): 0.8 ln 1.6 + 0.2 ln 0.4 = 0.19274.
    Source: Hinton et al. 2015 (arXiv 1503.02531); Agarwal et al. 2023 (GKD, arXiv 2306.13649), on the student's own
    samples.
    """
    _check.logits("distill_forward_kl", mask, logits=logits, teacher_logits=teacher_logits)
    return kl.full(teacher_logits.detach(), logits, mask)


@keywords
def distill_reverse_kl(logits: Tensor, teacher_logits: Tensor, mask: Tensor) -> Tensor:
    """Return KL(student || teacher) over the whole vocabulary [B, T]: the student keeps to what the teacher would say.

    Args: as `distill_forward_kl`. Raises: as `distill_forward_kl`.
    Example: student uniform over 2, teacher (0.8, 0.2): 0.5 ln 0.625 + 0.5 ln 2.5 = 0.22314.
    Source: Agarwal et al. 2023 (GKD, arXiv 2306.13649); Gu et al. 2023 (MiniLLM, arXiv 2306.08543).
    """
    _check.logits("distill_reverse_kl", mask, logits=logits, teacher_logits=teacher_logits)
    return kl.full(logits, teacher_logits.detach(), mask)


@keywords
def distill_sampled_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the policy-gradient loss of reverse KL on samples: J = stop(teacher_logprobs - logprobs) * logprobs.

    Its gradient's expectation over the student's samples is that of a token's KL(student || teacher), with no
    vocabulary.

    Args:
        logprobs: [B, T], floating: the student's, of its own samples.
        teacher_logprobs: [B, T], floating: of the same tokens.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: logprobs -1, teacher -3: loss -2, d loss / d logprobs = 2.
    Source: Thinking Machines Lab 2025, "On-Policy Distillation".
    """
    new, teacher = _check.tokens("distill_sampled_kl", mask, logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    return -(teacher - new).detach() * new


def _operands(
    function: str, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three, checked, filled outside the mask, all but the first detached."""
    new, old, adv = _check.tokens(function, mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    return new, old.detach(), adv.detach()


def _clip_range(function: str, clip_low: float, clip_high: float) -> None:
    """Raise SettingError where the range is none."""
    _check.within(function, "clip_low", clip_low, 0.0, 1.0)
    _check.at_least(function, "clip_high", clip_high, 0.0)


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return -min(ratio * A, clip(ratio) * A)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
