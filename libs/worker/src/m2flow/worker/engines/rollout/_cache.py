"""Keys and values during generation: of a packed prefill, then of rows that branch and leave."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GROW_POSITIONS = 64


class PrefillCapture:
    """Keeps the keys and values that a prefill computes, [1, KH, N, D] per layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        assert layer == len(self.keys)
        self.keys.append(key)
        self.values.append(value)
        return key, value


class RowCache:
    """Keys and values of independent rows, [rows, KH, capacity, D] per layer; each row has its own length."""

    def __init__(self, prefill: PrefillCapture, paths: Sequence[NDArray[np.int64]]) -> None:
        """Row r starts as the prefill's nodes `paths[r]`, in that order."""
        self.lengths = torch.tensor([len(path) for path in paths])
        longest = int(self.lengths.max())
        nodes = np.zeros((len(paths), longest + _GROW_POSITIONS), dtype=np.int64)
        for row, path in enumerate(paths):
            nodes[row, : len(path)] = path
        # Positions past a row's length repeat node 0: finite numbers, which the mask hides.
        index = torch.from_numpy(nodes)
        self._keys = [key[0][:, index].transpose(0, 1).contiguous() for key in prefill.keys]
        self._values = [value[0][:, index].transpose(0, 1).contiguous() for value in prefill.values]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Become the given rows: one named twice branches, one not named leaves."""
        if list(rows) == list(range(self.num_rows)):
            return
        index = torch.tensor(rows)
        self.lengths = self.lengths[index]
        for store in (self._keys, self._values):
            device_index = index.to(store[0].device)
            for layer, tensor in enumerate(store):
                store[layer] = tensor.index_select(0, device_index)

    def start_step(self) -> Tensor:
        """Make room for one more position in each row; returns the additive mask [rows, 1, 1, longest] of the step."""
        self._longest = int(self.lengths.max()) + 1
        if self._longest > self._keys[0].shape[2]:
            for store in (self._keys, self._values):
                for layer, tensor in enumerate(store):
                    extra = max(_GROW_POSITIONS, tensor.shape[2] // 2)
                    store[layer] = torch.nn.functional.pad(tensor, (0, 0, 0, extra))
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
