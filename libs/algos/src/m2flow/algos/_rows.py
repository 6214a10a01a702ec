"""Rows of [B, T, V] that lie in a mask, a piece at a time, so that no float32 copy of the whole is ever held."""

from collections.abc import Iterator

import torch
from torch import Tensor

from m2flow.algos.errors import SettingError

# Elements of one float32 piece: on a CPU two of them stay in cache, on a GPU one fills the device.
_PIECE = {"cpu": 1 << 18, "cuda": 1 << 24}

# Below any gap between two logits that leaves a probability over 0, even in float64, and far from the infinities, which
# would meet a probability of 0 and make NaN.
LOWEST = -1e4


def compute_dtype(*operands: Tensor) -> torch.dtype:
    """Return float64 where an operand has it, else float32."""
    return torch.float64 if any(x.dtype is torch.float64 for x in operands) else torch.float32


class Rows:
    """The rows of [B, T, V] tensors at the True positions of a mask [B, T]; in the order of positions, N of them."""

    def __init__(self, mask: Tensor, width: int) -> None:
        """Find the rows, and how many of them, each `width` long, make a piece."""
        self._all = bool(mask.all())
        self._shape = mask.shape
        self._at = mask.flatten().nonzero().squeeze(1)
        self._outside = (~mask).flatten().nonzero().squeeze(1)
        self.count = len(self._at)
        self.piece = max(1, _PIECE.get(mask.device.type, 1 << 20) // max(1, width))

    def pieces(self) -> Iterator[slice]:
        """Yield, piece by piece, which of the N rows it holds."""
        for start in range(0, self.count, self.piece):
            yield slice(start, min(start + self.piece, self.count))

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return room for a piece of `like` [B, T, V] in `dtype`: touching fresh memory costs more than computing."""
        return torch.empty(min(self.piece, self.count), like.shape[2], dtype=dtype, device=like.device)

    def take(self, x: Tensor, piece: slice, buffer: Tensor) -> Tensor:
        """Return a copy of the piece's rows of `x` [B, T, V], made in `buffer`."""
        into, at = buffer[: piece.stop - piece.start], self._at[piece]
        if not x.is_contiguous():
            # A view such as logits[:, :-1] has no form of two dimensions without a copy of the whole.
            return into.copy_(x[at // self._shape[1], at % self._shape[1]])
        rows = x.view(-1, x.shape[2])
        if self._all:
            return into.copy_(rows[piece])
        if x.dtype is into.dtype:
            return torch.index_select(rows, 0, at, out=into)
        return into.copy_(rows.index_select(0, at))

    def write(self, out: Tensor, piece: slice, x: Tensor) -> None:
        """Put the piece's rows in their places in `out` [B, T, V], which `blank` made."""
        rows = out.view(-1, out.shape[2])
        if self._all:
            rows[piece].copy_(x)
        else:
            rows.index_copy_(0, self._at[piece], x.to(out.dtype))

    def blank(self, like: Tensor) -> Tensor:
        """Return a tensor of the shape and dtype of `like` [B, T, V]: 0 outside the mask, anything inside."""
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        out.view(-1, out.shape[2]).index_fill_(0, self._outside, 0.0)
        return out

    def pick(self, x: Tensor) -> Tensor:
        """Return the N rows of `x` [B, T, ...]."""
        return x.flatten(0, 1) if self._all else x.flatten(0, 1)[self._at]

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

    def put(self, x: Tensor) -> Tensor:
        """Return [B, T, ...] with the N rows of `x` in their places and 0 elsewhere."""
        whole = x
        if not self._all:
            whole = x.new_zeros(self._shape.numel(), *x.shape[1:])
            whole[self._at] = x
        return whole.view(*self._shape, *x.shape[1:])
