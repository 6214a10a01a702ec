"""Behaviour cloning, one number a step: [B, T], to be minimised, 0 outside the mask."""

from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords


@keywords
def nll(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return -logprobs [B, T], 0 outside the mask: the expert's tokens, or actions, made likelier.

    Args:
        logprobs: [B, T], floating: the policy's, of the expert's choices.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: logprobs -2: 2.
    Source: Pomerleau 1988 (ALVINN); as a regulariser of RL, Rajeswaran et al. 2017 (DAPG, arXiv 1709.10087).
    """
    (logprobs,) = _check.tokens("nll", mask, logprobs=logprobs)
    return -logprobs


@keywords
def l1(actions: Tensor, expert_actions: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over D of abs(actions - expert_actions) [B, T], 0 outside the mask.

    Args:
        actions, expert_actions: [B, T, D], floating; a gradient flows to actions alone.
        mask: [B, T], bool.

    Raises: DtypeError, ShapeError. Example: actions (1, 3), expert (0, 0): 2.
    Source: Kim et al. 2025 (OpenVLA-OFT, arXiv 2502.19645).
    """
    return _gap("l1", actions, expert_actions, mask).abs().mean(2)


@keywords
def mse(actions: Tensor, expert_actions: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over D of (actions - expert_actions)^2 [B, T], 0 outside the mask.

    Args: as `l1`. Raises: as `l1`. Example: actions (1, 3), expert (0, 0): 5.
    Source: Pomerleau 1988 (ALVINN).
    """
    return _gap("mse", actions, expert_actions, mask).square().mean(2)


def _gap(function: str, actions: Tensor, expert_actions: Tensor, mask: Tensor) -> Tensor:
    """Return actions - expert_actions [B, T, D], 0 outside the mask."""
    _check.token_mask(function, mask)
    _check.rank(function, "actions", actions, "[B, T, D]")
    _check.same_shape(function, "expert_actions", expert_actions, "actions", actions)
    _check.same_shape(function, "mask", mask, "actions without D", actions.shape[:2])
    outside = ~mask[..., None]
    near = _check.floating(function, "actions", actions).masked_fill(outside, 0.0)
    return near - _check.floating(function, "expert_actions", expert_actions).detach().masked_fill(outside, 0.0)
