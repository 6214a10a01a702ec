"""The linear recurrence behind returns and GAE, run backward in time."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 16


def onward(x: Tensor, decay: Tensor, last: Tensor) -> Tensor:
    """Return what enters each step from its right: y[:, t+1] [B, T], where y[:, t] = x[:, t] + decay[:, t] * y[:, t+1].

    y[:, T] = last [B]. A decay of 0 (an episode's end) is exact: nothing is divided.
    """
    return _onward(x.t().contiguous(), decay.t().contiguous(), last).t().contiguous()


def _onward(x: Tensor, decay: Tensor, last: Tensor) -> Tensor:
    """Return the same with time first, [T, B].

    A loop over T steps makes T small kernels. Here time is cut into blocks of 16; one loop of 16 steps scans all blocks
    at once and keeps the product of the decays from each step to its block's end. What enters the blocks is then the
    same problem, 16 times shorter, and each block adds what enters it.
    """
    length, batch = x.shape
    if length <= 2 * _BLOCK:
        return torch.stack([*_steps(x[1:].unbind(), decay[1:].unbind(), last), last]) if length else x
    blocks = -(-length // _BLOCK)
    if extra := blocks * _BLOCK - length:
        # The padding stands to the right of time: it hands on what enters.
        x, decay = pad(x, (0, 0, 0, extra)), pad(decay, (0, 0, 0, extra), value=1.0)
    steps, decays = (z.view(blocks, _BLOCK, batch).unbind(1) for z in (x, decay))
    local = [*_steps(steps[:-1], decays[:-1], steps[-1]), steps[-1]]
    reach = [decays[-1]]
    for step in reversed(decays[:-1]):
        reach.append(step * reach[-1])
    reach.reverse()
    entering = _onward(local[0], reach[0], last)
    inside = [torch.addcmul(y, span, entering) for y, span in zip(local[1:], reach[1:], strict=True)]
    return torch.stack([*inside, entering], 1).view(blocks * _BLOCK, batch)[:length]


def _steps(x: tuple[Tensor, ...], decay: tuple[Tensor, ...], last: Tensor) -> list[Tensor]:
    """Return y of each step, by a plain loop."""
    y = [last]
    for step, factor in zip(reversed(x), reversed(decay), strict=True):
        y.append(torch.addcmul(step, factor, y[-1]))
    return y[:0:-1]
