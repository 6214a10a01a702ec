"""The one check that reads data, kept apart so that compiled code has no branch that depends on it."""

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos._keywords import keywords
from m2flow.algos.errors import NonFiniteError, ShapeError


@keywords
def check_finite(x: Tensor, name: str, mask: Tensor | None = None) -> None:
    """Raise NonFiniteError that names the first NaN or infinity of `x`, in row order; otherwise do nothing.

    Args:
        x: any shape, floating.
        name: what to call it in the error.
        mask: bool, the shape of `x`'s leading dimensions; places outside it are not looked at. Absent: all are.

    Reads the data, so on a GPU it waits for it, and `torch.compile` breaks its graph here: call it outside.
    Raises: NonFiniteError, DtypeError, ShapeError. Example: "logprobs[0, 2] is nan, and 1 more of 6 are not finite:
    ...".
    Source: none.
    """
    wrong = ~torch.isfinite(_check.floating("check_finite", name, x))
    total = x.numel()
    if mask is not None:
        _check.boolean("check_finite", "mask", mask)
        if mask.shape != x.shape[: mask.ndim]:
            raise ShapeError(
                f"check_finite: mask has shape {list(mask.shape)}, want the first dimensions of {name}, "
                f"{list(x.shape)}: pass the mask of its rows and steps"
            )
        inside = mask.view(*mask.shape, *[1] * (x.ndim - mask.ndim)).expand_as(x)
        wrong, total = wrong & inside, int(inside.sum())
    if not wrong.any():
        return
    places = wrong.nonzero()
    first = tuple(places[0].tolist())
    more = f", and {len(places) - 1} more of {total} are not finite" if len(places) > 1 else f", of {total}"
    raise NonFiniteError(
        f"{name}[{', '.join(map(str, first))}] is {x[first].item()}{more}: want finite numbers; look at what made it "
        "(a learning rate, a division by 0, a log of 0, 16-bit overflow), or leave the place out of the mask"
    )
