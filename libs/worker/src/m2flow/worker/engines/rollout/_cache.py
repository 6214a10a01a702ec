"""Keys and values during generation: of prefixes, kept between calls; then of rows that come, branch and leave."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from m2flow.worker.engines._causal_lm import CausalLM
from m2flow.worker.engines._trie import TokenTrie

_GROW_POSITIONS = 64


class PrefixCache:
    """Keys and values of the prefixes that were prefilled with the present weights, [1, KH, capacity, D] per layer.

    A prefix tree: what prompts share, and what earlier prompts were, is there once and is not computed again.
    """

    def __init__(self, max_tokens: int) -> None:
        """Beyond `max_tokens` it starts anew, but holds what one prefill needs, however long."""
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._trie = TokenTrie()
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def count_new(self, tokens: Sequence[int]) -> int:
        """Number of tokens that have to be computed for a prompt; at least its last one."""
        return max(1, self._trie.count_new(tokens))

    def prefill(self, lm: CausalLM, prompts: Sequence[Sequence[int]]) -> tuple[list[NDArray[np.int64]], Tensor]:
        """Compute what is not there yet of prompts; returns the node numbers of each, and its last hidden state [E]."""
        if len(self._trie) + sum(map(self.count_new, prompts)) > self._max_tokens:
            self.clear()
        known = len(self._trie)
        paths = [self._trie.add(prompt) for prompt in prompts]
        last = [int(path[-1]) for path in paths]
        # The last token's hidden state is needed, so that it is computed again where the whole prompt is known.
        nodes = sorted({*range(known, len(self._trie)), *last})
        self._nodes = torch.tensor(nodes, device=lm.device)
        hidden = lm.hidden_of(self._trie, nodes, kv_store=self)
        return paths, hidden[torch.from_numpy(np.searchsorted(nodes, last)).to(lm.device)]

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`KVStore`: keeps the nodes' keys and values; returns those of all nodes, [1, KH, N, D]."""
        size = len(self._trie)
        for store, fresh in ((self._keys, key), (self._values, value)):
            if layer == len(store):
                store.append(fresh.new_zeros(1, fresh.shape[1], size + _GROW_POSITIONS, fresh.shape[3]))
            elif store[layer].shape[2] < size:
                store[layer] = pad(store[layer], (0, 0, 0, max(size - store[layer].shape[2], store[layer].shape[2])))
            store[layer][:, :, self._nodes] = fresh
        return self._keys[layer][:, :, :size], self._values[layer][:, :, :size]

    def layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, [KH, capacity, D]."""
        for key, value in zip(self._keys, self._values, strict=True):
            yield key[0], value[0]

    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return sum(tensor.nbytes for tensor in [*self._keys, *self._values])


class RowCache:
    """Keys and values of independent rows, [rows, KH, capacity, D] per layer; each row has its own length."""

    def __init__(self) -> None:
        """No rows."""
        self.clear()

    def clear(self) -> None:
        """Every row leaves."""
        self.lengths = torch.empty(0, dtype=torch.int64)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, prefix: PrefixCache, paths: Sequence[NDArray[np.int64]]) -> None:
        """Add a row for each path, which starts as those nodes of `prefix`, in that order."""
        lengths = torch.tensor([len(path) for path in paths])
        capacity = max(int(lengths.max()) + _GROW_POSITIONS, self._capacity)
        nodes = np.zeros((len(paths), capacity), dtype=np.int64)
        for row, path in enumerate(paths):
            nodes[row, : len(path)] = path
        # Positions past a row's length repeat node 0: finite numbers, which the mask hides.
        index = torch.from_numpy(nodes)
        added = [
            tuple(store[:, index.to(store.device)].transpose(0, 1).contiguous() for store in layer)
            for layer in prefix.layers()
        ]
        if self.num_rows:
            self._reserve(capacity)
            self._keys = [torch.cat([old, new]) for old, (new, _) in zip(self._keys, added, strict=True)]
            self._values = [torch.cat([old, new]) for old, (_, new) in zip(self._values, added, strict=True)]
        else:
            self._keys, self._values = [key for key, _ in added], [value for _, value in added]
        self.lengths = torch.cat([self.lengths, lengths])

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Become the given rows: one named twice branches, one not named leaves."""
        if not rows:
            self.clear()
            return
        if list(rows) == list(range(self.num_rows)):
            return
        index = torch.tensor(rows)
        self.lengths = self.lengths[index]
        for store in (self._keys, self._values):
            device_index = index.to(store[0].device)
            for layer, tensor in enumerate(store):
                store[layer] = tensor.index_select(0, device_index)

    @property
    def _capacity(self) -> int:
        return self._keys[0].shape[2] if self._keys else 0

    def _reserve(self, capacity: int) -> None:
        extra = capacity - self._capacity
        if extra > 0:
            self._keys = [pad(tensor, (0, 0, 0, extra)) for tensor in self._keys]
            self._values = [pad(tensor, (0, 0, 0, extra)) for tensor in self._values]

    def start_step(self) -> Tensor:
        """Make room for one more position in each row; returns the additive mask [rows, 1, 1, longest] of the step."""
        self._longest = int(self.lengths.max()) + 1
        if self._longest > self._capacity:
            self._reserve(self._capacity + max(_GROW_POSITIONS, self._capacity // 2))
        like = self._keys[0]
        hidden = torch.arange(self._longest)[None, :] > self.lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
        self._rows = torch.arange(self.num_rows, device=like.device)
        self._positions = self.lengths.to(like.device)
        return mask[:, None, None].to(like.device)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        return keys[:, :, : self._longest], values[:, :, : self._longest]

    def end_step(self) -> None:
        self.lengths = self.lengths + 1
