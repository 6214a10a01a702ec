"""From a loss a token, [B, T], to the scalar that is differentiated.

Each function divides a plain sum by a count. Give it the count of the *whole* batch of the optimiser step, over all
microbatches and data-parallel ranks, and the microbatches' losses add up to the batch's: how it was split changes
nothing. Left out, the count is this call's own, right where the call sees the whole batch. Where data-parallel ranks
*average* their gradients (DDP, FSDP), multiply the loss by their number. A batch with nothing in its mask gives 0, with
gradient 0.
"""

from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos._ratio import sequence_mean


@keywords
def token_mean(loss: Tensor, mask: Tensor, *, num_tokens: float | Tensor | None = None) -> Tensor:
    """Return the scalar sum(loss) / num_tokens: every token weighs the same (DAPO).

    Args:
        loss: [B, T], floating.
        mask: [B, T], bool.
        num_tokens: True positions of the whole batch's mask: a number or a 0-d tensor.

    Raises: DtypeError, ShapeError, SettingError (num_tokens < 0).
    Example: loss [[1, 2], [6, 0]], mask 11, 10: (1 + 2 + 6) / 3 = 3.
    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.3.
    """
    (loss,) = _check.tokens("token_mean", mask, loss=loss)
    return loss.sum() / _count("token_mean", "num_tokens", num_tokens, mask)


@keywords
def sequence_mean_token_mean(loss: Tensor, mask: Tensor, *, num_sequences: float | Tensor | None = None) -> Tensor:
    """Return the scalar sum over rows of (the row's mean over its tokens) / num_sequences (GRPO, GSPO).

    Args:
        loss: [B, T], floating.
        mask: [B, T], bool.
        num_sequences: rows of the whole batch with a True position: a number or a 0-d tensor.

    Raises: DtypeError, ShapeError, SettingError (num_sequences < 0).
    Example: loss [[1, 2], [6, 0]], mask 11, 10: (1.5 + 6) / 2 = 3.75.
    Source: Shao et al. 2024 (arXiv 2402.03300), eq. 3.
    """
    (loss,) = _check.tokens("sequence_mean_token_mean", mask, loss=loss)
    count = _count("sequence_mean_token_mean", "num_sequences", num_sequences, mask.any(1))
    return sequence_mean(loss, mask).sum() / count


@keywords
def sequence_mean_token_sum(loss: Tensor, mask: Tensor, *, num_sequences: float | Tensor | None = None) -> Tensor:
    """Return the scalar sum(loss) / num_sequences: a row weighs by its length (REINFORCE, whose sum over time it is).

    Args: as `sequence_mean_token_mean`. Raises: the same.
    Example: loss [[1, 2], [6, 0]], mask 11, 10: (3 + 6) / 2 = 4.5.
    Source: Sutton and Barto, section 13.3.
    """
    (loss,) = _check.tokens("sequence_mean_token_sum", mask, loss=loss)
    return loss.sum() / _count("sequence_mean_token_sum", "num_sequences", num_sequences, mask.any(1))


@keywords
def fixed_length(loss: Tensor, mask: Tensor, *, length: int, num_sequences: float | Tensor | None = None) -> Tensor:
    """Return the scalar sum(loss) / (length * num_sequences), one length for every batch (Dr.GRPO).

    Args:
        loss: [B, T], floating.
        mask: [B, T], bool.
        length: tokens, 1 or more: the longest response allowed, a constant of the run and not of the batch.
        num_sequences: as in `sequence_mean_token_mean`.

    Raises: DtypeError, ShapeError, SettingError. Example: loss [[1, 2], [6, 0]], mask 11, 10, length 3: 9 / 6 = 1.5.
    Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2.
    """
    _check.at_least("fixed_length", "length", length, 1)
    (loss,) = _check.tokens("fixed_length", mask, loss=loss)
    return loss.sum() / (length * _count("fixed_length", "num_sequences", num_sequences, mask.any(1)))


def _count(function: str, name: str, given: float | Tensor | None, marks: Tensor) -> float | Tensor:
    """Return the count to divide by: the one given, or that of the True marks; 1 where it is 0, and the sum too."""
    if given is None:
        return marks.sum().clamp_min(1)
    _check.scalar(function, name, given)
    if not isinstance(given, Tensor):
        _check.at_least(function, name, given, 0)
    return given.clamp_min(1) if isinstance(given, Tensor) else max(given, 1)
