"""GAE, reward-to-go and n-step targets: values by hand, and a loop over steps as oracle."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import returns
from m2flow.algos.errors import DtypeError, SettingError, ShapeError

Batch = dict[str, Tensor]
# Beyond 32 and beyond 512 steps the scan runs in blocks, and in blocks of blocks.
STEPS = st.one_of(st.integers(1, 40), st.sampled_from([33, 64, 100, 530]))
CASES = given(st.integers(1, 3), STEPS, st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 0.97, 1.0]))


def matrix(*rows: list[float]) -> Tensor:
    """Return a float64 matrix of the rows."""
    return torch.tensor(rows, dtype=torch.float64)


def marks(*rows: str) -> Tensor:
    """Return a bool matrix from rows of 0 and 1."""
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def test_gae_by_hand() -> None:
    advantages, targets = returns.gae(matrix([1, 1]), matrix([0.5, 0.5, 0]), marks("11"), gamma=1.0, lam=0.5)
    torch.testing.assert_close(advantages, matrix([1.25, 0.5]))
    torch.testing.assert_close(targets, matrix([1.75, 1.0]))


def test_gae_bootstraps_what_goes_on_and_not_what_ended() -> None:
    rewards, values, mask = matrix([1, 1]), matrix([0, 0, 10]), marks("11")
    on, _ = returns.gae(rewards, values, mask, gamma=0.5, lam=1.0)
    torch.testing.assert_close(on, matrix([1 + 0.5 * 6, 1 + 0.5 * 10]))
    over, _ = returns.gae(rewards, values, mask, gamma=0.5, lam=1.0, terminated=marks("01"))
    torch.testing.assert_close(over, matrix([1.5, 1]))


def test_gae_tells_truncated_from_terminated() -> None:
    # The first episode ends at step 0; values[1] = 100 is of the next episode's first observation and may not leak.
    rewards, values, mask, end = matrix([1, 1]), matrix([2, 100, 0]), marks("11"), marks("10")
    stopped, _ = returns.gae(rewards, values, mask, gamma=0.5, lam=1.0, terminated=end)
    torch.testing.assert_close(stopped, matrix([1 - 2, 1 - 100]))
    final = matrix([8, float("nan")])
    cut, _ = returns.gae(rewards, values, mask, gamma=0.5, lam=1.0, truncated=end, final_values=final)
    torch.testing.assert_close(cut, matrix([1 + 4 - 2, 1 - 100]))
    both, _ = returns.gae(rewards, values, mask, gamma=0.5, lam=1.0, terminated=end, truncated=end, final_values=final)
    torch.testing.assert_close(both, stopped)


def test_gae_passes_over_what_is_not_the_policys_own() -> None:
    # An agent's row: two tokens, two of the tool's, one token, padding. As if only the three were there.
    rewards, values = matrix([0, 1, 9, 9, 2, 9]), matrix([0.1, 0.2, 9, 9, 0.3, 9, 0])
    got, _ = returns.gae(rewards, values, marks("110010"), gamma=0.9, lam=0.8)
    short, _ = returns.gae(matrix([0, 1, 2]), matrix([0.1, 0.2, 0.3, 0]), marks("111"), gamma=0.9, lam=0.8)
    torch.testing.assert_close(got, matrix([short[0, 0].item(), short[0, 1].item(), 0, 0, short[0, 2].item(), 0]))


@CASES
def test_gae_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, seed: int, lam: float) -> None:
    x = batch(rows, steps, seed)
    values = torch.cat([x["values"], x["old_values"][:, :1]], 1)
    got, targets = returns.gae(
        x["rewards"],
        values,
        x["mask"],
        gamma=0.9,
        lam=lam,
        terminated=x["terminated"],
        truncated=x["truncated"],
        final_values=x["next_values"],
    )
    want = torch.zeros(rows, steps, dtype=torch.float64)
    for b in range(rows):
        onward, follows = 0.0, values[b, steps].item()
        for t in reversed(range(steps)):
            if not x["mask"][b, t]:
                continue
            value, reward = values[b, t].item(), x["rewards"][b, t].item()
            if x["terminated"][b, t]:
                onward = reward - value
            elif x["truncated"][b, t]:
                onward = reward + 0.9 * x["next_values"][b, t].item() - value
            else:
                onward = reward + 0.9 * follows - value + 0.9 * lam * onward
            follows = value
            want[b, t] = onward
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(targets, (want + x["values"]).masked_fill(~x["mask"], 0.0))


def test_gae_errors_say_what_to_do() -> None:
    rewards, values, mask = matrix([1, 1]), matrix([0, 0, 0]), marks("11")
    with pytest.raises(ShapeError, match=r"gae: values has 2 entries, want 3 \(T\+1\): append the bootstrap value"):
        returns.gae(rewards, values[:, :2], mask, gamma=1.0, lam=1.0)
    with pytest.raises(SettingError, match=r"gae: got one of truncated and final_values, want both or neither"):
        returns.gae(rewards, values, mask, gamma=1.0, lam=1.0, truncated=mask)
    with pytest.raises(DtypeError, match=r"gae: terminated has dtype torch.int64, want torch.bool"):
        returns.gae(rewards, values, mask, gamma=1.0, lam=1.0, terminated=mask.long())
    with pytest.raises(ShapeError, match=r"gae: truncated has shape \[1, 1\], want \[1, 2\] like mask"):
        returns.gae(rewards, values, mask, gamma=1.0, lam=1.0, truncated=mask[:, :1], final_values=rewards)
    with pytest.raises(SettingError, match=r"gae: lam is 1.5, want a number from 0.0 to 1.0"):
        returns.gae(rewards, values, mask, gamma=1.0, lam=1.5)
    with pytest.raises(DtypeError, match=r"gae: rewards is a list, want a torch.Tensor"):
        returns.gae([1.0], values, mask, gamma=1.0, lam=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="want one of rewards, values, mask"):
        returns.gae(rewards, values, mask, gamma=1.0, lamda=1.0)  # type: ignore[call-arg]


def test_reward_to_go_by_hand() -> None:
    got = returns.reward_to_go(matrix([1, 2, 4]), marks("111"), gamma=0.5)
    torch.testing.assert_close(got, matrix([3, 4, 4]))
    ended = returns.reward_to_go(matrix([1, 2, 4]), marks("111"), gamma=0.5, terminated=marks("010"))
    torch.testing.assert_close(ended, matrix([2, 2, 4]))
    over_a_gap = returns.reward_to_go(matrix([1, 9, 4]), marks("101"), gamma=0.5)
    torch.testing.assert_close(over_a_gap, matrix([3, 0, 4]))


@CASES
def test_reward_to_go_against_a_loop(
    batch: Callable[..., Batch], rows: int, steps: int, seed: int, gamma: float
) -> None:
    x = batch(rows, steps, seed)
    got = returns.reward_to_go(x["rewards"], x["mask"], gamma=gamma, terminated=x["terminated"])
    want = torch.zeros(rows, steps, dtype=torch.float64)
    for b in range(rows):
        onward = 0.0
        for t in reversed(range(steps)):
            if x["mask"][b, t]:
                onward = x["rewards"][b, t].item() + (0.0 if x["terminated"][b, t] else gamma * onward)
                want[b, t] = onward
    torch.testing.assert_close(got, want)


def test_n_step_by_hand() -> None:
    rewards, following, mask, never = matrix([1, 2, 4]), matrix([8, 8, 8]), marks("111"), marks("000")
    got = returns.n_step(rewards, following, mask, num_steps=2, gamma=0.5, terminated=never, truncated=never)
    torch.testing.assert_close(got, matrix([4, 6, 8]))
    end = marks("010")
    stopped = returns.n_step(rewards, following, mask, num_steps=2, gamma=0.5, terminated=end, truncated=never)
    torch.testing.assert_close(stopped, matrix([2, 2, 8]))
    cut = returns.n_step(rewards, following, mask, num_steps=3, gamma=0.5, terminated=never, truncated=end)
    torch.testing.assert_close(cut, matrix([1 + 1 + 2, 2 + 4, 8]))


@given(st.integers(1, 3), st.integers(1, 20), st.integers(0, 2**31), st.integers(1, 25))
def test_n_step_against_a_loop(batch: Callable[..., Batch], rows: int, steps: int, seed: int, num_steps: int) -> None:
    x = batch(rows, steps, seed)
    got = returns.n_step(
        x["rewards"],
        x["next_values"],
        x["mask"],
        num_steps=num_steps,
        gamma=0.9,
        terminated=x["terminated"],
        truncated=x["truncated"],
    )
    want = torch.zeros(rows, steps, dtype=torch.float64)
    for b in range(rows):
        for t in range(steps):
            if not x["mask"][b, t]:
                continue
            total, at = 0.0, t
            for i in range(num_steps):
                at = t + i
                total += 0.9**i * x["rewards"][b, at].item()
                last = at + 1 == steps or not x["mask"][b, at + 1]
                if i + 1 == num_steps or last or x["terminated"][b, at] or x["truncated"][b, at]:
                    if not x["terminated"][b, at]:
                        total += 0.9 ** (i + 1) * x["next_values"][b, at].item()
                    break
            want[b, t] = total
    torch.testing.assert_close(got, want)


def test_n_step_errors_say_what_to_do() -> None:
    one, mask = matrix([1]), marks("1")
    with pytest.raises(SettingError, match=r"n_step: num_steps is 0, want 1 or more"):
        returns.n_step(one, one, mask, num_steps=0, gamma=0.9, terminated=mask, truncated=mask)
