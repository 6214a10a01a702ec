"""Agreement with torchrl; docs/peers.md explains each difference that a test here shows."""

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.postprocs import MultiStep
from torchrl.modules import TanhNormal
from torchrl.objectives.value import functional

from m2flow.algos import returns, sac

Batch = dict[str, Tensor]
Close = Callable[[Tensor, Tensor], None]


def ends(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return terminated and truncated flags [B, T], never both."""
    terminated = batch["ref_logprobs"] - batch["logprobs"] > 0.4
    return terminated, (batch["rollout_logprobs"] - batch["logprobs"] > 0.4) & ~terminated


@pytest.mark.parametrize(
    "theirs", [functional.generalized_advantage_estimate, functional.vec_generalized_advantage_estimate]
)
def test_gae(theirs: Callable[..., tuple[Tensor, Tensor]], batch: Batch, close: Close) -> None:
    rewards, now, final = batch["rewards"], batch["values"], batch["old_values"]
    terminated, truncated = ends(batch)
    bootstrap = batch["returns"][:, :1]
    everything = torch.ones_like(terminated)
    got = returns.gae(
        rewards,
        torch.cat([now, bootstrap], 1),
        everything,
        gamma=0.9,
        lam=0.8,
        terminated=terminated,
        truncated=truncated,
        final_values=final,
    )
    following = torch.where(truncated, final, torch.cat([now[:, 1:], bootstrap], 1))
    columns = (x[..., None] for x in (now, following, rewards, terminated | truncated, terminated))
    for mine, other in zip(got, theirs(0.9, 0.8, *columns), strict=True):
        close(mine, other[..., 0])


def test_reward_to_go(batch: Batch, close: Close) -> None:
    terminated, _ = ends(batch)
    everything = torch.ones_like(terminated)
    got = returns.reward_to_go(batch["rewards"], everything, gamma=0.9, terminated=terminated)
    # torchrl wants the last step of a row to be an end.
    done = terminated.clone()
    done[:, -1] = True
    close(got, functional.reward2go(batch["rewards"][..., None], done[..., None], 0.9)[..., 0])


def test_n_step(batch: Batch, close: Close) -> None:
    terminated, _ = ends(batch)
    rows, steps = terminated.shape
    never = torch.zeros_like(terminated)
    following = batch["values"]
    got = returns.n_step(
        batch["rewards"], following, ~never, num_steps=3, gamma=0.9, terminated=terminated, truncated=never
    )
    data = TensorDict(
        {
            "obs": torch.arange(steps).expand(rows, steps)[..., None],
            "next": {
                "obs": following[..., None],
                "reward": batch["rewards"][..., None],
                "done": terminated[..., None],
                "terminated": terminated[..., None],
                # MultiStep moves the observation n steps on, and anything beside it, but not `terminated`.
                "ended": terminated[..., None],
            },
        },
        [rows, steps],
    )
    out = MultiStep(gamma=0.9, n_steps=3)(data)
    steps_taken = out["steps_to_next_obs"].reshape(rows, steps)
    ended = out["next", "ended"].reshape(rows, steps)
    want = out["next", "reward"][..., 0] + 0.9**steps_taken * out["next", "obs"][..., 0] * ~ended
    close(got, want)


def test_squash(batch: Batch, close: Close) -> None:
    mean, log_std, noise = batch["rewards"], batch["values"] * 0.3, batch["returns"]
    actions, logprobs = sac.squash(mean, log_std, noise)
    # Where tanh is near 1, torchrl clips the action before inverting it; compare elsewhere.
    near = actions.abs().amax(1) < 0.99
    theirs = TanhNormal(mean, log_std.exp(), low=-1.0, high=1.0, tanh_loc=False, safe_tanh=False)
    torch.testing.assert_close(logprobs[near], theirs.log_prob(actions)[near], rtol=1e-5, atol=1e-5, check_dtype=False)
