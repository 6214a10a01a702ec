"""Token log-probability, entropy and KL from logits [B, T, V]: operators that work in pieces and recompute backward.

They are custom operators, so `torch.compile` calls them as they are: no graph break, and no loop unrolled into the
graph. What is kept for the backward is a number or two a row; the softmax is made again from the logits, piece by
piece.
"""

from typing import Any

import torch
from torch import Tensor

from m2flow.algos._rows import LOWEST, Rows, compute_dtype


@torch.library.custom_op("m2flow_algos::token_logprobs", mutates_args=())
def token_logprobs_op(
    logits: Tensor, tokens: Tensor, mask: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprobs, entropy, log of the normaliser), each [B, T] and 0 outside the mask; no entropy: 0."""
    rows, dtype = Rows(mask, logits.shape[-1]), compute_dtype(logits)
    picked = rows.tokens(tokens, logits.shape[-1])
    logprobs, entropy, norm = (torch.zeros(rows.count, dtype=dtype, device=logits.device) for _ in range(3))
    buffers = [rows.buffer(logits, dtype) for _ in range(1 + with_entropy)]
    for n in rows.pieces():
        x = _scaled(rows.take(logits, n, buffers[0]), temperature)
        own = x.gather(1, picked[n, None]).squeeze(1)
        top = x.amax(1)
        x.sub_(top[:, None])
        if with_entropy:
            x.clamp_(min=LOWEST)
            weights = torch.exp(x, out=buffers[1][: len(x)])
            total = weights.sum(1)
            entropy[n] = total.log() - weights.mul_(x).sum(1) / total
        else:
            total = x.exp_().sum(1)
        norm[n] = top + total.log()
        logprobs[n] = own - top - total.log()
    return rows.put(logprobs), rows.put(entropy), rows.put(norm)


@torch.library.custom_op("m2flow_algos::token_logprobs_backward", mutates_args=())
def token_logprobs_backward_op(
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    entropy: Tensor,
    norm: Tensor,
    temperature: float,
    with_entropy: bool,
) -> Tensor:
    """Return the gradient [B, T, V]: (g * (onehot - p) - h * p * (log p + H)) / temperature; 0 outside the mask."""
    rows, dtype = Rows(mask, logits.shape[-1]), compute_dtype(logits)
    grad, picked = rows.blank(logits), rows.pick(tokens)
    g, h = rows.pick(grad_logprobs) / temperature, rows.pick(grad_entropy) / temperature
    ent, lse = rows.pick(entropy), rows.pick(norm)
    # An entropy that is only looked at has a gradient of zeros, and costs nothing here.
    with_entropy = with_entropy and bool(h.any())
    buffers = [rows.buffer(logits, dtype) for _ in range(1 + with_entropy)]
    for n in rows.pieces():
        x = _scaled(rows.take(logits, n, buffers[0]), temperature).sub_(lse[n, None])
        if with_entropy:
            p = torch.exp(x.clamp_(min=LOWEST), out=buffers[1][: len(x)])
            x.mul_(-h[n, None]).sub_((h * ent + g)[n, None]).mul_(p)
        else:
            x.exp_().mul_(-g[n, None])
        x.scatter_add_(1, picked[n, None], g[n, None])
        rows.write(grad, n, x)
    return grad


@token_logprobs_op.register_fake
def _(
    logits: Tensor, tokens: Tensor, mask: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    row = torch.empty(tokens.shape, dtype=compute_dtype(logits), device=logits.device)
    return row, torch.empty_like(row), torch.empty_like(row)


@token_logprobs_backward_op.register_fake
def _(
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    entropy: Tensor,
    norm: Tensor,
    temperature: float,
    with_entropy: bool,
) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _keep_token_logprobs(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float, bool], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    logits, tokens, mask, ctx.temperature, ctx.with_entropy = inputs
    ctx.save_for_backward(logits, tokens, mask, output[1], output[2])


def _token_logprobs_gradient(ctx: Any, g: Tensor, h: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    grad = token_logprobs_backward_op(g, h, *ctx.saved_tensors, ctx.temperature, ctx.with_entropy)
    return grad, None, None, None, None


token_logprobs_op.register_autograd(_token_logprobs_gradient, setup_context=_keep_token_logprobs)


@torch.library.custom_op("m2flow_algos::full_kl", mutates_args=())
def full_kl_op(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (KL(p || q), log normaliser of p, log normaliser of q), each [B, T] and 0 outside the mask."""
    rows, dtype = Rows(mask, logits.shape[-1]), compute_dtype(logits, ref_logits)
    divergence, norm, ref_norm = (torch.zeros(rows.count, dtype=dtype, device=logits.device) for _ in range(3))
    buffers = rows.buffer(logits, dtype), rows.buffer(logits, dtype)
    for n in rows.pieces():
        x, y = rows.take(logits, n, buffers[0]), rows.take(ref_logits, n, buffers[1])
        norm[n], ref_norm[n] = x.logsumexp(1), y.logsumexp(1)
        log_p = x.sub_(norm[n, None]).clamp_(min=LOWEST)
        log_q = y.sub_(ref_norm[n, None]).clamp_(min=LOWEST)
        divergence[n] = log_q.sub_(log_p).mul_(log_p.exp_()).sum(1).neg_()
    return rows.put(divergence), rows.put(norm), rows.put(ref_norm)


