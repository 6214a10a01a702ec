"""Checks at the boundary of every public function: made once, of shapes and dtypes alone, so that compiling is easy."""

from torch import Size, Tensor, bfloat16, bool, float16, float64, int8, int16, int32, int64, uint8, where

from m2flow.algos.errors import DtypeError, SettingError, ShapeError

_INTEGERS = (int8, int16, int32, int64, uint8)


def tensor(function: str, name: str, x: Tensor) -> Tensor:
    """Return `x`, or raise DtypeError where it is no tensor."""
    if not isinstance(x, Tensor):
        raise DtypeError(
            f"{function}: {name} is a {type(x).__name__}, want a torch.Tensor: use torch.as_tensor({name})"
        )
    return x


def floating(function: str, name: str, x: Tensor) -> Tensor:
    """Return `x` with 16-bit floats widened to float32, so that every reduction is in float32 at least."""
    if not tensor(function, name, x).is_floating_point():
        raise DtypeError(f"{function}: {name} has dtype {x.dtype}, want a floating dtype: use {name}.float()")
    return x.float() if x.dtype in (bfloat16, float16) else x


def boolean(function: str, name: str, x: Tensor) -> Tensor:
    """Return `x`, or raise DtypeError where it is not bool (an integer mask would be read as numbers)."""
    if tensor(function, name, x).dtype is not bool:
        raise DtypeError(f"{function}: {name} has dtype {x.dtype}, want torch.bool: use {name}.bool()")
    return x


def integer(function: str, name: str, x: Tensor) -> Tensor:
    """Return `x`, or raise DtypeError where it is not of an integer dtype."""
    if tensor(function, name, x).dtype not in _INTEGERS:
        raise DtypeError(f"{function}: {name} has dtype {x.dtype}, want an integer dtype: use {name}.long()")
    return x


def rank(function: str, name: str, x: Tensor, dims: str) -> Tensor:
    """Return `x`, or raise ShapeError where its rank is not that of `dims`, such as "[B, T]"."""
    if tensor(function, name, x).ndim != dims.count(",") + 1:
        raise ShapeError(f"{function}: {name} has shape {list(x.shape)}, want {dims}: add or drop dimensions to fit")
    return x


def same_shape(function: str, name: str, x: Tensor, other_name: str, other: Tensor | Size) -> None:
    """Raise ShapeError where `x` has not the shape of `other`; nothing is broadcast in silence."""
    want = other.shape if isinstance(other, Tensor) else other
    if tensor(function, name, x).shape != want:
        if x.ndim == 1 and len(want) == 2 and x.shape[0] == want[0]:
            remedy = f"spread it over the tokens with masks.spread({name}, mask)"
        else:
            remedy = "cut or pad both to one shape (a log-probability belongs to the token it predicts)"
        raise ShapeError(f"{function}: {name} has shape {list(x.shape)}, want {list(want)} like {other_name}: {remedy}")


def token_mask(function: str, mask: Tensor) -> Tensor:
    """Return the mask, checked to be bool [B, T]."""
    return rank(function, "mask", boolean(function, "mask", mask), "[B, T]")


def tokens(function: str, mask: Tensor, **operands: Tensor) -> tuple[Tensor, ...]:
    """Return the operands, each checked to be floating [B, T] like `mask`, widened, and 0 where `mask` is False.

    Filling before the arithmetic keeps whatever lies in the padding, NaN included, out of values and gradients.
    """
    token_mask(function, mask)
    filled = []
    for name, x in operands.items():
        same_shape(function, name, x, "mask", mask)
        filled.append(where(mask, floating(function, name, x), 0.0))
    return tuple(filled)


def logits(function: str, mask: Tensor, **operands: Tensor) -> None:
    """Check that the operands are floating [B, T, V] of one shape, and `mask` bool [B, T] like them.

    They are not widened: a copy of [B, T, V] in float32 is what the functions that take them avoid.
    """
    token_mask(function, mask)
    first_name, first = next(iter(operands.items()))
    for name, x in operands.items():
        # The dtype of all is that of a slice, which floating() may copy.
        floating(function, name, rank(function, name, x, "[B, T, V]")[..., :1])
        same_shape(function, name, x, first_name, first)
    same_shape(function, "mask", mask, f"{first_name} without V", first.shape[:2])


def rows(function: str, **operands: Tensor) -> tuple[Tensor, ...]:
    """Return the operands, each checked to be [N] and of one length; floating ones are widened to float64.

    Vectors of a number a sample are small; in float64 a group's mean does not depend on the order of its members.
    """
    first_name, first = next(iter(operands.items()))
    checked = []
    for name, x in operands.items():
        rank(function, name, x, "[N]")
        same_shape(function, name, x, first_name, first)
        checked.append(x.to(float64) if x.is_floating_point() else x)
    return tuple(checked)


def scalar(function: str, name: str, x: float | Tensor) -> None:
    """Raise ShapeError where `x` is a tensor that is not 0-d: it would be broadcast; a number is as good."""
    if isinstance(x, Tensor) and x.ndim:
        raise ShapeError(
            f"{function}: {name} has shape {list(x.shape)}, want a number or a 0-d tensor: "
            f"use {name}.squeeze(), or sum what it counts"
        )


def at_least(function: str, name: str, x: float, low: float) -> None:
    """Raise SettingError where `x` is under `low` (or NaN)."""
    if not x >= low:
        raise SettingError(f"{function}: {name} is {x}, want {low} or more: change {name}")


def above(function: str, name: str, x: float, low: float) -> None:
    """Raise SettingError where `x` is not above `low` (or NaN)."""
    if not x > low:
        raise SettingError(f"{function}: {name} is {x}, want more than {low}: change {name}")


def within(function: str, name: str, x: float, low: float, high: float) -> None:
    """Raise SettingError where `x` is not in [low, high]."""
    if not low <= x <= high:
        raise SettingError(f"{function}: {name} is {x}, want a number from {low} to {high}: change {name}")
