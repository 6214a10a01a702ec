"""SAC, target networks, replay and RLPD: by hand, against torch.distributions, frequencies of draws."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from m2flow.algos import replay, rlpd, sac, targets
from m2flow.algos.errors import DtypeError, SettingError, ShapeError


def floats(*x: float) -> Tensor:
    """Return a float64 vector."""
    return torch.tensor(x, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


def walk(length: int, first: float = 0.0) -> replay.Trajectory:
    """Return a trajectory whose observations count up from `first` + 1."""
    steps = torch.arange(1, length + 1) + first
    return {"observation": steps, "action": torch.stack([steps, -steps], 1)}


def test_sac_by_hand() -> None:
    q, logp, never = floats(4, 3)[:, None], floats(-1), torch.tensor([False])
    target = sac.td_target(floats(1), q, logp, never, gamma=0.5, temperature=2.0)
    assert target.tolist() == [3.5]
    assert sac.td_target(floats(1), q, logp, ~never, gamma=0.5, temperature=2.0).tolist() == [1]
    assert sac.critic_loss(floats(1, 3)[:, None], floats(2)).tolist() == [1]
    assert sac.actor_loss(logp, q, temperature=torch.tensor(2.0)).tolist() == [-5]
    zero = torch.tensor(0.0, requires_grad=True)
    loss = sac.temperature_loss(zero, floats(3), target_entropy=-2.0)
    assert loss.tolist() == [-1]
    # Entropy -3 is under the target of -2: the step against the gradient raises the temperature.
    assert torch.autograd.grad(loss.sum(), zero)[0].item() == -1
    actions, logprobs = sac.squash(*[torch.zeros(1, 1)] * 3)
    assert actions.item() == 0
    assert logprobs.item() == pytest.approx(-0.5 * math.log(2 * math.pi))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_squash_against_torchs_distributions(rows: int, size: int, seed: int) -> None:
    mean, log_std, noise = (
        torch.randn(rows, size, generator=generator(seed + i), dtype=torch.float64) for i in range(3)
    )
    actions, logprobs = sac.squash(mean, log_std, noise)
    tanh = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), torch.distributions.TanhTransform(cache_size=1)
    )
    # atanh(tanh(u)) loses digits as tanh nears 1: compare where it does not.
    near = actions.abs().amax(1) < 0.999
    torch.testing.assert_close(logprobs[near], tanh.log_prob(actions).sum(1)[near], rtol=1e-6, atol=1e-6)


def test_squash_stays_finite_where_tanh_rounds_to_one() -> None:
    mean = torch.tensor([[50.0], [-50.0]], requires_grad=True)
    actions, logprobs = sac.squash(mean, torch.zeros(2, 1), torch.zeros(2, 1))
    assert actions.flatten().tolist() == [1, -1]
    want = -0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 50)
    assert logprobs.tolist() == pytest.approx([want, want])
    assert torch.isfinite(torch.autograd.grad(logprobs.sum(), mean)[0]).all()


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31))
def test_sac_against_a_loop(critics: int, count: int, seed: int) -> None:
    g = generator(seed)
    q, next_q = (torch.randn(critics, count, generator=g, dtype=torch.float64) for _ in range(2))
    rewards, logp = (torch.randn(count, generator=g, dtype=torch.float64) for _ in range(2))
    terminated = torch.rand(count, generator=g) < 0.3
    targets_, critic, actor, learned = [], [], [], []
    for n in range(count):
        future = min(next_q[:, n].tolist()) - 0.2 * logp[n].item()
        targets_.append(rewards[n].item() + (0.0 if terminated[n] else 0.9 * future))
        critic.append(sum(0.5 * (x - targets_[-1]) ** 2 for x in q[:, n].tolist()))
        actor.append(0.2 * logp[n].item() - min(q[:, n].tolist()))
        learned.append(-math.exp(0.3) * (logp[n].item() - 2.0))
    got = sac.td_target(rewards, next_q, logp, terminated, gamma=0.9, temperature=0.2)
    assert got.tolist() == pytest.approx(targets_)
    assert sac.critic_loss(q, got).tolist() == pytest.approx(critic)
    assert sac.actor_loss(logp, q, temperature=0.2).tolist() == pytest.approx(actor)
    loss = sac.temperature_loss(torch.tensor(0.3, dtype=torch.float64), logp, target_entropy=-2.0)
    assert loss.tolist() == pytest.approx(learned)


def test_sac_errors_say_what_to_do() -> None:
    with pytest.raises(ShapeError, match=r"critic_loss: q has shape \[1\], want \[E, N\]"):
        sac.critic_loss(floats(1), floats(1))
    with pytest.raises(ShapeError, match=r"critic_loss: q without E has shape \[1\], want \[2\] like the transitions"):
        sac.critic_loss(floats(1)[None], floats(1, 2))
    with pytest.raises(DtypeError, match=r"td_target: terminated has dtype torch.float64, want torch.bool"):
        sac.td_target(floats(1), floats(1)[None], floats(1), floats(0), gamma=0.9, temperature=0.1)
    with pytest.raises(ShapeError, match=r"squash: noise has shape \[1, 1\], want \[1, 2\] like mean"):
        sac.squash(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 1))
    with pytest.raises(SettingError, match=r"td_target: gamma is 2.0, want a number from 0.0 to 1.0"):
        sac.td_target(floats(1), floats(1)[None], floats(1), floats(0) > 1, gamma=2.0, temperature=0.1)
    with pytest.raises(SettingError, match=r"actor_loss: temperature is -0.1, want 0.0 or more"):
        sac.actor_loss(floats(1), floats(1)[None], temperature=-0.1)


def test_target_update_by_hand() -> None:
    source, target = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for parameter in target.parameters():
        nn.init.zeros_(parameter)
    source.running_mean.fill_(7.0)  # type: ignore[union-attr]
    for value in (0.25, 0.4375):
        targets.update(target, source, tau=0.25)
        assert target.weight.tolist() == [value, value]
    assert target.running_mean.tolist() == [7, 7]  # type: ignore[union-attr]
    assert source.weight.tolist() == [1, 1]
    targets.update(target, source, tau=1.0)
    assert target.weight.tolist() == [1, 1]
    with pytest.raises(ShapeError, match=r"update: bias is \(\[3\], torch.float32\) in target and \(\[2\], torch"):
        targets.update(nn.BatchNorm1d(3, affine=True, track_running_stats=False), source, tau=0.5)
    with pytest.raises(ShapeError, match=r"update: bias is .*float32\) in target and .*float64\) in source, want the"):
        targets.update(target, nn.BatchNorm1d(2).double(), tau=0.5)
    with pytest.raises(SettingError, match=r"update: tau is 2.0, want a number from 0.0 to 1.0"):
        targets.update(target, source, tau=2.0)


@given(st.integers(0, 2**31), st.floats(0.0, 1.0))
def test_target_update_against_a_loop(seed: int, tau: float) -> None:
    torch.manual_seed(seed)
    source, target = nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.float64)
    pairs = zip(target.weight.flatten().tolist(), source.weight.flatten().tolist(), strict=True)
    want = [(1 - tau) * old + tau * new for old, new in pairs]
    targets.update(target, source, tau=tau)
    assert target.weight.flatten().tolist() == pytest.approx(want)


def test_target_update_compiles_to_one_graph(compiled: Callable[..., Callable[..., None]]) -> None:
    source, target = nn.Linear(2, 1), nn.Linear(2, 1)
    want = (0.75 * target.weight + 0.25 * source.weight).detach()
    compiled(lambda: targets.update(target, source, tau=0.25))()
    torch.testing.assert_close(target.weight.detach(), want)


def test_windows_never_cross_a_trajectorys_end() -> None:
    memory = replay.UniformReplay(100)
    for k, length in enumerate((1, 3, 10)):
        memory.add(walk(length, first=100.0 * k))
    assert len(memory) == 14
    got = memory.sample(batch_size=200, num_steps=4, generator=generator())
    assert got.fields["observation"].shape == (200, 4)
    assert got.fields["action"].shape == (200, 4, 2)
    assert (got.weights == 1).all()
    for b in range(200):
        length = int(got.mask[b].sum())
        seen = got.fields["observation"][b].tolist()
        k = int(got.trajectory_ids[b])
        last = 100.0 * k + (1, 3, 10)[k]
        assert got.mask[b].tolist() == [t < length for t in range(4)]
        assert seen == [seen[0] + t if t < length else 0 for t in range(4)]
        assert 100.0 * k < seen[0] <= last
        assert length == min(4, int(last - seen[0]) + 1)


def test_every_step_is_as_likely_to_be_first() -> None:
    memory = replay.UniformReplay(100)
    for k, length in enumerate((1, 4, 5)):
        memory.add(walk(length, first=100.0 * k))
    draws = memory.sample(batch_size=20_000, num_steps=1, generator=generator(1)).fields["observation"][:, 0]
    _, counts = draws.unique(return_counts=True)
    assert len(counts) == 10
    # 2,000 draws expected of each, with a standard deviation of 42: five of them either way.
    assert (counts - 2000).abs().max() < 212


def test_the_oldest_trajectories_make_room() -> None:
    memory = replay.UniformReplay(6)
    assert [memory.add(walk(n)) for n in (3, 3)] == [0, 1]
    assert memory.add(walk(1)) == 2
    assert len(memory) == 4
    assert set(memory.sample(batch_size=99, num_steps=1, generator=generator()).trajectory_ids.tolist()) == {1, 2}
    memory.add(walk(6))
    assert len(memory) == 6


def test_a_seed_repeats_a_sample_and_a_state_goes_on() -> None:
    memory = replay.PrioritizedReplay(20)
    for n in (2, 3, 4):
        memory.add(walk(n))
    memory.update(torch.tensor([1, 77]), floats(5.0, 1.0))
    other = replay.PrioritizedReplay(20)
    other.load_state_dict(memory.state_dict())
    for replayed in (memory, other):
        got = replayed.sample(batch_size=8, num_steps=2, generator=generator(3))
        want = memory.sample(batch_size=8, num_steps=2, generator=generator(3))
        torch.testing.assert_close(got.fields, want.fields)
        torch.testing.assert_close(got.weights, want.weights)
    assert other.add(walk(1)) == 3
    with pytest.raises(SettingError, match=r"load_state_dict: got 9 steps, want 5 or fewer"):
        replay.UniformReplay(5).load_state_dict(memory.state_dict())
    with pytest.raises(SettingError, match=r"load_state_dict: got 0 priorities for 1 trajectories, want one each"):
        other.load_state_dict({"trajectories": {0: walk(1)}, "next_id": 1, "priorities": {}})


def test_priorities_shape_draws_and_weights() -> None:
    memory = replay.PrioritizedReplay(100, alpha=1.0, beta=1.0)
    for _ in range(2):
        memory.add(walk(2))
    memory.update(torch.tensor([0, 1]), floats(1.0, 3.0))
    got = memory.sample(batch_size=10_000, num_steps=1, generator=generator(4))
    second = got.trajectory_ids == 1
    # A chance of 3/4, with a standard deviation of 43 in 10,000 draws.
    assert abs(int(second.sum()) - 7500) < 217
    # Weights (chance / uniform)^-1 are 2 and 2/3; the largest is scaled to 1.
    assert got.weights[~second].unique().tolist() == [1]
    assert got.weights[second].unique().tolist() == pytest.approx([1 / 3])
    # A mean with these weights is the mean over steps.
    assert memory.add(walk(2)) == 2
    assert memory.state_dict()["priorities"][2] == 3.0


def test_replay_errors_say_what_to_do() -> None:
    memory = replay.UniformReplay(3)
    with pytest.raises(
        SettingError, match=r"sample: the replay is empty, want one trajectory at least: add some first"
    ):
        memory.sample(batch_size=1, num_steps=1, generator=generator())
    with pytest.raises(
        ShapeError, match=r"add: lengths are {'observation': 4, 'action': 4}, want one for all, from 1 to"
    ):
        memory.add(walk(4))
    with pytest.raises(ShapeError, match=r"add: lengths are {'a': 1, 'b': 2}"):
        memory.add({"a": floats(1), "b": floats(1, 2)})
    with pytest.raises(ShapeError, match=r"add: lengths are {}"):
        memory.add({})
    memory.add(walk(2))
    with pytest.raises(ShapeError, match=r"add: fields are .* want those held"):
        memory.add({"observation": floats(1)})
    with pytest.raises(SettingError, match=r"sample: batch_size is 0, want 1 or more"):
        memory.sample(batch_size=0, num_steps=1, generator=generator())
    ranked = replay.PrioritizedReplay(3)
    with pytest.raises(SettingError, match=r"update: priority is 0.0, want a finite one over 0"):
        ranked.update(torch.tensor([0]), floats(0.0))
    with pytest.raises(SettingError, match=r"replay: beta is 2.0, want a number from 0.0 to 1.0"):
        replay.PrioritizedReplay(3, beta=2.0)


def test_rlpd_mixes_and_takes_a_few_critics() -> None:
    online, offline = replay.UniformReplay(50), replay.UniformReplay(50)
    online.add(walk(5))
    offline.add(walk(5, first=100.0))

    def batch(share: float) -> list[bool]:
        got = rlpd.mixed_batch(online, offline, batch_size=5, num_steps=2, generator=generator(), offline_share=share)
        assert got.mask.shape == (5, 2)
        return (got.fields["observation"][:, 0] > 100).tolist()

    assert batch(0.4) == [False, False, False, True, True]
    assert batch(0.0) == [False] * 5
    assert batch(1.0) == [True] * 5
    q = torch.arange(10.0)[:, None].expand(10, 3)
    chosen = rlpd.subset(q, num_critics=4, generator=generator(1))
    assert chosen.shape == (4, 3)
    assert len(set(chosen[:, 0].tolist())) == 4
    seen = {tuple(rlpd.subset(q, num_critics=2, generator=g)[:, 0].tolist()) for g in map(generator, range(30))}
    assert len(seen) > 10
    with pytest.raises(SettingError, match=r"subset: num_critics is 11, want a number from 1 to 10"):
        rlpd.subset(q, num_critics=11, generator=generator())
    other = replay.UniformReplay(5)
    other.add({"observation": floats(1)})
    with pytest.raises(ShapeError, match=r"mixed_batch: online has {'action': \(\[2\], .* and offline {'obs"):
        rlpd.mixed_batch(online, other, batch_size=4, num_steps=1, generator=generator())
