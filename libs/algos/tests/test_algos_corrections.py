"""Corrections and metrics: values by hand, loops as oracles, what an empty batch gives."""

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import corrections, metrics
from m2flow.algos.errors import DtypeError, SettingError, ShapeError

Batch = dict[str, Tensor]
CASES = given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**31))


def at(*ratios: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (old_logprobs, rollout_logprobs, mask) of one row whose tokens have these ratios."""
    old = torch.tensor([ratios], dtype=torch.float64).log() - 1.0
    return old, torch.full_like(old, -1.0), torch.ones_like(old, dtype=torch.bool)


def row(x: Tensor) -> list[float]:
    """Return the only row, for comparison by pytest."""
    assert not x.requires_grad
    return pytest.approx(x[0].tolist())  # type: ignore[no-any-return]


def test_by_hand() -> None:
    pair = at(3, 0.5)
    assert row(corrections.tis(*pair)) == [2, 0.5]
    assert row(corrections.tis(*pair, level="sequence")) == [1.5, 1.5]
    assert row(corrections.tis(*pair, level="geometric")) == [math.sqrt(1.5)] * 2
    assert row(corrections.mis(*pair, level="token")) == [0, 0.5]
    assert row(corrections.mis(*pair)) == [1.5, 1.5]
    assert row(corrections.mis(*pair, min_weight=1.6)) == [0, 0]
    assert row(corrections.icepop(*at(6, 0.6, 0.4))) == [0, 0.6, 0]
    versions = torch.tensor([[5, 3, 9, 0]])
    got = corrections.staleness_decay(versions, torch.tensor([[True, True, True, False]]), policy_version=5, decay=0.5)
    assert got.tolist() == [[1, 0.25, 1, 0]]
    kept = corrections.staleness_decay(versions, versions >= 0, policy_version=5, decay=0.0)
    assert kept.tolist() == [[1, 0, 1, 0]]


@CASES
def test_weights_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, seed: int) -> None:
    x = batch(rows, steps, seed)
    operands = x["old_logprobs"], x["rollout_logprobs"], x["mask"]
    versions = (x["x"] * 3).long() + 4
    for level in ("token", "sequence", "geometric"):
        tis, mis, decayed = (torch.zeros(rows, steps, dtype=torch.float64) for _ in range(3))
        for b in range(rows):
            inside = [t for t in range(steps) if x["mask"][b, t]]
            gaps = [(x["old_logprobs"][b, t] - x["rollout_logprobs"][b, t]).item() for t in inside]
            for t, gap in zip(inside, gaps, strict=True):
                of = {"token": gap, "sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}
                weight = math.exp(of[level])
                tis[b, t] = min(weight, 1.2)
                mis[b, t] = weight if 0.8 <= weight <= 1.2 else 0.0
                decayed[b, t] = 0.7 ** max(5 - versions[b, t].item(), 0)
        torch.testing.assert_close(corrections.tis(*operands, level=level, max_weight=1.2), tis)
        got = corrections.mis(*operands, level=level, min_weight=0.8, max_weight=1.2)
        torch.testing.assert_close(got, mis)
        if level == "token":
            torch.testing.assert_close(corrections.icepop(*operands, min_weight=0.8, max_weight=1.2), mis)
    got = corrections.staleness_decay(versions, x["mask"], policy_version=5, decay=0.7)
    torch.testing.assert_close(got, decayed.float())


def test_weights_have_the_mean_of_one_under_the_sampling_policy() -> None:
    # Importance sampling's own identity: over all sequences of two tokens, the mean of sequence weights is 1.
    g = torch.Generator().manual_seed(0)
    trained, sampled = (torch.randn(3, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    every = torch.tensor(list(itertools.product(range(3), repeat=2)))
    weights = corrections.tis(
        trained[every], sampled[every], torch.ones(9, 2, dtype=torch.bool), level="sequence", max_weight=1e9
    )
    assert (sampled[every].sum(1).exp() * weights[:, 0]).sum().item() == pytest.approx(1.0)


def test_corrections_errors_say_what_to_do() -> None:
    pair = at(1, 1)
    with pytest.raises(SettingError, match=r"tis: level is 'tokens', want token, sequence or geometric"):
        corrections.tis(*pair, level="tokens")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"tis: max_weight is 0.0, want more than 0.0"):
        corrections.tis(*pair, max_weight=0.0)
    with pytest.raises(SettingError, match=r"mis: max_weight is 1.0, want 1.5 or more"):
        corrections.mis(*pair, min_weight=1.5, max_weight=1.0)
    with pytest.raises(DtypeError, match=r"staleness_decay: versions has dtype torch.float64, want an integer dtype"):
        corrections.staleness_decay(pair[0], pair[2], policy_version=1, decay=0.5)
    with pytest.raises(SettingError, match=r"staleness_decay: decay is 2.0, want a number from 0.0 to 1.0"):
        corrections.staleness_decay(pair[2].long(), pair[2], policy_version=1, decay=2.0)


def test_policy_metrics_by_hand() -> None:
    new, old, mask = at(1.5, 1, 0.5, 0.5)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0]], dtype=torch.float64)
    got = metrics.policy(new, old, advantages, mask)
    assert got["actor/ratio_mean"].item() == pytest.approx(3.5 / 4)
    assert got["actor/pg_clipfrac"].item() == 0.5
    logs = [math.log(1.5), 0, math.log(0.5), math.log(0.5)]
    assert got["actor/ppo_kl"].item() == pytest.approx(-sum(logs) / 4)
    assert got["actor/ppo_k3"].item() == pytest.approx(sum(math.exp(x) - 1 - x for x in logs) / 4)


@CASES
def test_policy_metrics_and_explained_variance_against_a_loop(
    batch: Callable[..., Batch], rows: int, steps: int, seed: int
) -> None:
    x = batch(rows, steps, seed)
    inside = [(b, t) for b in range(rows) for t in range(steps) if x["mask"][b, t]]
    ratios = [math.exp(x["logprobs"][place] - x["old_logprobs"][place]) for place in inside]
    held = [
        ratio > 1.2 if x["advantages"][place] > 0 else ratio < 0.8 for ratio, place in zip(ratios, inside, strict=True)
    ]
    count = max(len(inside), 1)
    want = {
        "actor/pg_clipfrac": sum(held) / count,
        "actor/ppo_k3": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / count,
        "actor/ppo_kl": -sum(map(math.log, ratios)) / count,
        "actor/ratio_mean": sum(ratios) / count,
    }
    got = metrics.policy(x["logprobs"], x["old_logprobs"], x["advantages"], x["mask"])
    assert {name: value.item() for name, value in got.items()} == pytest.approx(want)
    returns, gaps = (
        [x["returns"][p].item() for p in inside],
        [(x["returns"][p] - x["values"][p]).item() for p in inside],
    )
    explained = metrics.explained_variance(x["values"], x["returns"], x["mask"]).item()
    if len(inside) > 1:
        assert explained == pytest.approx(1 - statistics.pvariance(gaps) / statistics.pvariance(returns))
    else:
        assert explained == 0


def test_rollout_metrics_by_hand() -> None:
    got = metrics.rollout_correction(*at(2, 1))
    want = {
        "abs_gap": math.log(2) / 2,
        "kl": -math.log(2) / 2,
        "k3_kl": (1 - math.log(2)) / 2,
        "ess": 0.9,
        "seq_ess": 1.0,
        "ratio_min": 1.0,
        "ratio_p01": 1.01,
        "ratio_p50": 1.5,
        "ratio_p99": 1.99,
        "ratio_max": 2.0,
    }
    assert {k.removeprefix("rollout_corr/"): v.item() for k, v in got.items()} == pytest.approx(want)


@CASES
def test_rollout_metrics_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, seed: int) -> None:
    x = batch(rows, steps, seed)
    got = metrics.rollout_correction(x["old_logprobs"], x["rollout_logprobs"], x["mask"])
    if not x["mask"].any():
        assert all(v.item() == 0 for v in got.values())
        return
    gap = x["old_logprobs"] - x["rollout_logprobs"]
    weights = [math.exp(g) for g in gap[x["mask"]].tolist()]
    products = [math.exp(gap[b][x["mask"][b]].sum()) for b in range(rows) if x["mask"][b].any()]
    shares = torch.tensor([0, 0.01, 0.5, 0.99, 1.0], dtype=torch.float64)
    quantiles = torch.quantile(torch.tensor(weights, dtype=torch.float64), shares)
    want = {
        "abs_gap": statistics.mean(abs(math.log(w)) for w in weights),
        "kl": -statistics.mean(map(math.log, weights)),
        "k3_kl": statistics.mean(w - 1 - math.log(w) for w in weights),
        "ess": sum(weights) ** 2 / sum(w * w for w in weights) / len(weights),
        "seq_ess": sum(products) ** 2 / sum(w * w for w in products) / len(products),
        **{f"ratio_{n}": q.item() for n, q in zip(("min", "p01", "p50", "p99", "max"), quantiles, strict=True)},
    }
    assert {k.removeprefix("rollout_corr/"): v.item() for k, v in got.items()} == pytest.approx(want)


def test_explained_variance_by_hand() -> None:
    returns, mask = torch.tensor([[0.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])
    assert metrics.explained_variance(torch.tensor([[0.0, 1.0, 5.0]]), returns, mask).item() == 0.75
    assert metrics.explained_variance(returns, returns, mask).item() == 1
    assert metrics.explained_variance(returns, torch.ones(1, 3), mask).item() == 0


def test_pass_at_k_by_hand() -> None:
    got = metrics.pass_at_k(torch.tensor([1, 0, 4, 1, 0]), torch.tensor([4, 4, 4, 1, 0]), k=2)
    assert got.tolist() == pytest.approx([0.5, 0, 1, 1, 0])


@given(
    st.lists(st.integers(0, 9).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=5),
    st.integers(1, 9),
)
def test_pass_at_k_against_counting(problems: list[tuple[int, int]], k: int) -> None:
    want = []
    for correct, samples in problems:
        draws = list(itertools.combinations([n < correct for n in range(samples)], min(k, samples)))
        want.append(sum(map(any, draws)) / len(draws))
    counts = torch.tensor(problems, dtype=torch.long).reshape(-1, 2)
    assert metrics.pass_at_k(counts[:, 0], counts[:, 1], k=k).tolist() == pytest.approx(want)


def test_metrics_errors_say_what_to_do() -> None:
    new, old, mask = at(1, 1)
    with pytest.raises(ShapeError, match=r"policy: advantages has shape \[1\], want \[1, 2\] like mask"):
        metrics.policy(new, old, new[:, 0], mask)
    with pytest.raises(SettingError, match=r"pass_at_k: k is 0, want 1 or more"):
        metrics.pass_at_k(torch.tensor([1]), torch.tensor([1]), k=0)
    with pytest.raises(DtypeError, match=r"pass_at_k: num_correct has dtype torch.float32, want an integer dtype"):
        metrics.pass_at_k(torch.tensor([1.0]), torch.tensor([1]), k=1)
