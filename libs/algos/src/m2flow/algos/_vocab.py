"""Token log-probability, entropy and KL from logits [B, T, V]: operators that work in pieces and recompute backward.

They are custom operators, so `torch.compile` calls them as they are: no graph break, and no loop unrolled into the
graph. What is kept for the backward is a number or two a row; the softmax is made again from the logits, piece by
piece.
"""

from typing import Any

import torch
from torch import Tensor

from m2flow.algos._rows import LOWEST, Place, Rows, compute_dtype


@torch.library.custom_op("m2flow_algos::token_logprobs", mutates_args=())
def token_logprobs_op(
    logits: Tensor, tokens: Tensor, mask: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprobs, entropy, log of the normaliser), each [B, T] and 0 outside the mask; no entropy: 0."""
    rows, dtype = Rows(mask, logits), compute_dtype(logits)
    flat, picked = rows.flat(logits), rows.tokens(tokens, logits.shape[-1])
    logprobs, entropy, norm = (torch.zeros(rows.count, dtype=dtype, device=logits.device) for _ in range(3))
    for n, place in rows.places():
        x = _scaled(flat, place, dtype, temperature)
        own = x.gather(1, picked[n, None]).squeeze(1)
        top = x.amax(1)
        x.sub_(top[:, None])
        if with_entropy:
            x.clamp_(min=LOWEST)
            weights = x.exp()
            total = weights.sum(1)
            entropy[n] = total.log() - weights.mul_(x).sum(1) / total
        else:
            total = x.exp_().sum(1)
        norm[n] = top + total.log()
        logprobs[n] = own - top - total.log()
    return rows.put(logprobs, mask), rows.put(entropy, mask), rows.put(norm, mask)


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
    rows, dtype = Rows(mask, logits), compute_dtype(logits)
    whole = rows.count == mask.numel()
    grad = (torch.empty if whole else torch.zeros)(logits.shape, dtype=logits.dtype, device=logits.device)
    flat, out, picked = rows.flat(logits), rows.flat(grad), rows.pick(tokens)
    g, h = rows.pick(grad_logprobs) / temperature, rows.pick(grad_entropy) / temperature
    ent, lse = rows.pick(entropy), rows.pick(norm)
    for n, place in rows.places():
        x = _scaled(flat, place, dtype, temperature)
        x.sub_(lse[n, None])
        if with_entropy:
            p = x.clamp_(min=LOWEST).exp()
            x.add_(ent[n, None]).mul_(h[n, None]).add_(g[n, None]).mul_(p).neg_()
        else:
            x.exp_().mul_(-g[n, None])
        x.scatter_add_(1, picked[n, None], g[n, None])
        out[place] = x.to(grad.dtype)
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
    rows, dtype = Rows(mask, logits, ref_logits), compute_dtype(logits, ref_logits)
    flat, ref_flat = rows.flat(logits), rows.flat(ref_logits)
    divergence, norm, ref_norm = (torch.zeros(rows.count, dtype=dtype, device=logits.device) for _ in range(3))
    for n, place in rows.places():
        x, y = _scaled(flat, place, dtype, 1.0), _scaled(ref_flat, place, dtype, 1.0)
        norm[n], ref_norm[n] = x.logsumexp(1), y.logsumexp(1)
        log_p = x.sub_(norm[n, None]).clamp_(min=LOWEST)
        log_q = y.sub_(ref_norm[n, None]).clamp_(min=LOWEST)
        divergence[n] = log_q.sub_(log_p).mul_(log_p.exp_()).sum(1).neg_()
    return rows.put(divergence, mask), rows.put(norm, mask), rows.put(ref_norm, mask)


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
    rows, dtype = Rows(mask, logits, ref_logits), compute_dtype(logits, ref_logits)
    like = [logits if need[0] else logits.new_empty(0), ref_logits if need[1] else ref_logits.new_empty(0)]
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in like]
    outs = [rows.flat(x) if wanted else x for x, wanted in zip(grads, need, strict=True)]
    flat, ref_flat, g, kl = rows.flat(logits), rows.flat(ref_logits), rows.pick(grad), rows.pick(divergence)
    lse, ref_lse = rows.pick(norm), rows.pick(ref_norm)
    for n, place in rows.places():
        log_p = _scaled(flat, place, dtype, 1.0).sub_(lse[n, None]).clamp_(min=LOWEST)
        log_q = _scaled(ref_flat, place, dtype, 1.0).sub_(ref_lse[n, None]).clamp_(min=LOWEST)
        p = log_p.exp()
        if need[1]:
            outs[1][place] = log_q.exp().sub_(p).mul_(g[n, None]).to(ref_logits.dtype)
        if need[0]:
            outs[0][place] = log_p.sub_(log_q).sub_(kl[n, None]).mul_(p).mul_(g[n, None]).to(logits.dtype)
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


def _scaled(flat: Tensor, place: Place, dtype: torch.dtype, temperature: float) -> Tensor:
    """Return the rows at `place` in `dtype`, divided by the temperature; never a view of `flat`."""
    x = flat[place].to(dtype, copy=True)
    return x if temperature == 1.0 else x.div_(temperature)
