"""Advantages and whitening: values by hand, a loop over groups as oracle, groups that teach nothing."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import advantages, masks
from m2flow.algos.errors import DtypeError, SettingError, ShapeError

Batch = dict[str, Tensor]
SAMPLES = given(st.lists(st.tuples(st.integers(-2, 3), st.integers(0, 3)), min_size=1, max_size=24))
HALF = math.sqrt(0.5)


def floats(*x: float) -> Tensor:
    """Return a float64 vector."""
    return torch.tensor(x, dtype=torch.float64)


def ids(*x: int) -> Tensor:
    """Return an int64 vector."""
    return torch.tensor(x)


def grpo_in_hand(rewards: list[float], eps: float) -> list[float]:
    """Return GRPO's advantages of one group."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    return [(r - mean) / (std + eps) for r in rewards]


def by_group(rewards: list[float], groups: list[int], of: Callable[[list[float]], list[float]]) -> Tensor:
    """Return what `of` makes of each group's rewards, in the rows' order."""
    want = [0.0] * len(rewards)
    for group in set(groups):
        rows = [n for n, g in enumerate(groups) if g == group]
        for n, x in zip(rows, of([rewards[n] for n in rows]), strict=True):
            want[n] = x
    return floats(*want)


def rloo_in_hand(rewards: list[float]) -> list[float]:
    """Return RLOO's advantages of one group."""
    if len(rewards) < 2:
        return [0.0]
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


def test_by_hand() -> None:
    one = ids(7, 7, 7, 7)
    torch.testing.assert_close(
        advantages.grpo(floats(1, 0, 0, 1), one, eps=0.0), math.sqrt(0.75) * floats(1, -1, -1, 1)
    )
    torch.testing.assert_close(advantages.dr_grpo(floats(1, 0, 0, 1), one), floats(0.5, -0.5, -0.5, 0.5))
    torch.testing.assert_close(advantages.rloo(floats(1, 0, 0), ids(1, 1, 1)), floats(1, -0.5, -0.5))
    torch.testing.assert_close(advantages.opo(floats(1, 0), ids(1, 1), ids(1, 3)), floats(0.75, -0.25))
    torch.testing.assert_close(advantages.gpg(floats(1, 0, 1, 1), ids(0, 0, 1, 1)), floats(1, -1, 0, 0))
    torch.testing.assert_close(advantages.remax(floats(1, 0), floats(1, 1)), floats(0, -1))


def test_turns_and_trajectories_by_hand() -> None:
    # Group 0: trajectory 0 has turn rewards (0, 1), trajectory 1 has (1, 1); group 1: one trajectory of one turn.
    rewards, groups = floats(0, 1, 1, 1, 5), ids(0, 0, 0, 0, 1)
    turn = advantages.grpo_turn(rewards, groups, ids(0, 1, 0, 1, 0), eps=0.0)
    torch.testing.assert_close(turn, HALF * floats(-1, 0, 1, 0, 0))
    whole = advantages.grpo_trajectory(floats(0, 0, 1, 0), ids(0, 0, 0, 0), ids(0, 0, 0, 1), eps=0.0)
    torch.testing.assert_close(whole, HALF * floats(1, 1, 1, -1))


def test_reinforce_plus_plus_by_hand() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    got = advantages.reinforce_plus_plus(torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64), mask)
    want = math.sqrt(0.75) * torch.tensor([[1, 1], [-1, -1]], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    baseline = advantages.reinforce_plus_plus_baseline(floats(1, 0), ids(3, 3), mask[:, :1])
    torch.testing.assert_close(baseline, HALF * floats(1, -1)[:, None], rtol=1e-6, atol=0)


@SAMPLES
def test_groups_against_a_loop(samples: list[tuple[int, int]]) -> None:
    rewards = [reward / 3 for reward, _ in samples]
    groups = [group for _, group in samples]
    r, g = floats(*rewards), ids(*groups)
    centred = by_group(rewards, groups, lambda x: [r - statistics.mean(x) for r in x])
    torch.testing.assert_close(
        advantages.grpo(r, g, eps=0.1), by_group(rewards, groups, lambda x: grpo_in_hand(x, 0.1))
    )
    torch.testing.assert_close(advantages.dr_grpo(r, g), centred)
    torch.testing.assert_close(advantages.rloo(r, g), by_group(rewards, groups, rloo_in_hand))
    teaching = sum(len({r for r, h in zip(rewards, groups, strict=True) if h == k}) > 1 for k in groups)
    torch.testing.assert_close(advantages.gpg(r, g), centred * len(samples) / max(teaching, 1))


@given(st.lists(st.tuples(st.integers(-2, 3), st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=20))
def test_opo_against_a_loop(samples: list[tuple[int, int, int]]) -> None:
    rewards, groups, lengths = (list(x) for x in zip(*samples, strict=True))
    want = []
    for reward, group, _ in samples:
        rows = [(r, n) for r, g, n in samples if g == group]
        total = sum(n for _, n in rows)
        mean = sum(r * n for r, n in rows) / total if total else sum(r for r, _ in rows) / len(rows)
        want.append(reward - mean)
    torch.testing.assert_close(advantages.opo(floats(*rewards), ids(*groups), ids(*lengths)), floats(*want))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 99))
