"""Agreement with torchrl; docs/peers.md explains each difference that a test here shows."""

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data.postprocs import MultiStep
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate
from torchrl.objectives.bc import BCLoss
from torchrl.objectives.value import functional

from m2flow.algos import cloning, returns, sac, targets

Batch = dict[str, Tensor]
Close = Callable[[Tensor, Tensor], None]

# torchrl warns of names that its own base class lacks, and of target networks that nothing moves.
pytestmark = pytest.mark.filterwarnings("ignore:The name target_:UserWarning", "ignore:No target network updater")


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


class Critic(nn.Module):
    """A value of observation [B, 9] and action [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(11, 1, dtype=torch.float64)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.linear(torch.cat([observation, action], -1))


@pytest.fixture
def learner() -> SACLoss:
    """Return torchrl's SAC, with a small actor and two critics."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(9, 4, dtype=torch.float64), NormalParamExtractor())
    actor = ProbabilisticActor(
        module=TensorDictModule(layers, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    critic = ValueOperator(Critic(), in_keys=["observation", "action"])
    made = SACLoss(
        actor,
        critic,
        loss_function="l2",
        alpha_init=0.3,
        target_entropy=-2.0,
        reduction="none",
        scalar_output_mode="exclude",
    )
    made.make_value_estimator(gamma=0.9)
    return made


def transitions(batch: Batch) -> TensorDict:
    """Return six transitions."""
    terminated = batch["scores"][:, None] > 0
    return TensorDict(
        {
            "observation": batch["rewards"],
            "action": batch["returns"][:, :2].tanh(),
            "next": {
                "observation": batch["values"],
                "reward": batch["scores"][:, None],
                "done": terminated,
                "terminated": terminated,
            },
        },
        [6],
    )


def values_of(learner: SACLoss, observation: Tensor, action: Tensor) -> Tensor:
    """Return the two critics' values [2, B]."""
    given = TensorDict({"observation": observation, "action": action}, [6])
    return learner._vmap_qnetworkN0(given, learner.qvalue_network_params)["state_action_value"][..., 0]


def act(learner: SACLoss, observation: Tensor) -> tuple[Tensor, Tensor]:
    """Return an action sampled with the seed that the losses are called with, and its log-probability."""
    torch.manual_seed(1)
    distribution = learner.actor_network.get_dist(TensorDict({"observation": observation}, [6]))
    action = distribution.rsample()
    return action, distribution.log_prob(action)


def test_sac_actor(learner: SACLoss, batch: Batch, close: Close) -> None:
    action, logprobs = act(learner, batch["rewards"])
    q = values_of(learner, batch["rewards"], action)
    torch.manual_seed(1)
    close(sac.actor_loss(logprobs, q, temperature=0.3), learner.actor_loss(transitions(batch))[0])


def test_sac_critic_difference_torchrl_does_not_halve(learner: SACLoss, batch: Batch, close: Close) -> None:
    data = transitions(batch)
    action, logprobs = act(learner, batch["values"])
    target = sac.td_target(
        batch["scores"],
        values_of(learner, batch["values"], action),
        logprobs,
        data["next", "terminated"][:, 0],
        gamma=0.9,
        temperature=0.3,
    )
    torch.manual_seed(1)
    close(target, learner._compute_target_v2(data))
    torch.manual_seed(1)
    q = values_of(learner, batch["rewards"], data["action"])
    close(2 * sac.critic_loss(q, target), learner.qvalue_v2_loss(data)[0])


def test_sac_temperature_difference_torchrl_takes_the_logarithm(learner: SACLoss, batch: Batch, close: Close) -> None:
    log_alpha = learner.log_alpha
    ours = sac.temperature_loss(log_alpha, batch["scores"], target_entropy=-2.0)
    close(ours / log_alpha.exp(), learner._alpha_loss(batch["scores"]) / log_alpha)


def test_target_update(learner: SACLoss, close: Close) -> None:
    source, target = Critic(), Critic()
    updater = SoftUpdate(learner, tau=0.3)
    names = ("module", "linear", "weight")
    now, then = learner.qvalue_network_params[names], learner.target_qvalue_network_params[names]
    with torch.no_grad():
        now.data.add_(1.0)
        source.linear.weight.copy_(now[0])
        target.linear.weight.copy_(then[0])
    targets.update(target, source, tau=0.3)
    updater.step()
    close(target.linear.weight, learner.target_qvalue_network_params[names][0])


@pytest.mark.parametrize(("ours", "name"), [(cloning.l1, "l1"), (cloning.mse, "l2")])
def test_cloning(ours: Callable[..., Tensor], name: str, batch: Batch, close: Close) -> None:
    linear, everywhere = nn.Linear(9, 9, dtype=torch.float64), torch.ones(6, 1, dtype=torch.bool)
    loss = BCLoss(TensorDictModule(linear, ["observation"], ["action"]), loss_function=name)
    data = TensorDict({"observation": batch["rewards"], "action": batch["returns"]}, [6])
    each = ours(linear(batch["rewards"])[:, None], batch["returns"][:, None], everywhere)
    close(each.mean(), loss(data)["loss_bc"])
