"""Agreement with verl; docs/peers.md explains each difference that a test here shows."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig

from m2flow.algos import advantages, aggregation, corrections, kl, logprobs, losses, masks, metrics, returns, values

Batch = dict[str, Tensor]
Close = Callable[[Tensor, Tensor], None]

CLIP = {"clip_low": 0.1, "clip_high": 0.3}


def actor(**settings: float) -> ActorConfig:
    """Return verl's actor configuration."""
    given = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, **settings}
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **given)


def rewards_at_the_end(batch: Batch) -> Tensor:
    """Return each row's score at its last token, as verl wants it."""
    return masks.place_last(batch["scores"], batch["mask"])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (advantages.grpo, core_algos.compute_grpo_outcome_advantage),
        (advantages.rloo, core_algos.compute_rloo_outcome_advantage),
        (advantages.rloo, core_algos.compute_rloo_vectorized_outcome_advantage),
    ],
)
def test_group_advantages(
    ours: Callable[..., Tensor], theirs: Callable[..., tuple[Tensor, Tensor]], batch: Batch, close: Close
) -> None:
    mask = batch["mask"]
    got = masks.spread(ours(batch["scores"], batch["group_ids"]), mask)
    close(got, theirs(rewards_at_the_end(batch), mask.double(), batch["group_ids"].numpy())[0])


def test_dr_grpo(batch: Batch, close: Close) -> None:
    mask, index = batch["mask"], batch["group_ids"].numpy()
    got = masks.spread(advantages.dr_grpo(batch["scores"], batch["group_ids"]), mask)
    want, _ = core_algos.compute_grpo_outcome_advantage(
        rewards_at_the_end(batch), mask.double(), index, norm_adv_by_std_in_grpo=False
    )
    close(got, want)


def test_opo(batch: Batch, close: Close) -> None:
    mask = batch["mask"]
    got = masks.spread(advantages.opo(batch["scores"], batch["group_ids"], mask.sum(1)), mask)
    want, _ = core_algos.compute_opo_outcome_advantage(
        rewards_at_the_end(batch), mask.double(), batch["group_ids"].numpy()
    )
    close(got, want)


def test_gpg_agrees_where_no_reward_is_zero_and_no_group_is_constant(batch: Batch, close: Close) -> None:
    mask = batch["mask"]
    got = masks.spread(advantages.gpg(batch["scores"], batch["group_ids"]), mask)
    want, _ = core_algos.compute_gpg_outcome_advantage(
        rewards_at_the_end(batch), mask.double(), batch["group_ids"].numpy()
    )
    close(got, want)


def test_gpg_difference_verl_counts_zero_rewards_instead_of_constant_groups() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 1, dtype=torch.bool)
    want, _ = core_algos.compute_gpg_outcome_advantage(scores[:, None].clone(), mask.float(), groups.numpy())
    # Two of four rows teach: the paper's alpha is 4 / 2. verl's is 4 / 3, three rewards being nonzero.
    assert advantages.gpg(scores, groups).tolist() == [1, -1, 0, 0]
    assert want[:, 0].tolist() == pytest.approx([2 / 3, -2 / 3, 0, 0])


def test_a_group_of_one_difference_verl_hands_its_reward_through() -> None:
    scores, groups, mask = torch.tensor([0.7]), torch.tensor([0]), torch.ones(1, 1)
    for ours, theirs in (
        (advantages.grpo, core_algos.compute_grpo_outcome_advantage),
        (advantages.rloo, core_algos.compute_rloo_outcome_advantage),
    ):
        assert ours(scores, groups).item() == 0
        assert theirs(scores[:, None].clone(), mask, groups.numpy())[0].item() == pytest.approx(0.7, abs=1e-5)
    # verl's own vectorised form gives 0, as we do.
    vectorised = core_algos.compute_rloo_vectorized_outcome_advantage
    assert vectorised(scores[:, None].clone(), mask, groups.numpy())[0].item() == 0


def test_remax(batch: Batch, close: Close) -> None:
    mask, greedy = batch["mask"], batch["advantages"][:, 0]
    got = masks.spread(advantages.remax(batch["scores"], greedy), mask)
    want, _ = core_algos.compute_remax_outcome_advantage(rewards_at_the_end(batch), greedy, mask.double())
    close(got, want)


def test_reinforce_plus_plus(batch: Batch, close: Close) -> None:
    mask = batch["mask"]
    got = advantages.reinforce_plus_plus(batch["rewards"], mask, gamma=0.9)
    theirs = core_algos.compute_reinforce_plus_plus_outcome_advantage
    want, _ = theirs(batch["rewards"], mask.double(), SimpleNamespace(gamma=0.9))
    close(got, want)


def test_reinforce_plus_plus_baseline(batch: Batch, close: Close) -> None:
    mask = batch["mask"]
    got = advantages.reinforce_plus_plus_baseline(batch["scores"], batch["group_ids"], mask)
    theirs = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
    want, _ = theirs(rewards_at_the_end(batch), mask.double(), batch["group_ids"].numpy())
    close(got, want)