def test_turns_and_trajectories_against_a_loop(trajectories: list[list[int]], seed: int) -> None:
    # Trajectory k belongs to prompt k % 2; the turns lie in a random order.
    turns = [(k, t, reward) for k, rewards in enumerate(trajectories) for t, reward in enumerate(rewards)]
    order = torch.randperm(len(turns), generator=torch.Generator().manual_seed(seed)).tolist()
    turns = [turns[i] for i in order]
    rewards = floats(*[float(r) for _, _, r in turns])
    groups = ids(*[k % 2 for k, _, _ in turns])
    sums = [float(sum(rewards)) for rewards in trajectories]
    score = by_group(sums, [k % 2 for k in range(len(sums))], lambda x: grpo_in_hand(x, 0.1))
    got = advantages.grpo_trajectory(rewards, groups, ids(*[k for k, _, _ in turns]), eps=0.1)
    torch.testing.assert_close(got, floats(*[score[k].item() for k, _, _ in turns]))
    cells = [(k % 2) * 100 + t for k, t, _ in turns]
    want = by_group(rewards.tolist(), cells, lambda x: grpo_in_hand(x, 0.1))
    got = advantages.grpo_turn(rewards, groups, ids(*[t for _, t, _ in turns]), eps=0.1)
    torch.testing.assert_close(got, want)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_remax_and_reinforce_plus_plus_against_a_loop(
    batch: Callable[..., Batch], rows: int, steps: int, seed: int
) -> None:
    x = batch(rows, steps, seed)
    rewards, greedy, groups = x["rewards"][:, 0], x["values"][:, 0], [row % 2 for row in range(rows)]
    differences = [r - g for r, g in zip(rewards.tolist(), greedy.tolist(), strict=True)]
    torch.testing.assert_close(advantages.remax(rewards, greedy), floats(*differences))
    centred = by_group(rewards.tolist(), groups, lambda rs: [r - statistics.mean(rs) for r in rs])
    onward, baseline = {}, {}
    for b in range(rows):
        total = 0.0
        for t in reversed(range(steps)):
            if x["mask"][b, t]:
                total = x["rewards"][b, t].item() + 0.9 * total
                onward[b, t], baseline[b, t] = total, centred[b].item()
    for got, given_ in (
        (advantages.reinforce_plus_plus(x["rewards"], x["mask"], gamma=0.9), onward),
        (advantages.reinforce_plus_plus_baseline(rewards, ids(*groups), x["mask"]), baseline),
    ):
        want = torch.zeros(rows, steps, dtype=torch.float64)
        if len(given_) > 1:
            mean, scale = statistics.mean(given_.values()), math.sqrt(statistics.variance(given_.values()) + 1e-8)
            for place, value in given_.items():
                want[place] = (value - mean) / scale
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("function", [advantages.grpo, advantages.dr_grpo, advantages.rloo, advantages.gpg])
def test_order_of_rows_and_names_of_groups_do_not_matter(function: Callable[..., Tensor]) -> None:
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(1))
    groups = torch.arange(12) % 4
    want = function(rewards, groups)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(function(rewards[order], groups[order]), want[order], rtol=0, atol=0)
    torch.testing.assert_close(function(rewards, 10**12 - 7 * groups), want, rtol=0, atol=0)


def test_a_group_with_nothing_to_compare_gets_exactly_zero() -> None:
    # 0.1 is no binary fraction: a mean of three of them is off by a bit, which a division by a tiny std would blow up.
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 5.0, 1.0, 0.0]), ids(0, 0, 0, 1, 2, 2)
    lengths = ids(3, 4, 5, 6, 1, 1)
    for got in (
        advantages.grpo(rewards, groups, eps=0.0),
        advantages.dr_grpo(rewards, groups),
        advantages.rloo(rewards, groups),
        advantages.opo(rewards, groups, lengths),
        advantages.gpg(rewards, groups),
        advantages.grpo_trajectory(rewards, groups, torch.arange(6), eps=0.0),
    ):
        assert got.dtype is torch.float32
        assert got[:4].tolist() == [0, 0, 0, 0]
        assert got[4] > 0 > got[5]


def test_whiten_by_hand() -> None:
    x, mask = torch.tensor([[1.0, 3.0, 100.0]]), torch.tensor([[True, True, False]])
    torch.testing.assert_close(advantages.whiten(x, mask, eps=0.0), torch.tensor([[-HALF, HALF, 0.0]]))
    alone = torch.tensor([[False, True, False]])
    assert advantages.whiten(x, alone).tolist() == [[0, 0, 0]]
    assert advantages.whiten(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), eps=0.0).tolist() == [[0, 0, 0]]


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_whiten_against_statistics(batch: Callable[..., Batch], rows: int, steps: int, seed: int) -> None:
    x = batch(rows, steps, seed)
    inside = x["x"][x["mask"]].tolist()
    got = advantages.whiten(x["x"], x["mask"], eps=1e-3)
    if len(inside) > 1:
        scale = math.sqrt(statistics.variance(inside) + 1e-3)
        want = ((x["x"] - statistics.mean(inside)) / scale).masked_fill(~x["mask"], 0.0)
    else:
        want = torch.zeros_like(got)
    torch.testing.assert_close(got, want)


