"""Agreement with TRL; docs/peers.md explains each difference that a test here shows."""

from collections import defaultdict
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from m2flow.algos import advantages, aggregation, kl, logprobs, losses, shaping

Batch = dict[str, Tensor]
Close = Callable[[Tensor, Tensor], None]
CLIP = {"clip_low": 0.1, "clip_high": 0.3}


def trl_loss(
    loss_type: str, batch: Batch, *, level: str = "token", epsilon_high: float = 0.3, beta: float = 0.0
) -> list[Tensor]:
    """Return the loss of TRL's GRPOTrainer, whose method is called on a stand-in for the trainer, and its gradient."""
    leaf = batch["logprobs"].clone().requires_grad_()
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = leaf, torch.zeros_like(leaf), None
    trainer.top_entropy_quantile = 1.0
    trainer.off_policy_mask_threshold = None
    trainer.importance_sampling_level = level
    trainer.loss_type, trainer.beta = loss_type, beta
    trainer.epsilon_low, trainer.epsilon_high = 0.1, epsilon_high
    trainer.args.delta, trainer.args.use_bias_correction_kl = None, False
    trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg = 1.0, 1.05
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = 1
    trainer.max_completion_length = 20
    trainer.use_vllm = trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer._metrics = {"train": defaultdict(list)}
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = lambda x: x
    ids, mask = batch["tokens"], batch["mask"].long()
    loss = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": batch["advantages"],
            "old_per_token_logps": batch["old_logprobs"],
            "ref_per_token_logps": batch["ref_logprobs"],
            "num_items_in_batch": mask.sum(),
        },
    )
    return [loss, torch.autograd.grad(loss, leaf)[0]]


def our_loss(
    function: Callable[..., Tensor], aggregate: Callable[[Tensor, Tensor], Tensor], batch: Batch, *, beta: float = 0.0
) -> list[Tensor]:
    """Return our loss and its gradient."""
    leaf = batch["logprobs"].clone().requires_grad_()
    each = function(leaf, batch["old_logprobs"], batch["advantages"], batch["mask"])
    each = each + beta * kl.k3(leaf, batch["ref_logprobs"], batch["mask"])
    loss = aggregate(each, batch["mask"])
    return [loss, torch.autograd.grad(loss, leaf)[0]]


def ppo(*operands: Tensor) -> Tensor:
    """Return ppo_clip with the range that TRL is given."""
    return losses.ppo_clip(*operands, **CLIP)


def fixed(loss: Tensor, mask: Tensor) -> Tensor:
    """Return fixed_length with TRL's max_completion_length."""
    return aggregation.fixed_length(loss, mask, length=20)


@pytest.mark.parametrize(
    ("loss_type", "function", "aggregate"),
    [
        ("grpo", ppo, aggregation.sequence_mean_token_mean),
        ("bnpo", ppo, aggregation.token_mean),
        ("dapo", ppo, aggregation.token_mean),
        ("dr_grpo", ppo, fixed),
        ("sapo", losses.sapo, aggregation.sequence_mean_token_mean),
    ],
)
def test_policy_losses(
    loss_type: str,
    function: Callable[..., Tensor],
    aggregate: Callable[[Tensor, Tensor], Tensor],
    batch: Batch,
    close: Close,
) -> None:
    for beta in (0.0, 0.1):
        ours, theirs = our_loss(function, aggregate, batch, beta=beta), trl_loss(loss_type, batch, beta=beta)
        for mine, other in zip(ours, theirs, strict=True):
            close(mine, other)


def test_gspo(batch: Batch, close: Close) -> None:
    batch = {**batch, "advantages": batch["advantages"][:, :1].expand_as(batch["mask"])}
    ours = our_loss(lambda *x: losses.gspo(*x, **CLIP), aggregation.sequence_mean_token_mean, batch)
    for mine, other in zip(ours, trl_loss("grpo", batch, level="sequence"), strict=True):
        close(mine, other)


def test_cispo_difference_trls_epsilon_is_the_bound_itself(batch: Batch, close: Close) -> None:
    ours = our_loss(lambda *x: losses.cispo(*x, clip_high=0.3), aggregation.token_mean, batch)
    for mine, other in zip(ours, trl_loss("cispo", batch, epsilon_high=1.3), strict=True):
        close(mine, other)


def test_an_empty_row_difference_trl_counts_it() -> None:
    one, mask = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[True], [False]])
    names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages")
    batch = {**dict.fromkeys(names, one), "mask": mask, "tokens": mask.long()}
    assert our_loss(ppo, aggregation.sequence_mean_token_mean, batch)[0].item() == -1
    assert trl_loss("grpo", batch)[0].item() == -0.5


def test_logprobs_and_entropy(batch: Batch, close: Close) -> None:
    mask = torch.ones_like(batch["mask"])
    logp, entropy = logprobs.from_logits_with_entropy(batch["logits"], batch["tokens"], mask)
    close(logp, selective_log_softmax(batch["logits"], batch["tokens"]))
    close(entropy, entropy_from_logits(batch["logits"]))


def test_distillation(batch: Batch, close: Close) -> None:
    logits, teacher, mask = batch["logits"], batch["teacher_logits"], batch["mask"]
    labels = torch.where(mask, batch["tokens"], -100)
    for function, beta in ((losses.distill_forward_kl, 0), (losses.distill_reverse_kl, 1)):
        grads = []
        for run in (
            lambda x, f=function: aggregation.token_mean(f(x, teacher, mask), mask),
            lambda x, b=beta: GKDTrainer.generalized_jsd_loss(x, teacher, labels=labels, beta=b),
        ):
            leaf = logits.clone().requires_grad_()
            loss = run(leaf)
            grads.append([loss, torch.autograd.grad(loss, leaf)[0]])
        for mine, other in zip(*grads, strict=True):
            close(mine, other)


def test_overlong(batch: Batch, close: Close) -> None:
    lengths = batch["mask"].sum(1)
    theirs = get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=5)
    want = theirs([[0] * n for n in lengths.tolist()])
    close(shaping.overlong(lengths, max_length=8, buffer_length=5), torch.tensor(want))


def test_group_advantages_by_trls_formula(batch: Batch, close: Close) -> None:
    # GRPOTrainer computes them inline: (r - mean) / (std + 1e-4) over a view of num_generations columns.
    scores, ids = batch["scores"], torch.arange(6) // 3
    grouped = scores.view(2, 3)
    want = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    close(advantages.grpo(scores, ids, eps=1e-4), want.flatten())
