"""The same numbers on a GPU as on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from m2flow.algos import advantages, aggregation, corrections, filters, kl, logprobs, losses, metrics, returns, values

Batch = dict[str, Tensor]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: no CUDA device"),
]


def everything(x: Batch, logits: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return one result of each kind of computation, of tensors on one device."""
    mask, rewards, tokens = x["mask"], x["rewards"][:, 0], x["mask"].long()
    group_ids = torch.arange(len(rewards), device=mask.device) // 3
    bootstrapped = torch.cat([x["values"], x["returns"][:, :1]], 1)
    policy = x["logprobs"], x["old_logprobs"], x["advantages"], mask
    gae, _ = returns.gae(x["rewards"], bootstrapped, mask, gamma=0.9, lam=0.8, terminated=x["terminated"])
    logp, entropy = logprobs.from_logits_with_entropy(logits, tokens, mask, temperature=0.7)
    return {
        "best": filters.best_of_n(rewards, group_ids),
        "entropy": entropy,
        "gae": gae,
        "grpo": advantages.grpo(rewards, group_ids),
        "gspo": losses.gspo(*policy),
        "hidden": logprobs.from_hidden(logits, weight, tokens, mask),
        "kl": kl.full(logits, logits.roll(1, 2), mask),
        "logp": logp,
        "mean": aggregation.token_mean(losses.ppo_clip(*policy), mask),
        "tis": corrections.tis(x["old_logprobs"], x["rollout_logprobs"], mask, level="sequence"),
        "values": values.clipped(x["values"], x["old_values"], x["returns"], mask),
        **metrics.rollout_correction(x["old_logprobs"], x["rollout_logprobs"], mask),
    }


def test_a_gpu_gives_the_cpus_numbers(batch: Callable[..., Batch]) -> None:
    x = batch(12, 70, seed=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    logits, weight = torch.randn(12, 70, 40, generator=generator), torch.randn(9, 40, generator=generator)
    results = {}
    for device in ("cpu", "cuda"):
        leaves = [logits.to(device).requires_grad_(), weight.to(device).requires_grad_()]
        results[device] = everything({k: v.to(device) for k, v in x.items()}, *leaves)
        total = sum(results[device][k].sum() for k in ("logp", "entropy", "kl", "hidden"))
        results[device]["logits' gradient"], results[device]["weight's gradient"] = torch.autograd.grad(total, leaves)
    assert all(v.is_cuda for v in results["cuda"].values())
    torch.testing.assert_close({k: v.cpu() for k, v in results["cuda"].items()}, results["cpu"], rtol=1e-4, atol=1e-4)


def test_sixteen_bits_on_a_gpu_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from m2flow.algos import _rows

    logits = torch.randn(2, 33, 1000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    tokens = torch.randint(1000, (2, 33), device="cuda")
    mask = torch.rand(2, 33, device="cuda") < 0.7
    got = logprobs.from_logits_with_entropy(logits, tokens, mask)
    monkeypatch.setitem(_rows._PIECE, "cuda", 5000)
    torch.testing.assert_close(logprobs.from_logits_with_entropy(logits, tokens, mask), got)
    logp = logits.float().log_softmax(-1)
    torch.testing.assert_close(got[0], logp.gather(-1, tokens[..., None])[..., 0] * mask, rtol=1e-4, atol=1e-4)
