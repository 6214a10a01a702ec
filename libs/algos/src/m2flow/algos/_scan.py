"""The linear recurrence behind returns and GAE, run backward in time."""

import torch
from torch import Tensor

_BLOCK = 16


def reverse_scan(x: Tensor, decay: Tensor) -> Tensor:
    """Return y [B, T] with y[:, t] = x[:, t] + decay[:, t] * y[:, t+1] and y[:, T] = 0.

    A loop over T columns makes T small kernels. Here each row is cut into blocks of 16; one loop of 16 steps scans all
    blocks at once and keeps the product of the decays from each step to its block's end; the blocks' first values are a
    scan 16 times shorter, done the same way; and each block adds what enters from its right. Nothing is divided, so
    a decay of 0 (an episode's end) is exact.
    """
    batch, length = x.shape
    if length <= 2 * _BLOCK:
        return torch.stack(_columns(list(x.unbind(1)), list(decay.unbind(1))), 1) if length else x
    padding = (0, -length % _BLOCK)
    blocks = -(-length // _BLOCK)
    # [16, B, blocks]: one step of every block lies together in memory.
    steps = torch.nn.functional.pad(x, padding).view(batch, blocks, _BLOCK).permute(2, 0, 1).contiguous()
    decays = torch.nn.functional.pad(decay, padding).view(batch, blocks, _BLOCK).permute(2, 0, 1).contiguous()
    local = _columns(list(steps.unbind(0)), list(decays.unbind(0)))
    reach = [decays[-1]]
    for step in range(_BLOCK - 2, -1, -1):
        reach.append(decays[step] * reach[-1])
    reach.reverse()
    heads = reverse_scan(local[0], reach[0])
    entering = torch.nn.functional.pad(heads[:, 1:], (0, 1))
    whole = torch.stack([y + span * entering for y, span in zip(local, reach, strict=True)], 2)
    return whole.view(batch, blocks * _BLOCK)[:, :length]


def _columns(x: list[Tensor], decay: list[Tensor]) -> list[Tensor]:
    """Return the scan of a list of columns, by a plain loop."""
    y = [x[-1]]
    for step in range(len(x) - 2, -1, -1):
        y.append(x[step] + decay[step] * y[-1])
    y.reverse()
    return y
