"""Policy losses: values worked out by hand, and a plain loop over tokens as oracle."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import losses
from m2flow.algos.errors import SettingError

Batch = dict[str, Tensor]
SHAPES = given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**31))
TRUE = torch.ones(1, 1, dtype=torch.bool)


def one(x: float) -> Tensor:
    """Return [[x]]."""
    return torch.tensor([[x]], dtype=torch.float64)


def at_ratio(function: Callable[..., Tensor], ratio: float, advantage: float, **settings: float) -> tuple[float, float]:
    """Return the loss of one token of logprob -1 at that ratio, and its derivative."""
    logprobs = one(-1.0).requires_grad_()
    loss = function(logprobs, one(-1.0 - math.log(ratio)), one(advantage), TRUE, **settings)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.item(), gradient.item()


def clip_by_hand(ratio: float, advantage: float, low: float, high: float) -> float:
    """Return PPO's loss of one token."""
    held = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, held * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(1.5, 1, -1.2, 0), (1.5, -1, 1.5, 1.5), (0.5, -1, 0.8, 0), (0.5, 1, -0.5, -0.5), (1.0, 2, -2, -2)],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert at_ratio(losses.ppo_clip, ratio, advantage) == pytest.approx((loss, gradient))


def test_clip_higher_lets_a_good_token_rise_further() -> None:
    assert at_ratio(losses.ppo_clip, 1.25, 1, clip_high=0.28) == pytest.approx((-1.25, -1.25))
    assert at_ratio(losses.ppo_clip, 1.5, 1, clip_high=0.28) == pytest.approx((-1.28, 0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"), [(5, -1, 3, 0), (2, -1, 2, 2), (5, 1, -1.2, 0), (0.5, -1, 0.8, 0)]
)
def test_dual_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert at_ratio(losses.dual_clip, ratio, advantage) == pytest.approx((loss, gradient))


def test_decoupled_ppo_by_hand() -> None:
    logprobs, old = one(-1.0), one(-1.0 - math.log(1.5))
    rollout = old - math.log(2.0)
    loss = losses.decoupled_ppo(logprobs, old, rollout, one(1.0), TRUE)
    assert loss.item() == pytest.approx(-2.4)
    assert losses.decoupled_ppo(logprobs, old, rollout, one(1.0), TRUE, max_weight=1.5).item() == pytest.approx(-1.8)
    assert losses.decoupled_ppo(logprobs, old, old, one(1.0), TRUE).item() == pytest.approx(-1.2)


def test_gspo_by_hand() -> None:
    old = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    logprobs = (old + torch.tensor([[math.log(2), math.log(0.5)]], dtype=torch.float64)).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    for function, each in ((losses.gspo, -1.0), (losses.gspo_token, -1.0)):
        loss = function(logprobs, old, torch.ones_like(old), mask)
        assert loss.tolist()[0] == pytest.approx([-1.0, -1.0])
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert gradient.tolist()[0] == pytest.approx([each, each])


def test_gspo_clips_a_whole_row() -> None:
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    logprobs = (old + math.log(1.5)).requires_grad_()
    loss = losses.gspo(logprobs, old, torch.ones_like(old), torch.ones(1, 2, dtype=torch.bool), clip_high=0.2)
    assert loss.tolist()[0] == pytest.approx([-1.2, -1.2])
    assert torch.autograd.grad(loss.sum(), logprobs)[0].abs().sum() == 0


def test_gspo_token_weighs_each_token_by_its_own_advantage() -> None:
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    logprobs = old.clone().requires_grad_()
    advantages = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    (token,) = torch.autograd.grad(losses.gspo_token(logprobs, old, advantages, mask).sum(), logprobs)
    (row,) = torch.autograd.grad(losses.gspo(logprobs, old, advantages, mask).sum(), logprobs)
    assert token.tolist()[0] == pytest.approx([-1.0, -3.0])
    assert row.tolist()[0] == pytest.approx([-2.0, -2.0])


def test_cispo_by_hand() -> None:
    assert at_ratio(losses.cispo, 2.0, 1.0) == pytest.approx((1.28, -1.28))
    assert at_ratio(losses.cispo, 0.1, 1.0) == pytest.approx((0.1, -0.1))
    assert at_ratio(losses.cispo, 0.1, -1.0, clip_low=0.2) == pytest.approx((-0.8, 0.8))


def test_sapo_by_hand() -> None:
    assert at_ratio(losses.sapo, 1.0, 1.0) == pytest.approx((-2.0, -1.0))
    assert at_ratio(losses.sapo, 1.0, -1.0) == pytest.approx((4 / 1.05 * 0.5, 1.0))
    gate = 1 / (1 + math.exp(-1))
    assert at_ratio(losses.sapo, 2.0, 1.0) == pytest.approx((-4 * gate, -4 * gate * (1 - gate) * 2))


def test_reinforce_and_gpg_by_hand() -> None:
    for function in (losses.reinforce, losses.gpg):
        logprobs = one(-2.0).requires_grad_()
        loss = function(logprobs, one(3.0), TRUE)
        assert loss.item() == pytest.approx(6.0)
        assert torch.autograd.grad(loss.sum(), logprobs)[0].item() == pytest.approx(-3.0)


def test_distill_sampled_by_hand() -> None:
    logprobs = one(-1.0).requires_grad_()
    loss = losses.distill_sampled_kl(logprobs, one(-3.0), TRUE)
    assert loss.item() == pytest.approx(-2.0)
    assert torch.autograd.grad(loss.sum(), logprobs)[0].item() == pytest.approx(2.0)


def test_distill_over_the_vocabulary_by_hand() -> None:
    student = torch.zeros(1, 1, 2, dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[[0.8, 0.2]]], dtype=torch.float64).log().requires_grad_()
    forward = losses.distill_forward_kl(student, teacher, TRUE)
    assert forward.item() == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4))
    # The gradient of forward KL to the student's logits is student - teacher.
    assert torch.autograd.grad(forward.sum(), student)[0].flatten().tolist() == pytest.approx([-0.3, 0.3])
    reverse = losses.distill_reverse_kl(student, teacher, TRUE)
    assert reverse.item() == pytest.approx(0.5 * math.log(0.625) + 0.5 * math.log(2.5))
    reverse.sum().backward()
    assert teacher.grad is None


