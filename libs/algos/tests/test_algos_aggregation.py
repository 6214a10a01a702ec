"""Aggregation: by hand, against a loop, and microbatches and ranks that add up to the batch."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import aggregation, losses
from m2flow.algos.errors import DtypeError, SettingError, ShapeError

Batch = dict[str, Tensor]


def fixed(loss: Tensor, mask: Tensor, *, num_sequences: float | Tensor | None = None) -> Tensor:
    """Return fixed_length with a length of 7."""
    return aggregation.fixed_length(loss, mask, length=7, num_sequences=num_sequences)


BY_SEQUENCE: dict[str, Callable[..., Tensor]] = {
    "token mean": aggregation.sequence_mean_token_mean,
    "token sum": aggregation.sequence_mean_token_sum,
    "fixed length": fixed,
}
EVERY = {"tokens": aggregation.token_mean, **BY_SEQUENCE}


def test_by_hand() -> None:
    loss, mask = torch.tensor([[1.0, 2.0], [6.0, 99.0]]), torch.tensor([[True, True], [True, False]])
    assert aggregation.token_mean(loss, mask).item() == 3
    assert aggregation.sequence_mean_token_mean(loss, mask).item() == 3.75
    assert aggregation.sequence_mean_token_sum(loss, mask).item() == 4.5
    assert aggregation.fixed_length(loss, mask, length=3).item() == 1.5
    assert aggregation.token_mean(loss, mask, num_tokens=9).item() == 1
    assert aggregation.token_mean(loss, mask, num_tokens=torch.tensor(9)).item() == 1
    assert aggregation.sequence_mean_token_mean(loss, mask, num_sequences=3).item() == 2.5


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, seed: int) -> None:
    x = batch(rows, steps, seed)
    kept = [[x["loss"][b, t].item() for t in range(steps) if x["mask"][b, t]] for b in range(rows)]
    full = [row for row in kept if row]
    tokens, sequences = max(sum(map(len, full)), 1), max(len(full), 1)
    want = {
        "tokens": sum(map(sum, full)) / tokens,
        "token mean": sum(sum(row) / len(row) for row in full) / sequences,
        "token sum": sum(map(sum, full)) / sequences,
        "fixed length": sum(map(sum, full)) / sequences / 7,
    }
    for name, function in EVERY.items():
        assert function(x["loss"], x["mask"]).item() == pytest.approx(want[name])


@pytest.mark.parametrize("name", EVERY)
@given(
    st.integers(2, 8), st.integers(1, 9), st.integers(0, 2**31), st.lists(st.integers(1, 7), max_size=3, unique=True)
)
def test_a_split_changes_no_gradient(
    batch: Callable[..., Batch], name: str, rows: int, steps: int, seed: int, cuts: list[int]
) -> None:
    """Microbatches of any sizes, some of them empty of tokens: the gradients of their losses sum to the batch's."""
    x = batch(rows, steps, seed, dtype=torch.float32)
    x["mask"][0] = False
    count = {"num_tokens": x["mask"].sum()} if name == "tokens" else {"num_sequences": x["mask"].any(1).sum()}

    def loss(part: slice) -> Tensor:
        operands = (x[k][part] for k in ("old_logprobs", "advantages", "mask"))
        return EVERY[name](losses.ppo_clip(leaf[part], *operands), x["mask"][part], **count)

    leaf = x["logprobs"].clone().requires_grad_()
    (whole,) = torch.autograd.grad(loss(slice(None)), leaf)
    edges = [0, *sorted(min(c, rows) for c in cuts), rows]
    for start, end in pairwise(edges):
        loss(slice(start, end)).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_an_empty_batch_is_zero_with_gradient_zero(name: str) -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        leaf = torch.full(shape, float("nan"), requires_grad=True)
        loss = EVERY[name](leaf, torch.zeros(shape, dtype=torch.bool))
        loss.backward()
        assert loss.item() == 0
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() == 0


def test_errors_say_what_to_do() -> None:
    loss, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(DtypeError, match=r"token_mean: mask has dtype torch.int64, want torch.bool"):
        aggregation.token_mean(loss, mask.long())
    with pytest.raises(SettingError, match=r"fixed_length: length is 0, want 1 or more"):
        aggregation.fixed_length(loss, mask, length=0)
    with pytest.raises(SettingError, match=r"token_mean: num_tokens is -1, want 0 or more"):
        aggregation.token_mean(loss, mask, num_tokens=-1)
    with pytest.raises(ShapeError, match=r"token_mean: num_tokens has shape \[2\], want a number or a 0-d tensor: use"):
        aggregation.token_mean(loss, mask, num_tokens=mask.sum(0))
    with pytest.raises(TypeError, match="did you mean num_tokens"):
        aggregation.token_mean(loss, mask, num_token=3)  # type: ignore[call-arg]