def test_whiten_over_ranks_is_whiten_of_the_whole(batch: Callable[..., Batch]) -> None:
    x = batch(6, 5, seed=3)
    x["mask"][4:] = False
    whole = advantages.whiten(x["x"], x["mask"])
    inside = x["x"][x["mask"]]
    totals = [torch.stack([torch.tensor(float(len(inside))), inside.sum()]), (inside - inside.mean()).square().sum()]
    given_by_ranks: list[list[Tensor]] = [[], []]

    def rank() -> Callable[[Tensor], Tensor]:
        """Return one rank's sum over ranks: it notes what the rank gives, and returns the total."""
        stages = iter(zip(given_by_ranks, totals, strict=True))

        def reduce(mine: Tensor) -> Tensor:
            noted, total = next(stages)
            noted.append(mine)
            return total

        return reduce

    shares = [slice(0, 1), slice(1, 4), slice(4, 6)]
    parts = [advantages.whiten(x["x"][share], x["mask"][share], reduce=rank()) for share in shares]
    torch.testing.assert_close(torch.cat(parts), whole)
    for noted, total in zip(given_by_ranks, totals, strict=True):
        torch.testing.assert_close(torch.stack(noted).sum(0), total)


def test_errors_say_what_to_do() -> None:
    rewards, groups = floats(1, 0), ids(0, 0)
    with pytest.raises(DtypeError, match=r"grpo: rewards has dtype torch.int64, want a floating dtype: use rewards"):
        advantages.grpo(groups, groups)
    with pytest.raises(DtypeError, match=r"grpo: group_ids has dtype torch.float64, want an integer dtype"):
        advantages.grpo(rewards, rewards)
    with pytest.raises(ShapeError, match=r"grpo: group_ids has shape \[1\], want \[2\] like rewards"):
        advantages.grpo(rewards, groups[:1])
    with pytest.raises(ShapeError, match=r"grpo: rewards has shape \[2, 1\], want \[N\]"):
        advantages.grpo(rewards[:, None], groups)
    with pytest.raises(SettingError, match=r"grpo: eps is -1.0, want 0.0 or more"):
        advantages.grpo(rewards, groups, eps=-1.0)
    with pytest.raises(ShapeError, match=r"opo: lengths has shape \[1\], want \[2\] like rewards"):
        advantages.opo(rewards, groups, ids(1))
    with pytest.raises(DtypeError, match=r"grpo_turn: turn_ids has dtype torch.float64, want an integer dtype"):
        advantages.grpo_turn(rewards, groups, rewards)
    with pytest.raises(DtypeError, match=r"whiten: mask has dtype torch.int64, want torch.bool"):
        advantages.whiten(rewards[None], groups[None])
    with pytest.raises(TypeError, match="got the keyword group_size, want one of"):
        advantages.grpo(rewards, groups, group_size=2)  # type: ignore[call-arg]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 2**31))
def test_masks_against_a_loop(batch: Callable[..., Batch], lengths: list[int], steps: int, seed: int) -> None:
    first = masks.from_lengths(ids(*lengths), num_tokens=steps)
    assert first.tolist() == [[t < length for t in range(steps)] for length in lengths]
    mask = batch(len(lengths), steps, seed)["mask"] & first
    x = floats(*[float(length + 1) for length in lengths])
    assert masks.spread(x, mask).tolist() == [
        [x[b] if mask[b, t] else 0.0 for t in range(steps)] for b in range(len(lengths))
    ]
    last = [max((t for t in range(steps) if mask[b, t]), default=-1) for b in range(len(lengths))]
    assert masks.place_last(x, mask).tolist() == [
        [x[b] if t == last[b] else 0.0 for t in range(steps)] for b in range(len(lengths))
    ]


def test_masks_by_hand() -> None:
    got = masks.from_lengths(ids(0, 2, 9), num_tokens=3)
    assert got.tolist() == [[False] * 3, [True, True, False], [True] * 3]
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    assert masks.spread(floats(2, 3), mask).tolist() == [[2, 0, 2, 0], [0] * 4]
    assert masks.place_last(floats(2, 3), mask).tolist() == [[0, 0, 2, 0], [0] * 4]
    with pytest.raises(ShapeError, match=r"spread: x has shape \[1\], want \[2\] like the rows of mask"):
        masks.spread(floats(1), mask)
    with pytest.raises(DtypeError, match=r"from_lengths: lengths has dtype torch.float64, want an integer dtype"):
        masks.from_lengths(floats(1), num_tokens=2)
    with pytest.raises(SettingError, match=r"from_lengths: num_tokens is -1, want 0 or more"):
        masks.from_lengths(ids(1), num_tokens=-1)
