"""KL from sampled tokens: by hand, against a loop, and what the mean of each estimate and of its gradient is."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import kl
from m2flow.algos.errors import SettingError

Batch = dict[str, Tensor]
FORMS: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "absolute": abs,
}


def test_by_hand() -> None:
    policy, reference, mask = torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]])
    got = {name: getattr(kl, name)(policy, reference, mask).item() for name in FORMS}
    assert got == pytest.approx({"k1": 0.5, "k2": 0.125, "k3": 0.10653, "absolute": 0.5}, abs=1e-5)
    assert kl.absolute(reference, policy, mask).item() == 0.5
    half = torch.tensor([[0.5]], requires_grad=True)
    paid = kl.in_reward(torch.ones(1, 1), half, mask, coef=0.1)
    assert paid.item() == pytest.approx(0.95)
    assert not paid.requires_grad
    with pytest.raises(SettingError, match=r"in_reward: coef is -0.1, want 0.0 or more"):
        kl.in_reward(half, half, mask, coef=-0.1)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**31))
def test_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, seed: int) -> None:
    x = batch(rows, steps, seed)
    for name, form in FORMS.items():
        each, paid = (torch.zeros(rows, steps, dtype=torch.float64) for _ in range(2))
        for b in range(rows):
            for t in range(steps):
                if x["mask"][b, t]:
                    each[b, t] = form(x["logprobs"][b, t].item() - x["ref_logprobs"][b, t].item())
                    paid[b, t] = x["rewards"][b, t].item() - 0.1 * each[b, t]
        got = getattr(kl, name)(x["logprobs"], x["ref_logprobs"], x["mask"])
        torch.testing.assert_close(got, each)
        torch.testing.assert_close(kl.in_reward(x["rewards"], got, x["mask"], coef=0.1), paid)


def test_the_table_of_means_and_of_gradients() -> None:
    """Over the whole distribution: what the module's table says of each estimate as a value and as a loss."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(1, 5, generator=g, dtype=torch.float64).log_softmax(1)
    logp, everywhere = logits.log_softmax(1), torch.ones(1, 5, dtype=torch.bool)
    p = logp.exp()
    exact = (p * (logp - ref)).sum()
    reverse = (ref.exp() * (ref - logp)).sum()
    (gradient,), (other,) = (torch.autograd.grad(x, logits, retain_graph=True) for x in (exact, reverse))
    mean, slope = {}, {}
    for name in FORMS:
        each = getattr(kl, name)(logp, ref, everywhere)
        mean[name] = (p * each).sum()
        (slope[name],) = torch.autograd.grad((p.detach() * each).sum(), logits, retain_graph=True)
    for name in ("k1", "k3"):
        torch.testing.assert_close(mean[name], exact)
    torch.testing.assert_close(slope["k1"], torch.zeros_like(gradient), rtol=0, atol=1e-12)
    torch.testing.assert_close(slope["k2"], gradient)
    torch.testing.assert_close(slope["k3"], other)
    for name in ("k2", "absolute"):
        assert abs(mean[name] - exact) > 0.01
    assert (slope["absolute"] - gradient).abs().max() > 0.01
