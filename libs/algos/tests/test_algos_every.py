"""What holds for every function from [B, T] to [B, T]: padding, order of rows, empty rows, dtypes, errors, compiling.

Each function is named once below; a test then takes them all.
"""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from m2flow import algos
from m2flow.algos import cloning, corrections, kl, losses, returns, values
from m2flow.algos.errors import DtypeError, ShapeError

Batch = dict[str, Tensor]

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    f"{module.__name__.rsplit('.', 1)[1]}.{function.__name__}": function
    for module, functions in [
        (kl, [kl.k1, kl.k2, kl.k3, kl.absolute]),
        (
            losses,
            [
                losses.ppo_clip,
                losses.dual_clip,
                losses.decoupled_ppo,
                losses.gspo,
                losses.gspo_token,
                losses.cispo,
                losses.sapo,
                losses.reinforce,
                losses.gpg,
                losses.distill_sampled_kl,
            ],
        ),
        (returns, [returns.reward_to_go]),
        (values, [values.mse, values.huber, values.clipped]),
        (cloning, [cloning.nll]),
        (corrections, [corrections.tis, corrections.mis, corrections.icepop]),
    ]
    for function in functions
}
# Those in which a value is stopped on its way: a numeric derivative sees what autograd is told not to.
STOPPED = {"losses.gspo_token", "losses.cispo", "losses.distill_sampled_kl"}
# Those that have no gradient.
DATA = {"corrections.tis", "corrections.mis", "corrections.icepop"}
# Settings without a default.
SETTINGS: dict[str, dict[str, float]] = {"values.huber": {"delta": 0.7}}
ALL = pytest.mark.parametrize("name", FUNCTIONS)


def call(name: str, given: Batch) -> Tensor:
    """Call the function with the operands that its signature names."""
    function = FUNCTIONS[name]
    return function(*[given[operand] for operand in operands(name)], **SETTINGS.get(name, {}))


def operands(name: str) -> list[str]:
    """Return the names of the function's operands: its parameters that are not keyword-only."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def value_and_gradient(name: str, given: Batch) -> tuple[Tensor, Tensor]:
    """Return the function's value, and the gradient of its (unevenly weighted) sum to the first operand."""
    first = operands(name)[0]
    leaf = given[first].clone().requires_grad_()
    value = call(name, {**given, first: leaf})
    weights = torch.linspace(1.0, 2.0, value.shape[0], dtype=value.dtype)[:, None]
    if name in DATA:
        assert not value.requires_grad
        return value, torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad((value * weights).sum(), leaf)
    return value.detach(), gradient


def padded(given: Batch, left: int, right: int) -> Batch:
    """Return the batch with columns added, outside the mask, that hold NaN."""
    return {
        name: torch.nn.functional.pad(x, (left, right), value=False if x.dtype is torch.bool else float("nan"))
        for name, x in given.items()
    }


@ALL
@pytest.mark.parametrize(("left", "right"), [(0, 3), (2, 0), (1, 40)])
def test_padding_changes_nothing(name: str, left: int, right: int, batch: Callable[..., Batch]) -> None:
    given = batch(4, 7, seed=1)
    value, gradient = value_and_gradient(name, given)
    wide_value, wide_gradient = value_and_gradient(name, padded(given, left, right))
    inside = slice(left, left + 7)
    torch.testing.assert_close(wide_value[:, inside], value)
    torch.testing.assert_close(wide_gradient[:, inside], gradient)
    for whole in (wide_value, wide_gradient):
        assert whole[:, :left].abs().sum() == 0
        assert whole[:, left + 7 :].abs().sum() == 0


@ALL
def test_what_lies_outside_the_mask_changes_nothing(name: str, batch: Callable[..., Batch]) -> None:
    given = batch(4, 7, seed=2)
    outside = ~given["mask"]
    dirty = {k: x if x.dtype is torch.bool else x.masked_fill(outside, float("nan")) for k, x in given.items()}
    for clean, other in zip(value_and_gradient(name, given), value_and_gradient(name, dirty), strict=True):
        torch.testing.assert_close(other, clean)
        assert other[outside].abs().sum() == 0


