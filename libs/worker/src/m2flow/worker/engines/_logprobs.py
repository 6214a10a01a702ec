"""Log-probabilities of chosen tokens from hidden states, without keeping logits of the whole vocabulary."""

from typing import Any

import torch
from torch import Tensor

# Logits of one chunk, in numbers: 64 MB of float32. A microbatch that fits in one keeps its probabilities for the
# backward pass; a larger one computes each chunk's again.
_CHUNK_LOGITS = 1 << 24


class _PairLogprobs(torch.autograd.Function):
    """See `pair_logprobs`. Written by hand because autograd would keep four copies of the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, rows: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(rows), dtype=torch.float32)
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        chunks = _chunks(len(hidden), head.shape[0])
        for start, stop in chunks:
            logs, probabilities = _distribution(hidden[start:stop], head, temperature)
            here = (rows >= start) & (rows < stop)
            logprobs[here] = logs[rows[here] - start, tokens[here]]
            # A token whose probability is 0 in float32 has entropy 0 times minus a finite number.
            entropy[start:stop] = -torch.linalg.vecdot(probabilities, logs)
        ctx.save_for_backward(hidden, head, rows, tokens)
        ctx.temperature = temperature
        ctx.kept = probabilities if len(chunks) == 1 and hidden.requires_grad else None
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, rows, tokens = ctx.saved_tensors
        pair_grad = grads[0] / ctx.temperature
        row_grad = pair_grad.new_zeros(len(hidden)).index_add_(0, rows, pair_grad)
        hidden_grad, head_grad = torch.empty_like(hidden), None
        for start, stop in _chunks(len(hidden), head.shape[0]):
            probabilities = ctx.kept
            if probabilities is None:
                _, probabilities = _distribution(hidden[start:stop], head, ctx.temperature)
            # d logprob(token) / d logits = onehot(token) - probabilities, over the temperature.
            logit_grad = probabilities.mul_(-row_grad[start:stop, None])
            here = (rows >= start) & (rows < stop)
            logit_grad.index_put_((rows[here] - start, tokens[here]), pair_grad[here], accumulate=True)
            logit_grad = logit_grad.to(hidden.dtype)
            torch.matmul(logit_grad, head, out=hidden_grad[start:stop])
            part = hidden[start:stop]
            head_grad = logit_grad.T @ part if head_grad is None else head_grad.addmm_(logit_grad.T, part)
        ctx.kept = None
        return hidden_grad, head_grad, None, None, None


def _chunks(num_rows: int, vocabulary: int) -> list[tuple[int, int]]:
    size = max(1, _CHUNK_LOGITS // vocabulary)
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _distribution(hidden: Tensor, head: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ head.T / temperature) and its exponential, float32 [rows, V]."""
    logs = log_softmax_(hidden @ head.T, temperature)
    return logs, logs.exp()


def log_softmax_(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of [R, V] in float32, in place where the input is; 0 is a temperature of 1."""
    logits = logits.float()
    if temperature not in (0.0, 1.0):
        logits /= temperature
    return logits.sub_(torch.logsumexp(logits, dim=-1, keepdim=True))


def pair_logprobs(
    hidden: Tensor, head: Tensor, rows: Tensor, tokens: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprob of token m after hidden row m's state, and the entropy of each row's distribution.

    Args:
      hidden: [R, E], R >= 1; head: [V, E]. Differentiable in both.
      rows: int64 [M] in [0, R); tokens: int64 [M] in [0, V).
      temperature: logits are divided by it; above 0.
    Returns: logprobs float32 [M]; entropy float32 [R], in nats, not differentiable.
    """
    logprobs, entropy = _PairLogprobs.apply(hidden, head, rows, tokens, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy
