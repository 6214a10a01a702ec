"""Soft actor-critic, one number a transition: [N], to be minimised by its mean. Every transition counts: no mask.

Critics form an ensemble: q-values are [E, N], E = 2 for SAC's twin, more for REDQ and RLPD (`rlpd.subset`).
Source of all: Haarnoja et al. 2018 (arXiv 1812.05905).
"""

import math

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords


@keywords
def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return (actions [N, D] in [-1, 1], logprobs [N]) of a tanh-squashed Gaussian: tanh(mean + exp(log_std) * noise).

        logprob = sum over d of log N(u; mean, std) - log(1 - tanh(u)^2)

    the last term as 2 * (ln 2 - u - softplus(-2 u)), which is right where tanh rounds to 1.

    Args:
        mean, log_std: [N, D], floating.
        noise: [N, D], floating: standard normal. Given, so that the function is pure.

    Differentiable. Raises: DtypeError, ShapeError.
    Example: mean 0, log_std 0, noise 0: action 0, logprob -ln(2 pi) / 2 = -0.91894.
    Source: appendix C of the paper, enforcing action bounds.
    """
    mean, log_std, noise = _operands("squash", "[N, D]", mean=mean, log_std=log_std, noise=noise)
    u = mean + log_std.exp() * noise
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
    slope = 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
    return u.tanh(), (gaussian - slope).sum(1)


@keywords
def td_target(
    rewards: Tensor,
    next_q: Tensor,
    next_logprobs: Tensor,
    terminated: Tensor,
    *,
    gamma: float,
    temperature: float | Tensor,
) -> Tensor:
    """Return y [N] = r + gamma * (min over the ensemble of next_q - temperature * next_logprobs), no future at an end.

    Args:
        rewards, next_logprobs: [N], floating. next_logprobs: of an action sampled now at the next observation.
        next_q: [E, N], floating: the target critics' value of that action.
        terminated: [N], bool; a truncated transition is not terminated, and its next observation is the one it was cut
            at.
        gamma: in [0, 1]; for n-step rewards, gamma^n.
        temperature: alpha, 0 or more: a number or a 0-d tensor; 0 leaves the entropy out of the target.

    No gradient. Raises: DtypeError, ShapeError, SettingError.
    Example: r 1, next_q (4, 3), next_logprobs -1, gamma 0.5, temperature 2: 1 + 0.5 * (3 + 2) = 3.5.
    Source: the soft Bellman target, with clipped double Q.
    """
    _check.within("td_target", "gamma", gamma, 0.0, 1.0)
    r, logp = _operands("td_target", "[N]", rewards=rewards, next_logprobs=next_logprobs)
    q = _ensemble("td_target", "next_q", next_q, r)
    _check.same_shape("td_target", "terminated", _check.boolean("td_target", "terminated", terminated), "rewards", r)
    _temperature("td_target", temperature)
    future = (q.amin(0) - temperature * logp).masked_fill(terminated, 0.0)
    return (r + gamma * future).detach()


@keywords
def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Return [N]: the sum over the ensemble of (q - target)^2 / 2.

    Args:
        q: [E, N], floating: each critic's value of the action taken.
        target: [N], floating: from `td_target`; gets no gradient.

    Raises: DtypeError, ShapeError. Example: q (1, 3), target 2: 0.5 + 0.5 = 1. Source: the soft Bellman residual.
    """
    (y,) = _operands("critic_loss", "[N]", target=target)
    return 0.5 * (_ensemble("critic_loss", "q", q, y) - y.detach()).square().sum(0)


@keywords
def actor_loss(logprobs: Tensor, q: Tensor, *, temperature: float | Tensor) -> Tensor:
    """Return [N]: temperature * logprobs - min over the ensemble of q, for actions sampled now with a gradient.

    Args:
        logprobs: [N], floating: from `squash`.
        q: [E, N], floating: the critics' value of those actions. RLPD takes the mean: pass q.mean(0, keepdim=True).
        temperature: alpha, 0 or more: a number or a 0-d tensor; gets no gradient.

    Raises: DtypeError, ShapeError, SettingError.
    Example: logprobs -1, q (4, 3), temperature 2: -2 - 3 = -5.
    Source: the reparametrised objective.
    """
    (logp,) = _operands("actor_loss", "[N]", logprobs=logprobs)
    _temperature("actor_loss", temperature)
    alpha = temperature.detach() if isinstance(temperature, Tensor) else temperature
    return alpha * logp - _ensemble("actor_loss", "q", q, logp).amin(0)


@keywords
def temperature_loss(log_temperature: Tensor, logprobs: Tensor, *, target_entropy: float) -> Tensor:
    """Return [N]: -exp(log_temperature) * (logprobs + target_entropy): too little entropy raises the temperature.

    Args:
        log_temperature: 0-d, floating: the learned parameter, which alone gets a gradient.
        logprobs: [N], floating: of actions sampled now.
        target_entropy: usually minus the number of action dimensions.

    Raises: DtypeError, ShapeError. Example: log_temperature 0, logprobs 3, target_entropy -2: -1 * (3 - 2) = -1.
    Source: eq. 18.
    """
    log_alpha = _check.floating("temperature_loss", "log_temperature", log_temperature)
    _check.scalar("temperature_loss", "log_temperature", log_alpha)
    (logp,) = _operands("temperature_loss", "[N]", logprobs=logprobs)
    return -log_alpha.exp() * (logp.detach() + target_entropy)


def _temperature(function: str, temperature: float | Tensor) -> None:
    """Raise where the temperature is no single number of 0 or more (a tensor's value is not read)."""
    _check.scalar(function, "temperature", temperature)
    if not isinstance(temperature, Tensor):
        _check.at_least(function, "temperature", temperature, 0.0)


def _operands(function: str, dims: str, **operands: Tensor) -> list[Tensor]:
    """Return floating operands, checked to be of rank `dims` and of one shape, widened."""
    first_name, first = next(iter(operands.items()))
    checked = []
    for name, x in operands.items():
        wide = _check.floating(function, name, _check.rank(function, name, x, dims))
        _check.same_shape(function, name, x, first_name, first)
        checked.append(wide)
    return checked


def _ensemble(function: str, name: str, q: Tensor, like: Tensor) -> Tensor:
    """Return q-values checked to be [E, N], widened."""
    wide = _check.floating(function, name, _check.rank(function, name, q, "[E, N]"))
    _check.same_shape(function, f"{name} without E", wide[0], "the transitions", like)
    return wide
