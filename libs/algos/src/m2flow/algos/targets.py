"""Target networks: slow copies that a bootstrapped value is read from."""

import torch
from torch import nn

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos.errors import ShapeError


@keywords
def update(target: nn.Module, source: nn.Module, *, tau: float) -> None:
    """Move each parameter of `target` to (1 - tau) * target + tau * source, in place; buffers are copied.

    Args:
        target, source: modules with the same names, shapes and dtypes of parameters and buffers.
        tau: in [0, 1]; 1 copies.

    Raises: ShapeError where these differ, before anything is changed; SettingError. No gradient.
    Example: target 0, source 1, tau 0.25: 0.25, then 0.4375.
    Source: Lillicrap et al. 2015 (DDPG, arXiv 1509.02971).
    """
    _check.within("update", "tau", tau, 0.0, 1.0)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = ({name: (list(x.shape), x.dtype) for name, x in getattr(m, kind)()} for m in (target, source))
        if ours != theirs:
            wrong = next(name for name in sorted({**ours, **theirs}) if ours.get(name) != theirs.get(name))
            raise ShapeError(
                f"update: {wrong} is {ours.get(wrong)} in target and {theirs.get(wrong)} in source, want the same: "
                "make target a copy.deepcopy of source"
            )
    with torch.no_grad():
        sources = dict(source.named_parameters())
        for name, parameter in target.named_parameters():
            parameter.lerp_(sources[name], tau)
        buffers = dict(source.named_buffers())
        for name, buffer in target.named_buffers():
            buffer.copy_(buffers[name])
