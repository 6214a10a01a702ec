"""Token log-probability and entropy from hidden states and the head's weight, a slice of the vocabulary at a time.

The logits [N, V] never exist: forward and backward make them slice by slice, [N, slice], and keep the running maximum,
normaliser and weighted sum of each row. A custom operator, for the reasons given in `_vocab`.
"""

from typing import Any

import torch
from torch import Tensor

from m2flow.algos._rows import LOWEST, Rows, compute_dtype

# Elements of one float32 slice of the logits; a slice of the vocabulary is never so narrow that the matrix product
# suffers.
_SLICE = 1 << 23
_NARROWEST = 512


@torch.library.custom_op("m2flow_algos::linear_logprobs", mutates_args=())
def linear_logprobs_op(
    hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprobs, entropy, log of the normaliser), each [B, T] and 0 outside the mask."""
    rows, dtype = Rows(mask, hidden.shape[-1]), compute_dtype(hidden)
    states, picked = rows.pick(hidden), rows.tokens(tokens, weight.shape[0])
    own = torch.zeros(rows.count, dtype=dtype, device=hidden.device)
    top = torch.full_like(own, LOWEST)
    total, weighted = torch.zeros_like(own), torch.zeros_like(own)
    for start, head in _slices(weight, rows.count):
        x = _logits(states, head, dtype, temperature)
        here, column = _owned(picked, start, head)
        own = torch.where(here, x.gather(1, column).squeeze(1), own)
        higher = torch.maximum(top, x.amax(1))
        # Both sums are of exp(x - top): move what is there to the new top, then add the slice's.
        shrink = (top - higher).exp()
        weighted = shrink * (weighted + (top - higher) * total)
        x.sub_(higher[:, None]).clamp_(min=LOWEST)
        share = x.exp()
        total = shrink * total + share.sum(1)
        weighted = weighted + share.mul_(x).sum(1)
        top = higher
    norm = top + total.log()
    entropy = total.log() - weighted / total
    return rows.put(own - norm), rows.put(entropy), rows.put(norm)


@torch.library.custom_op("m2flow_algos::linear_logprobs_backward", mutates_args=())
def linear_logprobs_backward_op(
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor,
    entropy: Tensor,
    norm: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden [B, T, H] and weight [V, H]."""
    rows, dtype = Rows(mask, hidden.shape[-1]), compute_dtype(hidden)
    states, picked = rows.pick(hidden), rows.pick(tokens)
    g, h = rows.pick(grad_logprobs) / temperature, rows.pick(grad_entropy) / temperature
    ent, lse = rows.pick(entropy), rows.pick(norm)
    grad_states = torch.zeros(states.shape, dtype=dtype, device=states.device)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    for start, head in _slices(weight, rows.count):
        x = _logits(states, head, dtype, temperature).sub_(lse[:, None]).clamp_(min=LOWEST)
        p = x.exp()
        x.add_(ent[:, None]).mul_(h[:, None]).add_(g[:, None]).mul_(p).neg_()
        here, column = _owned(picked, start, head)
        x.scatter_add_(1, column, (g * here)[:, None])
        x = x.to(hidden.dtype)
        grad_states += x @ head
        grad_weight[start : start + head.shape[0]] = x.T @ states
    return rows.put(grad_states.to(hidden.dtype)), grad_weight


@linear_logprobs_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    row = torch.empty(mask.shape, dtype=compute_dtype(hidden), device=hidden.device)
    return row, torch.empty_like(row), torch.empty_like(row)


@linear_logprobs_backward_op.register_fake
def _(
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor,
    entropy: Tensor,
    norm: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _keep(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    *tensors, ctx.temperature = inputs
    ctx.save_for_backward(*tensors, output[1], output[2])


def _gradient(ctx: Any, g: Tensor, h: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    grad_hidden, grad_weight = linear_logprobs_backward_op(g, h, *ctx.saved_tensors, ctx.temperature)
    return grad_hidden, grad_weight, None, None, None


linear_logprobs_op.register_autograd(_gradient, setup_context=_keep)


def _slices(weight: Tensor, num_rows: int) -> list[tuple[int, Tensor]]:
    """Return (first id, weight of the slice) for slices of the vocabulary that keep [num_rows, slice] small."""
    width = max(_NARROWEST, _SLICE // max(1, num_rows))
    return [(start, weight[start : start + width]) for start in range(0, weight.shape[0], width)]


def _logits(states: Tensor, head: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """Return the logits [N, slice], made in the model's dtype as it would, then widened, over the temperature."""
    x = (states @ head.T).to(dtype)
    return x if temperature == 1.0 else x.div_(temperature)


def _owned(picked: Tensor, start: int, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows' tokens [N] lie in the slice, and their columns [N, 1] (0 where they do not)."""
    here = (picked >= start) & (picked < start + head.shape[0])
    return here, torch.where(here, picked - start, torch.zeros_like(picked))[:, None]
