"""The attention function of the torch engines, entered into transformers' table under one name.

transformers hands every keyword of a model call on to the attention function. So the engines' caches travel as a
keyword (`kv_store`), and no cache class of any transformers version is involved.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "m2flow"

# Below this many query positions the plain products beat torch's fused CPU kernel, and the scores are small.
_EAGER_MAX_SCORES = 1 << 21


class KVStore(Protocol):
    """Keys and values of earlier positions, one layer at a time."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store this step's key and value [B, KH, T, D]; returns all that the step attends to, [B, KH, S, D]."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv_store: KVStore | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, H, T, D] over key and value [B, KH, S, D]; returns ([B, T, H, D], None).

    `attention_mask` is additive, [B or 1, 1, T, S], or None. H is a multiple of KH: query heads that share a key head
    go through one product instead of a repeated key. Of what else transformers passes nothing counts here: dropout is 0
    in the engines, which keep their models in eval mode.
    """
    if kv_store is not None:
        key, value = kv_store.update(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    batch, heads, length, dim = query.shape
    kv_heads, seen = key.shape[1], key.shape[2]
    if batch * heads * length * seen > _EAGER_MAX_SCORES:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=heads != kv_heads
        )
        return mixed.transpose(1, 2), None
    grouped = (batch, kv_heads, heads // kv_heads, length)
    scores = torch.matmul((query * scaling).reshape(batch, kv_heads, -1, dim), key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores.view(*grouped, seen) + attention_mask[:, :, None]
    weights = torch.softmax(scores, dim=-1).view(batch, kv_heads, -1, seen)
    mixed = torch.matmul(weights, value).view(batch, heads, length, dim)
    return mixed.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