def test_sampled_distillation_has_the_gradient_of_reverse_kl() -> None:
    torch.manual_seed(0)
    student = torch.randn(1, 1, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 1, 5, dtype=torch.float64)
    (exact,) = torch.autograd.grad(losses.distill_reverse_kl(student, teacher, TRUE).sum(), student)
    logp, logq = student.log_softmax(-1), teacher.log_softmax(-1)
    mask = torch.ones(1, 5, dtype=torch.bool)
    every = losses.distill_sampled_kl(logp[0], logq[0], mask)
    (expected,) = torch.autograd.grad((logp[0].exp().detach() * every).sum(), student)
    torch.testing.assert_close(expected, exact)


@SHAPES
def test_losses_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, seed: int) -> None:
    x = batch(rows, steps, seed)
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "teacher_logprobs", "advantages", "mask")
    lp, old, roll, teacher, adv, mask = (x[name].tolist() for name in names)
    want: dict[str, list[list[float]]] = {
        name: [[0.0] * steps for _ in range(rows)]
        for name in ("ppo", "dual", "decoupled", "gspo", "cispo", "sapo", "reinforce", "distill")
    }
    for b in range(rows):
        inside = [t for t in range(steps) if mask[b][t]]
        row = math.exp(sum(lp[b][t] - old[b][t] for t in inside) / max(len(inside), 1))
        for t in inside:
            ratio, a = math.exp(lp[b][t] - old[b][t]), adv[b][t]
            want["ppo"][b][t] = clip_by_hand(ratio, a, 0.1, 0.3)
            want["dual"][b][t] = min(want["ppo"][b][t], -1.5 * a) if a < 0 else want["ppo"][b][t]
            want["decoupled"][b][t] = math.exp(old[b][t] - roll[b][t]) * want["ppo"][b][t]
            want["gspo"][b][t] = clip_by_hand(row, a, 0.1, 0.3)
            want["cispo"][b][t] = -min(max(ratio, 0.9), 1.3) * a * lp[b][t]
            tau = 1.0 if a > 0 else 1.05
            want["sapo"][b][t] = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
            want["reinforce"][b][t] = -a * lp[b][t]
            want["distill"][b][t] = (lp[b][t] - teacher[b][t]) * lp[b][t]
    operands = x["logprobs"], x["old_logprobs"], x["advantages"], x["mask"]
    clip = {"clip_low": 0.1, "clip_high": 0.3}
    got = {
        "ppo": losses.ppo_clip(*operands, **clip),
        "dual": losses.dual_clip(*operands, **clip, clip_max=1.5),
        "decoupled": losses.decoupled_ppo(
            x["logprobs"], x["old_logprobs"], x["rollout_logprobs"], x["advantages"], x["mask"], **clip
        ),
        "gspo": losses.gspo(*operands, **clip),
        "cispo": losses.cispo(*operands, **clip),
        "sapo": losses.sapo(*operands),
        "reinforce": losses.reinforce(x["logprobs"], x["advantages"], x["mask"]),
        "distill": losses.distill_sampled_kl(x["logprobs"], x["teacher_logprobs"], x["mask"]),
    }
    for name, expected in want.items():
        torch.testing.assert_close(got[name], torch.tensor(expected, dtype=torch.float64), msg=lambda m, n=name: n + m)
    torch.testing.assert_close(losses.gspo_token(*operands, **clip), got["gspo"])
    torch.testing.assert_close(losses.gpg(x["logprobs"], x["advantages"], x["mask"]), got["reinforce"])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 6), st.integers(0, 2**31))
