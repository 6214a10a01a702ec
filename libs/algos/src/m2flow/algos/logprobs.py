"""Log-probabilities of given tokens and entropies of a categorical policy, in little memory.

Rows outside the mask are neither computed nor differentiated: their result is 0 and their gradient 0, whatever lies
there. Results are float32 (float64 from float64), whatever the logits' dtype. [B, T, V] is never held in float32: the
work goes piece by piece, and the backward makes the softmax again from the logits. From hidden states the logits
themselves are never held either. Differentiable once; see `_vocab` and `_linear` for the gradients.
"""

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos._linear import linear_logprobs_op
from m2flow.algos._vocab import token_logprobs_op
from m2flow.algos.errors import DtypeError, ShapeError


@keywords
def from_logits(logits: Tensor, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature)[tokens] [B, T], 0 outside the mask.

    Args:
        logits: [B, T, V], floating; position t holds the logits that predict tokens[:, t].
        tokens: [B, T], integer, in [0, V) inside the mask; outside it, anything.
        mask: [B, T], bool.
        temperature: over 0: the one that the tokens were sampled at.

    Raises: DtypeError, ShapeError, SettingError (temperature, or a token of the mask outside [0, V)).
    Example: logits [0, ln 3], token 1: ln 0.75 = -0.28768.
    Source: the definition; pieces and recomputation as in Wijmans et al. 2024 (arXiv 2411.09009).
    """
    _check.logits("from_logits", mask, logits=logits)
    _choices("from_logits", tokens, mask, temperature)
    logprobs: Tensor = token_logprobs_op(logits, tokens.long(), mask, temperature, False)[0]
    return logprobs


@keywords
def from_logits_with_entropy(
    logits: Tensor, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy), each [B, T] and 0 outside the mask: `from_logits` and `entropy` in one pass.

    Args: as `from_logits`. Raises: as `from_logits`.
    Example: logits [0, ln 3], token 1: (-0.28768, 0.56234). Source: as `from_logits`.
    """
    _check.logits("from_logits_with_entropy", mask, logits=logits)
    _choices("from_logits_with_entropy", tokens, mask, temperature)
    logprobs, entropies, _ = token_logprobs_op(logits, tokens.long(), mask, temperature, True)
    return logprobs, entropies


@keywords
def entropy(logits: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return H = -sum over v of p(v) log p(v) [B, T] in nats, p = softmax(logits / temperature), 0 outside the mask.

    Args:
        logits: [B, T, V], floating. A logit of -inf is a probability of 0 and adds 0.
        mask: [B, T], bool.
        temperature: over 0.

    Raises: DtypeError, ShapeError, SettingError. Example: logits [0, ln 3]: 0.25 ln 4 + 0.75 ln(4/3) = 0.56234.
    Source: Shannon 1948.
    """
    _check.logits("entropy", mask, logits=logits)
    _check.above("entropy", "temperature", temperature, 0.0)
    tokens = torch.zeros_like(mask, dtype=torch.long)
    entropies: Tensor = token_logprobs_op(logits, tokens, mask, temperature, True)[1]
    return entropies


@keywords
def from_hidden(hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return log softmax(hidden @ weight.T / temperature)[tokens] [B, T], 0 outside the mask, with no logits held.

    Args:
        hidden: [B, T, H], floating; position t's state predicts tokens[:, t].
        weight: [V, H], of hidden's dtype: the output head's.
        tokens, mask, temperature: as in `from_logits`.

    Costs one more matrix product than holding the logits would: the backward makes them again.
    Raises: DtypeError, ShapeError, SettingError. Example: hidden [1], weight [[0], [ln 3]], token 1: -0.28768.
    Source: Wijmans et al. 2024 (arXiv 2411.09009).
    """
    return _from_hidden("from_hidden", hidden, weight, tokens, mask, temperature)[0]


@keywords
def from_hidden_with_entropy(
    hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy), each [B, T] and 0 outside the mask, with no logits held.

    Args: as `from_hidden`. Raises: as `from_hidden`. Source: as `from_hidden`.
    Example: hidden [1], weight [[0], [ln 3]], token 1: (-0.28768, 0.56234).
    """
    return _from_hidden("from_hidden_with_entropy", hidden, weight, tokens, mask, temperature)


def _from_hidden(
    function: str, hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy) from hidden states, checked."""
    _check.token_mask(function, mask)
    _check.rank(function, "hidden", hidden, "[B, T, H]")
    _check.floating(function, "hidden", hidden[..., :1])
    _check.same_shape(function, "mask", mask, "hidden without H", hidden.shape[:2])
    _choices(function, tokens, mask, temperature)
    _check.rank(function, "weight", weight, "[V, H]")
    if hidden.dtype != weight.dtype:
        raise DtypeError(
            f"{function}: weight has dtype {weight.dtype}, want {hidden.dtype} like hidden: use weight.to(hidden.dtype)"
        )
    if hidden.shape[2] != weight.shape[1]:
        raise ShapeError(
            f"{function}: weight has shape {list(weight.shape)}, want [V, {hidden.shape[2]}]: pass the head's "
            "weight as nn.Linear keeps it"
        )
    logprobs, entropies, _ = linear_logprobs_op(hidden, weight, tokens.long(), mask, temperature)
    return logprobs, entropies


def _choices(function: str, tokens: Tensor, mask: Tensor, temperature: float) -> None:
    """Check the tokens and the temperature that they were sampled at."""
    _check.same_shape(function, "tokens", _check.integer(function, "tokens", tokens), "mask", mask)
    _check.above(function, "temperature", temperature, 0.0)
