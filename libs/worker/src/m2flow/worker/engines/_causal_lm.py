"""A transformers causal language model, loaded for the engines and called on packed rows."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from m2flow.worker.engines import _attention
from m2flow.worker.engines._trie import TokenTrie

# Loading swaps defaults of the whole process; ranks that are threads load at the same time.
_LOADING = threading.Lock()


class CausalLM:
    """The decoder and the vocabulary projection of a model, apart: hidden states first, logits only where needed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.decoder: nn.Module = model.base_model  # type: ignore[assignment]

    @property
    def head(self) -> Tensor:
        """The vocabulary projection [V, E]; where parameters are cut over ranks, whole within a forward pass alone."""
        weight: Tensor = self.model.get_output_embeddings().weight  # type: ignore[operator]
        return weight

    @classmethod
    def load(cls, path: Path, *, dtype: torch.dtype, device: torch.device) -> "CausalLM":
        """Read an HF model directory; raises FileNotFoundError with what is missing. No download is tried."""
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"model {path}: no config.json there, want a Hugging Face model directory")
        with _LOADING, _no_progress_bar():
            model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=_attention.NAME, local_files_only=True
            )
        model.to(device)
        return cls(model.train(False))

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def block_classes(self) -> tuple[str, ...]:
        """The names of the classes that its layers are of."""
        names: Any = self.model._no_split_modules
        return tuple(names or ())

    def hidden(self, tokens: Tensor, positions: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
        """Hidden states [B, T, E] of tokens [B, T] at positions [B, T], int64, under a mask [B or 1, 1, T, S]."""
        outputs = self.decoder(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False, **kwargs)
        hidden: Tensor = outputs.last_hidden_state
        return hidden

    def hidden_of(self, trie: TokenTrie, nodes: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """Hidden states [N, E] of `nodes` of `trie`, in rising order; of all unless given.

        Where nodes are left out, a `kv_store` has their keys and values.
        """
        chosen = range(len(trie)) if nodes is None else nodes
        tokens = torch.tensor([[trie.tokens[node] for node in chosen]], device=self.device)
        positions = torch.tensor([[trie.depths[node] for node in chosen]], device=self.device)
        mask = additive(trie.visible(nodes), self.head.dtype, self.device)
        return self.hidden(tokens, positions, mask[None, None], **kwargs)[0]


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading takes under a second, and many ranks load at once."""
    bars: Any = logging  # typed in some releases of transformers, untyped in others
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def additive(visible: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where `visible`, minus infinity elsewhere, in `dtype`, of the same shape."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~torch.from_numpy(visible).to(device), float("-inf"))