def test_distillation_against_a_loop(rows: int, steps: int, vocabulary: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(rows, steps, vocabulary, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(rows, steps, generator=g) < 0.7
    forward, reverse = (torch.zeros(rows, steps, dtype=torch.float64) for _ in range(2))
    for b in range(rows):
        for t in range(steps):
            if mask[b, t]:
                p, q = ([math.exp(x) for x in logits[b, t].tolist()] for logits in (student, teacher))
                pairs = [(x / sum(p), y / sum(q)) for x, y in zip(p, q, strict=True)]
                forward[b, t] = sum(y * math.log(y / x) for x, y in pairs)
                reverse[b, t] = sum(x * math.log(x / y) for x, y in pairs)
    torch.testing.assert_close(losses.distill_forward_kl(student, teacher, mask), forward)
    torch.testing.assert_close(losses.distill_reverse_kl(student, teacher, mask), reverse)


def test_only_the_policy_gets_a_gradient(batch: Callable[..., Batch]) -> None:
    x = batch(2, 3, seed=0)
    leaves = {k: x[k].clone().requires_grad_() for k in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")}
    losses.decoupled_ppo(**leaves, mask=x["mask"]).sum().backward()
    assert leaves.pop("logprobs").grad is not None
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize(
    ("function", "settings", "says"),
    [
        (losses.ppo_clip, {"clip_low": -0.1}, "ppo_clip: clip_low is -0.1, want a number from 0.0 to 1.0"),
        (losses.ppo_clip, {"clip_high": float("nan")}, "ppo_clip: clip_high is nan, want 0.0 or more"),
        (losses.dual_clip, {"clip_max": 1.0}, "dual_clip: clip_max is 1.0, want more than 1.0"),
        (losses.sapo, {"tau_positive": 0.0}, "sapo: tau_positive is 0.0, want more than 0.0"),
    ],
)
def test_settings_out_of_range_are_named(
    function: Callable[..., Tensor], settings: dict[str, float], says: str
) -> None:
    with pytest.raises(SettingError, match=says):
        function(one(-1), one(-1), one(1), TRUE, **settings)