@torch.library.custom_op("m2flow_algos::full_kl_backward", mutates_args=())
def full_kl_backward_op(
    grad: Tensor,
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor,
    divergence: Tensor,
    norm: Tensor,
    ref_norm: Tensor,
    need: list[bool],
) -> tuple[Tensor, Tensor]:
    """Return the gradients g * p * (log p - log q - KL) and g * (q - p), each [B, T, V], or empty where not needed."""
    rows, dtype = Rows(mask, logits.shape[-1]), compute_dtype(logits, ref_logits)
    grads = [rows.blank(x) if wanted else x.new_empty(0) for x, wanted in zip((logits, ref_logits), need, strict=True)]
    g, kl, lse, ref_lse = (rows.pick(x) for x in (grad, divergence, norm, ref_norm))
    buffers = [rows.buffer(logits, dtype) for _ in range(3)]
    for n in rows.pieces():
        log_p = rows.take(logits, n, buffers[0]).sub_(lse[n, None]).clamp_(min=LOWEST)
        log_q = rows.take(ref_logits, n, buffers[1]).sub_(ref_lse[n, None]).clamp_(min=LOWEST)
        p = torch.exp(log_p, out=buffers[2][: len(log_p)])
        if need[1]:
            rows.write(grads[1], n, log_q.exp().sub_(p).mul_(g[n, None]))
        if need[0]:
            x = log_p.sub_(log_q).sub_(kl[n, None]).mul_(p).mul_(g[n, None])
            rows.write(grads[0], n, x)
    return grads[0], grads[1]


@full_kl_op.register_fake
def _(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row = torch.empty(mask.shape, dtype=compute_dtype(logits, ref_logits), device=logits.device)
    return row, torch.empty_like(row), torch.empty_like(row)


@full_kl_backward_op.register_fake
def _(
    grad: Tensor,
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor,
    divergence: Tensor,
    norm: Tensor,
    ref_norm: Tensor,
    need: list[bool],
) -> tuple[Tensor, Tensor]:
    shapes = [logits.shape if need[0] else (0,), logits.shape if need[1] else (0,)]
    return logits.new_empty(shapes[0]), ref_logits.new_empty(shapes[1])


def _keep_full_kl(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _full_kl_gradient(ctx: Any, g: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    need = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
    grads = full_kl_backward_op(g, *ctx.saved_tensors, need)
    return grads[0] if need[0] else None, grads[1] if need[1] else None, None


full_kl_op.register_autograd(_full_kl_gradient, setup_context=_keep_full_kl)


def _scaled(x: Tensor, temperature: float) -> Tensor:
    """Return `x`, divided by the temperature in place."""
    return x if temperature == 1.0 else x.div_(temperature)