@ALL
def test_rows_do_not_see_each_other(name: str, batch: Callable[..., Batch]) -> None:
    given = batch(5, 9, seed=3)
    order = torch.tensor([3, 1, 4, 0, 2])
    value = call(name, given)
    torch.testing.assert_close(call(name, {k: x[order] for k, x in given.items()}), value[order])
    emptied = {**given, "mask": given["mask"].clone()}
    emptied["mask"][2] = False
    torch.testing.assert_close(call(name, emptied)[[0, 1, 3, 4]], value[[0, 1, 3, 4]])


@ALL
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_batch_with_nothing_in_its_mask_gives_zeros(
    name: str, shape: tuple[int, int], batch: Callable[..., Batch]
) -> None:
    given = batch(*shape, seed=4)
    given["mask"] = torch.zeros(shape, dtype=torch.bool)
    for x in value_and_gradient(name, given):
        torch.testing.assert_close(x, torch.zeros(shape, dtype=torch.float64))


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(name: str, dtype: torch.dtype, batch: Callable[..., Batch]) -> None:
    given = batch(3, 50, seed=5, dtype=dtype)
    value, gradient = value_and_gradient(name, given)
    wide = {k: x if x.dtype is torch.bool else x.float() for k, x in given.items()}
    expected, expected_gradient = value_and_gradient(name, wide)
    assert value.dtype is torch.float32
    assert gradient.dtype is dtype
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradient, expected_gradient.to(dtype), rtol=0, atol=0)


@ALL
def test_huge_gaps_stay_finite(name: str, batch: Callable[..., Batch]) -> None:
    given = batch(3, 5, seed=6, dtype=torch.float32)
    given["old_logprobs"] = given["old_logprobs"] * 1000
    for x in value_and_gradient(name, given):
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in STOPPED | DATA])
def test_gradient_agrees_with_differences(name: str, batch: Callable[..., Batch]) -> None:
    given = batch(3, 6, seed=7)
    first = operands(name)[0]
    leaf = given[first].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: call(name, {**given, first: x}), leaf)


@ALL
def test_compiles_to_one_graph(
    name: str, batch: Callable[..., Batch], compiled: Callable[..., Callable[..., Tensor]]
) -> None:
    given = batch(3, 40, seed=8)
    first = operands(name)[0]
    leaf = given[first].clone().requires_grad_()
    value = compiled(lambda x: call(name, x))({**given, first: leaf})
    plain = call(name, {**given, first: leaf})
    torch.testing.assert_close(value, plain)
    if name in DATA:
        return
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), leaf)[0])


@ALL
def test_wrong_operands_are_named(name: str, batch: Callable[..., Batch]) -> None:
    given = batch(2, 3, seed=9)
    first = operands(name)[0]
    short = name.rsplit(".", 1)[1]
    with pytest.raises(DtypeError, match=rf"{short}: mask has dtype torch.int64, want torch.bool: use mask.bool\(\)"):
        call(name, {**given, "mask": given["mask"].long()})
    with pytest.raises(ShapeError, match=rf"{short}: mask has shape \[3\], want \[B, T\]: "):
        call(name, {**given, "mask": given["mask"][0]})
    with pytest.raises(ShapeError, match=rf"{short}: {first} has shape \[2, 2\], want \[2, 3\] like mask: "):
        call(name, {**given, first: given[first][:, :2]})
    with pytest.raises(ShapeError, match=rf"{short}: {first} has shape \[2\], want .* masks.spread\({first}, mask\)"):
        call(name, {**given, first: given[first][:, 0]})
    with pytest.raises(DtypeError, match=rf"{short}: {first} has dtype torch.int64, want a floating dtype: "):
        call(name, {**given, first: given[first].long()})
    with pytest.raises(DtypeError, match=rf"{short}: {first} is a list, want a torch.Tensor: "):
        call(name, {**given, first: [[0.0]]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'clip_hihg'"):
        FUNCTIONS[name](*[given[o] for o in operands(name)], clip_hihg=0.2)


def test_every_public_function_says_what_it_takes_and_where_it_is_from() -> None:
    for module in [vars(algos)[name] for name in algos.__all__ if inspect.ismodule(vars(algos)[name])]:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                text = inspect.getdoc(function) or ""
                # Masks and checks are of no paper.
                source = () if module in (algos.masks, algos.checks) else ("Source:",)
                for part in ("Args:", "Raises:", "Example:", *source):
                    assert part in text, f"{module.__name__}.{name} has no {part}"
