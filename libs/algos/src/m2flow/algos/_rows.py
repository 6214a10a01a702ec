"""Rows of [B, T, V] that lie in a mask, a piece at a time, so that no float32 copy of the whole is ever held."""

from collections.abc import Iterator

import torch
from torch import Tensor

from m2flow.algos.errors import SettingError

# Elements of one float32 piece: on a CPU two of them stay in cache, on a GPU one fills the device.
_PIECE = {"cpu": 1 << 19, "cuda": 1 << 24}

# Below any gap between two logits that leaves a probability over 0, even in float64, and far from the infinities, which
# would meet a probability of 0 and make NaN.
LOWEST = -1e4

Place = tuple[Tensor, Tensor] | tuple[slice]


def compute_dtype(*operands: Tensor) -> torch.dtype:
    """Return float64 where an operand has it, else float32."""
    return torch.float64 if any(x.dtype is torch.float64 for x in operands) else torch.float32


class Rows:
    """The rows of [B, T, V] tensors at the True positions of a mask [B, T]; in the order of positions, N of them."""

    def __init__(self, mask: Tensor, *wide: Tensor) -> None:
        """Find the rows of the tensors `wide` [B, T, V], and how many of them make a piece."""
        # A view such as logits[:, :-1] has no form of one dimension without a copy: its rows are found by index.
        self._all = bool(mask.all()) and all(x.is_contiguous() for x in wide)
        self._where = mask.nonzero(as_tuple=True)
        self.count = int(self._where[0].shape[0])
        self.piece = max(1, _PIECE.get(mask.device.type, 1 << 20) // max(1, wide[0].shape[-1]))

    def places(self) -> Iterator[tuple[slice, Place]]:
        """Yield, piece by piece, which of the N rows it holds and where they lie in a tensor that `flat` returned."""
        for start in range(0, self.count, self.piece):
            rows = slice(start, min(start + self.piece, self.count))
            yield rows, ((rows,) if self._all else (self._where[0][rows], self._where[1][rows]))

    def flat(self, x: Tensor) -> Tensor:
        """Return `x` in the form that places index: rows in one dimension, or as it is. Never a copy of the wide."""
        return x.reshape(-1, *x.shape[2:]) if self._all else x

    def pick(self, x: Tensor) -> Tensor:
        """Return the N rows of `x` [B, T, ...]."""
        return self.flat(x) if self._all else x[self._where]

    def tokens(self, tokens: Tensor, vocabulary: int) -> Tensor:
        """Return the N tokens of `tokens` [B, T], or raise SettingError where one is not in [0, vocabulary)."""
        picked = self.pick(tokens)
        wrong = (picked < 0) | (picked >= vocabulary)
        if wrong.any():
            raise SettingError(
                f"logprobs: a token is {int(picked[wrong][0])}, want 0 to {vocabulary - 1}: leave positions that hold "
                "no token out of the mask"
            )
        return picked

    def put(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return [B, T, ...] with the N rows of `x` in their places and 0 elsewhere."""
        if self._all:
            return x.view(*mask.shape, *x.shape[1:])
        whole = x.new_zeros(*mask.shape, *x.shape[1:])
        whole[self._where] = x
        return whole
