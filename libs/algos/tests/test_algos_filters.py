"""Filters, length shaping, action chunks and check_finite: by hand and against loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import checks, chunks, filters, shaping
from m2flow.algos.errors import DtypeError, NonFiniteError, SettingError, ShapeError

SAMPLES = given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=20), st.integers(1, 4)
)


def ids(*x: int) -> Tensor:
    """Return an int64 vector."""
    return torch.tensor(x, dtype=torch.long)


def bools(marks: str) -> Tensor:
    """Return a bool vector from 0 and 1."""
    return torch.tensor([mark == "1" for mark in marks])


def test_filters_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 1, 1, 0]), ids(0, 0, 1, 1)
    assert filters.zero_variance(rewards, groups).tolist() == bools("1100").tolist()
    assert filters.dynamic_sampling(rewards.bool(), groups).tolist() == bools("0011").tolist()
    best = filters.best_of_n(torch.tensor([1.0, 2, 2, 0]), ids(0, 0, 0, 1))
    assert best.tolist() == bools("0101").tolist()
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert filters.drop_truncated(mask, bools("01")).tolist() == [[True, True], [False, False]]


@SAMPLES
def test_filters_against_a_loop(samples: list[tuple[int, int, bool]], num_best: int) -> None:
    rewards, groups, correct = (list(x) for x in zip(*samples, strict=True))
    members = {g: [n for n, h in enumerate(groups) if h == g] for g in groups}
    r, g = torch.tensor(rewards, dtype=torch.float32), ids(*groups)
    same = [len({rewards[n] for n in members[h]}) == 1 for h in groups]
    mixed = [len({correct[n] for n in members[h]}) == 2 for h in groups]
    best = {n for rows in members.values() for n in sorted(rows, key=lambda n: (-rewards[n], n))[:num_best]}
    assert filters.zero_variance(r, g).tolist() == same
    assert filters.dynamic_sampling(torch.tensor(correct), g).tolist() == mixed
    assert filters.best_of_n(r, g, num_best=num_best).tolist() == [n in best for n in range(len(samples))]
    mask = r[:, None] > torch.arange(3)
    kept = [[reward > t and not cut for t in range(3)] for reward, _, cut in samples]
    assert filters.drop_truncated(mask, torch.tensor(correct)).tolist() == kept


def test_shaping_by_hand() -> None:
    assert shaping.overlong(ids(6, 9, 20), max_length=10, buffer_length=4).tolist() == [0, -0.75, -1]
    got = shaping.group_length(ids(10, 20, 30, 10, 7), bools("11000"), ids(0, 0, 0, 0, 1))
    assert got.tolist() == [0.5, 0, -0.5, 0, 0]
    got = shaping.cosine(ids(0, 5, 5, 10, 99), bools("11010"), max_length=10)
    assert got.tolist() == pytest.approx([2, 1.5, -5, -10, -10])


@SAMPLES
def test_shaping_against_a_loop(samples: list[tuple[int, int, bool]], size: int) -> None:
    lengths, groups, correct = (list(x) for x in zip(*samples, strict=True))
    punished, by_group, along = [], [], []
    for n, group, right in samples:
        edge = 3 * size - size
        punished.append(0.0 if n <= edge else -1.0 if n > 3 * size else (edge - n) / size)
        peers = [m for m, g, _ in samples if g == group]
        low, high = min(peers), max(peers)
        x = 0.5 - (n - low) / (high - low) if high > low else 0.0
        by_group.append(x if right else min(x, 0.0))
        start, end = (2.0, 1.0) if right else (-10.0, 0.0)
        along.append(-10.0 if n >= size else end + 0.5 * (start - end) * (1 + math.cos(math.pi * n / size)))
    n, g, c = ids(*lengths), ids(*groups), torch.tensor(correct)
    assert shaping.overlong(n, max_length=3 * size, buffer_length=size).tolist() == pytest.approx(punished)
    assert shaping.group_length(n, c, g).tolist() == pytest.approx(by_group)
    assert shaping.cosine(n, c, max_length=size).tolist() == pytest.approx(along, abs=1e-6)


def test_chunks_by_hand() -> None:
    logprobs = torch.tensor([[[[-1.0, -2.0], [-3.0, -4.0]]]])
    both, first = torch.tensor([[[True, True]]]), torch.tensor([[[True, False]]])
    assert chunks.sum_logprobs(logprobs, both, level="token")[0].tolist() == [[-1, -2, -3, -4]]
    assert chunks.sum_logprobs(logprobs, both, level="action")[0].tolist() == [[-3, -7]]
    assert chunks.sum_logprobs(logprobs, both, level="chunk")[0].tolist() == [[-10]]
    got, mask = chunks.sum_logprobs(logprobs, first, level="token")
    assert got.tolist() == [[-1, -2, 0, 0]]
    assert mask.tolist() == [[True, True, False, False]]
    got, mask = chunks.sum_logprobs(logprobs, first, level="chunk")
    assert (got.item(), mask.item()) == (-3, True)
    assert chunks.sum_logprobs(logprobs, ~both, level="chunk")[1].item() is False
    rewards = torch.tensor([[[1.0, 2.0, 4.0]]])
    assert chunks.sum_rewards(rewards, rewards > 0, gamma=0.5).item() == 3
    assert chunks.sum_rewards(rewards, rewards < 3, gamma=0.5).item() == 2
    x = torch.tensor([[1.0, 2.0]])
    assert chunks.spread(x, level="action", num_actions=2, num_tokens=1).tolist() == [[1, 1, 2, 2]]
    assert chunks.spread(x, level="token", num_actions=1, num_tokens=2).tolist() == [[1, 1, 2, 2]]
    assert chunks.spread(x, level="chunk", num_actions=2, num_tokens=2).tolist() == [[1, 2]]


@given(*[st.integers(1, 3)] * 4, st.integers(0, 2**31))
def test_chunks_against_a_loop(rows: int, steps: int, actions: int, tokens: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(rows, steps, actions, tokens, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, steps, actions, generator=g) < 0.6
    dirty, x = logprobs.masked_fill(~mask[..., None], float("nan")), logprobs[..., 0, 0]
    for b in range(rows):
        flat: dict[str, list[float]] = {"token": [], "action": [], "chunk": []}
        kept: dict[str, list[bool]] = {"token": [], "action": [], "chunk": []}
        paid = []
        for t in range(steps):
            done = [k for k in range(actions) if mask[b, t, k]]
            for k in range(actions):
                each = [logprobs[b, t, k, d].item() if k in done else 0.0 for d in range(tokens)]
                flat["token"] += each
                kept["token"] += [k in done] * tokens
                flat["action"].append(sum(each))
                kept["action"].append(k in done)
            flat["chunk"].append(sum(logprobs[b, t, k].sum().item() for k in done))
            kept["chunk"].append(bool(done))
            paid.append(sum(0.9**k * logprobs[b, t, k, 0].item() for k in done))
        for level in ("token", "action", "chunk"):
            got, inside = chunks.sum_logprobs(dirty, mask, level=level)
            assert got[b].tolist() == pytest.approx(flat[level])
            assert inside[b].tolist() == kept[level]
            each = {"token": actions * tokens, "action": actions, "chunk": 1}[level]
            spread = chunks.spread(x, level=level, num_actions=actions, num_tokens=tokens)
            assert spread[b].tolist() == [x[b, place // each] for place in range(steps * each)]
        assert chunks.sum_rewards(dirty[..., 0], mask, gamma=0.9)[b].tolist() == pytest.approx(paid)


def test_check_finite_names_the_first_bad_place() -> None:
    x = torch.tensor([[1.0, 2.0, float("nan")], [float("inf"), 0.0, 0.0]])
    with pytest.raises(NonFiniteError, match=r"logprobs\[0, 2\] is nan, and 1 more of 6 are not finite: want finite"):
        checks.check_finite(x, "logprobs")
    mask = torch.tensor([[True, True, False], [True, True, True]])
    with pytest.raises(NonFiniteError, match=r"loss\[1, 0\] is inf, of 5: want finite numbers"):
        checks.check_finite(x, "loss", mask)
    with pytest.raises(NonFiniteError, match=r"logits\[0, 2, 0\] is nan"):
        checks.check_finite(x[..., None], "logits", mask | True)
    checks.check_finite(x, "loss", mask & ~torch.tensor([[False], [True]]))
    checks.check_finite(torch.zeros(0, 3), "loss")
    with pytest.raises(ShapeError, match=r"check_finite: mask has shape \[2, 2\], want the first dimensions of loss"):
        checks.check_finite(x, "loss", mask[:, :2])
    with pytest.raises(DtypeError, match=r"check_finite: tokens has dtype torch.int64, want a floating dtype"):
        checks.check_finite(ids(1), "tokens")


def test_errors_say_what_to_do() -> None:
    with pytest.raises(DtypeError, match=r"dynamic_sampling: correct has dtype torch.float32, want torch.bool"):
        filters.dynamic_sampling(torch.ones(2), ids(0, 0))
    with pytest.raises(SettingError, match=r"best_of_n: num_best is 0, want 1 or more"):
        filters.best_of_n(torch.ones(2), ids(0, 0), num_best=0)
    with pytest.raises(
        ShapeError, match=r"drop_truncated: truncated has shape \[1\], want \[2\] like the rows of mask"
    ):
        filters.drop_truncated(torch.ones(2, 3, dtype=torch.bool), bools("1"))
    with pytest.raises(SettingError, match=r"overlong: max_length is 3, want 4 or more"):
        shaping.overlong(ids(1), max_length=3, buffer_length=4)
    with pytest.raises(DtypeError, match=r"cosine: lengths has dtype torch.float32, want an integer dtype"):
        shaping.cosine(torch.ones(1), bools("1"), max_length=3)
    with pytest.raises(SettingError, match=r"cosine: got .* want finite rewards"):
        shaping.cosine(ids(1), bools("1"), max_length=3, exceeded=float("-inf"))
    four, mask = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, dtype=torch.bool)
    with pytest.raises(SettingError, match=r"sum_logprobs: level is 'step', want token, action or chunk"):
        chunks.sum_logprobs(four, mask, level="step")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"spread: level is 'step', want token, action or chunk"):
        chunks.spread(four[0, 0], level="step", num_actions=1, num_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"sum_logprobs: mask has shape \[1, 1\], want \[B, T, K\]"):
        chunks.sum_logprobs(four, mask[..., 0], level="token")