@pytest.mark.parametrize("hole", [False, True])
def test_gae(hole: bool, batch: Batch, close: Close) -> None:
    mask = batch["mask"].clone()
    if hole:
        mask[2:, 3:5] = False
    padded = torch.nn.functional.pad(batch["values"], (0, 1))
    got, targets = returns.gae(batch["rewards"], padded, mask, gamma=0.9, lam=0.8)
    want, want_targets = core_algos.compute_gae_advantage_return(
        batch["rewards"], batch["values"], mask.double(), gamma=0.9, lam=0.8
    )
    # verl whitens inside; we leave it to the caller.
    close(advantages.whiten(got, mask), want * mask)
    close(targets[mask], want_targets[mask])


def test_whiten(batch: Batch, close: Close) -> None:
    got = advantages.whiten(batch["rewards"], batch["mask"])
    want = torch_functional.masked_whiten(batch["rewards"], batch["mask"].double())
    close(got, want * batch["mask"])


MODES = {
    "token-mean": aggregation.token_mean,
    "seq-mean-token-sum": aggregation.sequence_mean_token_sum,
    "seq-mean-token-mean": aggregation.sequence_mean_token_mean,
    "seq-mean-token-sum-norm": lambda loss, mask: aggregation.fixed_length(loss, mask, length=mask.shape[1]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty", [False, True])
def test_aggregation(mode: str, empty: bool, batch: Batch, close: Close) -> None:
    mask = batch["mask"].clone()
    if empty:
        mask[1] = False
    close(MODES[mode](batch["advantages"], mask), core_algos.agg_loss(batch["advantages"], mask.double(), mode))


def verl_loss(
    function: Callable[..., tuple[Tensor, dict[str, float]]], batch: Batch, **settings: float
) -> list[Tensor]:
    """Return verl's loss and its gradient."""
    leaf = batch["logprobs"].clone().requires_grad_()
    loss, _ = function(
        old_log_prob=batch["old_logprobs"],
        log_prob=leaf,
        advantages=batch["advantages"],
        response_mask=batch["mask"].double(),
        config=actor(**settings),
        loss_agg_mode="seq-mean-token-mean",
    )
    return [loss, torch.autograd.grad(loss, leaf)[0]]


def our_loss(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], batch: Batch) -> list[Tensor]:
    """Return our loss and its gradient."""
    leaf = batch["logprobs"].clone().requires_grad_()
    each = function(leaf, batch["old_logprobs"], batch["advantages"], batch["mask"])
    loss = aggregation.sequence_mean_token_mean(each, batch["mask"])
    return [loss, torch.autograd.grad(loss, leaf)[0]]


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, dict[str, float]]]]] = {
    "dual_clip": (
        lambda *x: losses.dual_clip(*x, **CLIP, clip_max=1.5),
        lambda **x: core_algos.compute_policy_loss_vanilla(**x),
    ),
    "gspo": (lambda *x: losses.gspo(*x, **CLIP), core_algos.compute_policy_loss_gspo),
    "gspo_token": (lambda *x: losses.gspo_token(*x, **CLIP), core_algos.compute_policy_loss_gspo),
    "cispo": (lambda *x: losses.cispo(*x, **CLIP), core_algos.compute_policy_loss_cispo),
    "sapo": (losses.sapo, core_algos.compute_policy_loss_sapo),
    "gpg": (lambda new, old, adv, mask: losses.gpg(new, adv, mask), core_algos.compute_policy_loss_gpg),
}


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name: str, batch: Batch, close: Close) -> None:
    ours, theirs = LOSSES[name]
    if name == "gspo":
        # GSPO has one advantage a row; where they differ within one, verl's is GSPO-token.
        batch = {**batch, "advantages": batch["advantages"][:, :1].expand_as(batch["mask"])}
    for mine, other in zip(our_loss(ours, batch), verl_loss(theirs, batch, clip_ratio_c=1.5), strict=True):
        close(mine, other)


def test_reinforce(batch: Batch, close: Close) -> None:
    ours = our_loss(lambda new, old, adv, mask: losses.reinforce(new, adv, mask), batch)

    def theirs(old_log_prob: Tensor, **given: object) -> tuple[Tensor, dict[str, float]]:
        return core_algos.compute_policy_loss_reinforce(rollout_log_prob=old_log_prob, **given)

    for mine, other in zip(ours, verl_loss(theirs, batch), strict=True):
        close(mine, other)


