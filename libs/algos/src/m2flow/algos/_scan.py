"""The linear recurrence behind returns and GAE, run backward in time."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 16


def reverse_scan(x: Tensor, decay: Tensor, last: Tensor) -> Tensor:
    """Return y [B, T] with y[:, t] = x[:, t] + decay[:, t] * y[:, t+1] and y[:, T] = last [B].

    A loop over T columns makes T small kernels. Here each row is cut into blocks of 16; one loop of 16 steps scans all
    blocks at once and keeps the product of the decays from each step to its block's end; the blocks' first values are a
    scan 16 times shorter, done the same way; and each block adds what enters from its right. Nothing is divided, so a
    decay of 0 (an episode's end) is exact.
    """
    batch, length = x.shape
    if length <= 2 * _BLOCK:
        return torch.stack(_columns(list(x.unbind(1)), list(decay.unbind(1)), last), 1) if length else x
    blocks = -(-length // _BLOCK)
    extra = blocks * _BLOCK - length
    if extra:
        # The padding stands to the right of time: it hands on what enters.
        x, decay = pad(x, (0, extra)), pad(decay, (0, extra), value=1.0)
    # [16, B, blocks]: one step of every block lies together in memory.
    steps = list(x.reshape(batch, blocks, _BLOCK).permute(2, 0, 1).contiguous().unbind(0))
    decays = list(decay.reshape(batch, blocks, _BLOCK).permute(2, 0, 1).contiguous().unbind(0))
    local = [*_columns(steps[:-1], decays[:-1], steps[-1]), steps[-1]]
    reach = [decays[-1]]
    for step in reversed(decays[:-1]):
        reach.append(step * reach[-1])
    reach.reverse()
    heads = reverse_scan(local[0], reach[0], last)
    entering = torch.cat([heads[:, 1:], last[:, None]], 1)
    whole = torch.stack([torch.addcmul(y, span, entering) for y, span in zip(local, reach, strict=True)], 2)
    return whole.view(batch, blocks * _BLOCK)[:, :length]


def _columns(x: list[Tensor], decay: list[Tensor], last: Tensor) -> list[Tensor]:
    """Return the scan of a list of columns, by a plain loop."""
    y = [last]
    for column, factor in zip(reversed(x), reversed(decay), strict=True):
        y.append(torch.addcmul(column, factor, y[-1]))
    return y[:0:-1]
