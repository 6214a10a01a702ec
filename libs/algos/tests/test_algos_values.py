"""Value losses and behaviour cloning: values by hand and a loop as oracle."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import cloning, values
from m2flow.algos.errors import DtypeError, SettingError, ShapeError

Batch = dict[str, Tensor]
TRUE = torch.ones(1, 1, dtype=torch.bool)


def one(x: float) -> Tensor:
    """Return [[x]]."""
    return torch.tensor([[x]], dtype=torch.float64)


def test_by_hand() -> None:
    assert values.mse(one(3), one(1), TRUE).item() == 2
    assert values.huber(one(3), one(1), TRUE, delta=1.0).item() == 1.5
    assert values.huber(one(1.5), one(1), TRUE, delta=1.0).item() == 0.125
    assert values.huber(one(-1), one(1), TRUE, delta=1.0).item() == 1.5
    assert values.clipped(one(1), one(0), one(1), TRUE).item() == pytest.approx(0.32)
    assert values.clipped(one(1), one(0), one(1), TRUE, delta=0.5).item() == pytest.approx(0.5 * (0.8 - 0.25))
    assert values.clipped(one(3), one(0), one(1), TRUE).item() == 2


def test_a_clipped_value_gets_no_gradient_towards_its_return() -> None:
    for value, gradient in ((1.0, 0.0), (3.0, 2.0), (0.1, -0.9)):
        leaf = one(value).requires_grad_()
        values.clipped(leaf, one(0), one(1), TRUE).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == pytest.approx(gradient)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**31), st.sampled_from([0.3, 1.0, float("inf")]))
def test_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, seed: int, delta: float) -> None:
    x = batch(rows, steps, seed)

    def loss(error: float) -> float:
        return 0.5 * error**2 if abs(error) <= delta else delta * (abs(error) - 0.5 * delta)

    want = {name: torch.zeros(rows, steps, dtype=torch.float64) for name in ("mse", "huber", "clipped")}
    for b in range(rows):
        for t in range(steps):
            if x["mask"][b, t]:
                v, old, r = (x[k][b, t].item() for k in ("values", "old_values", "returns"))
                want["mse"][b, t] = 0.5 * (v - r) ** 2
                want["huber"][b, t] = loss(v - r)
                want["clipped"][b, t] = max(loss(v - r), loss(min(max(v, old - 0.4), old + 0.4) - r))
    got = {
        "mse": values.mse(x["values"], x["returns"], x["mask"]),
        "huber": values.huber(x["values"], x["returns"], x["mask"], delta=delta),
        "clipped": values.clipped(x["values"], x["old_values"], x["returns"], x["mask"], clip=0.4, delta=delta),
    }
    torch.testing.assert_close(got, want)
    if delta < float("inf"):
        theirs = torch.nn.functional.huber_loss(x["values"], x["returns"], reduction="none", delta=delta)
        torch.testing.assert_close(got["huber"], theirs * x["mask"])


def test_cloning_by_hand() -> None:
    actions = torch.tensor([[[1.0, 3.0], [9.0, 9.0]]], requires_grad=True)
    expert = torch.tensor([[[0.0, 0.0], [float("nan")] * 2]])
    mask = torch.tensor([[True, False]])
    assert cloning.nll(one(-2), TRUE).item() == 2
    assert cloning.l1(actions, expert, mask).tolist() == [[2, 0]]
    assert cloning.mse(actions, expert, mask).tolist() == [[5, 0]]
    (gradient,) = torch.autograd.grad(cloning.mse(actions, expert, mask).sum(), actions)
    assert gradient.tolist() == [[[1, 3], [0, 0]]]


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_cloning_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, size: int, seed: int) -> None:
    mask = batch(rows, steps, seed)["mask"]
    g = torch.Generator().manual_seed(seed)
    actions, expert = (torch.randn(rows, steps, size, generator=g, dtype=torch.float64) for _ in range(2))
    absolute, squared, likely = (torch.zeros(rows, steps, dtype=torch.float64) for _ in range(3))
    for b in range(rows):
        for t in range(steps):
            if mask[b, t]:
                gaps = [actions[b, t, d].item() - expert[b, t, d].item() for d in range(size)]
                absolute[b, t] = sum(map(abs, gaps)) / size
                squared[b, t] = sum(gap**2 for gap in gaps) / size
                likely[b, t] = -actions[b, t, 0]
    torch.testing.assert_close(cloning.l1(actions, expert, mask), absolute)
    torch.testing.assert_close(cloning.mse(actions, expert, mask), squared)
    torch.testing.assert_close(cloning.nll(actions[..., 0], mask), likely)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(SettingError, match=r"huber: delta is 0.0, want more than 0.0"):
        values.huber(one(1), one(1), TRUE, delta=0.0)
    with pytest.raises(SettingError, match=r"clipped: clip is -1.0, want 0.0 or more"):
        values.clipped(one(1), one(1), one(1), TRUE, clip=-1.0)
    three = torch.zeros(1, 1, 2)
    with pytest.raises(ShapeError, match=r"l1: actions has shape \[1, 1\], want \[B, T, D\]"):
        cloning.l1(one(1), one(1), TRUE)
    with pytest.raises(ShapeError, match=r"l1: expert_actions has shape \[1, 1, 1\], want \[1, 1, 2\] like actions"):
        cloning.l1(three, three[..., :1], TRUE)
    with pytest.raises(DtypeError, match=r"mse: mask has dtype torch.int64, want torch.bool"):
        cloning.mse(three, three, TRUE.long())