def test_decoupled_ppo(batch: Batch, close: Close) -> None:
    """verl's PPO loss with rollout weights, its dual clip out of reach."""
    old, rollout = batch["old_logprobs"], batch["rollout_logprobs"]
    weights = (old - rollout).exp().clamp_max(1.2)

    def theirs(**given: object) -> tuple[Tensor, dict[str, float]]:
        return core_algos.compute_policy_loss_vanilla(rollout_is_weights=weights, **given)

    def mine(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
        return losses.decoupled_ppo(new, old, rollout, adv, mask, **CLIP, max_weight=1.2)

    for ours, other in zip(our_loss(mine, batch), verl_loss(theirs, batch, clip_ratio_c=1e9), strict=True):
        close(ours, other)


def test_policy_metrics(batch: Batch) -> None:
    got = metrics.policy(*(batch[k] for k in ("logprobs", "old_logprobs", "advantages", "mask")), **CLIP)
    _, want = core_algos.compute_policy_loss_vanilla(
        old_log_prob=batch["old_logprobs"],
        log_prob=batch["logprobs"],
        advantages=batch["advantages"],
        response_mask=batch["mask"].double(),
        config=actor(),
    )
    for name in ("actor/ppo_kl", "actor/pg_clipfrac"):
        assert got[name].item() == pytest.approx(want[name], rel=1e-6)


@pytest.mark.parametrize(("ours", "name"), [(kl.k1, "kl"), (kl.k2, "mse"), (kl.k3, "low_var_kl"), (kl.absolute, "abs")])
def test_kl(ours: Callable[..., Tensor], name: str, batch: Batch, close: Close) -> None:
    mask = batch["mask"]
    got = ours(batch["logprobs"], batch["ref_logprobs"], mask)
    close(got[mask], core_algos.kl_penalty_forward(batch["logprobs"], batch["ref_logprobs"], name)[mask])


def test_kl_in_the_reward(batch: Batch, close: Close) -> None:
    mask, pair = batch["mask"], (batch["old_logprobs"], batch["ref_logprobs"])
    got = kl.in_reward(batch["rewards"], kl.k1(*pair, mask), mask, coef=0.1)
    close(got, core_algos.compute_rewards(batch["rewards"], *pair, 0.1) * mask)


def test_k3_difference_verl_cuts_it_at_ten() -> None:
    new, ref = torch.tensor([[-9.0]]), torch.tensor([[-1.0]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert kl.k3(new, ref, mask).item() == pytest.approx(np.exp(8.0) - 1 - 8.0)
    assert core_algos.kl_penalty_forward(new, ref, "low_var_kl").item() == 10


def test_clipped_value_loss(batch: Batch, close: Close) -> None:
    each = values.clipped(batch["values"], batch["old_values"], batch["returns"], batch["mask"], clip=0.3)
    want, _ = core_algos.compute_value_loss(
        batch["values"], batch["returns"], batch["old_values"], batch["mask"].double(), cliprange_value=0.3
    )
    close(aggregation.token_mean(each, batch["mask"]), want)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrections(level: corrections.Level, batch: Batch, close: Close) -> None:
    mask = batch["mask"]
    pair = batch["old_logprobs"], batch["rollout_logprobs"]
    theirs = rollout_corr_helper.compute_rollout_correction_weights
    want, _ = theirs(pair[0] - pair[1], mask.double(), level, 1.2)
    close(corrections.tis(*pair, mask, level=level, max_weight=1.2), want)
    want, _ = theirs(pair[0] - pair[1], mask.double(), level, "0.8_1.2")
    close(corrections.mis(*pair, mask, level=level, min_weight=0.8, max_weight=1.2), want)
    if level == "token":
        close(corrections.icepop(*pair, mask, min_weight=0.8, max_weight=1.2), want)


def test_geometric_rejection(batch: Batch) -> None:
    """verl bounds the mean of the log ratio's negative; these bounds are each other's inverse."""
    mask, pair = batch["mask"], (batch["old_logprobs"], batch["rollout_logprobs"])
    theirs = rollout_corr_helper.compute_rollout_rejection_mask
    want, _ = theirs(pair[0] - pair[1], mask.double(), "seq_mean_k1", "0.9_" + str(1 / 0.9))
    kept = corrections.mis(*pair, mask, level="geometric", min_weight=0.9, max_weight=1 / 0.9) > 0
    assert kept.tolist() == want.bool().tolist()


def test_rollout_metrics(batch: Batch, close: Close) -> None:
    pair = batch["old_logprobs"], batch["rollout_logprobs"]
    got = metrics.rollout_correction(*pair, batch["mask"])
    want = rollout_corr_helper.compute_offpolicy_metrics(*pair, batch["mask"].double())
    for name in ("kl", "k3_kl"):
        assert got[f"rollout_corr/{name}"].item() == pytest.approx(want[name], rel=1e-6)
    gap, weighing = pair[0] - pair[1], rollout_corr_helper.compute_rollout_correction_weights
    _, want = weighing(gap, batch["mask"].double(), "token", 1e9)
    assert got["rollout_corr/ess"].item() == pytest.approx(want["rollout_is_eff_sample_size"], rel=1e-6)


def test_logprobs_and_entropy(batch: Batch, close: Close) -> None:
    mask = torch.ones_like(batch["mask"])
    logp, entropy = logprobs.from_logits_with_entropy(batch["logits"], batch["tokens"], mask)
    close(logp, torch_functional.logprobs_from_logits_naive(batch["logits"], batch["tokens"]))
    close(entropy, torch_functional.entropy_from_logits(batch["logits"]))
