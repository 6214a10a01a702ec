"""What the loss costs of a training step of SmolLM2-135M: every function from logits to the scalar, and back.

The model has SmolLM2-135M's sizes and random weights: time does not depend on them. As a trainer does, it makes logits
where the response's tokens are and nowhere else. Needs transformers.
"""

import torch
from _rows import command_line, report, row, seconds
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from m2flow.algos import advantages, aggregation, kl, logprobs, losses, masks

SAMPLES, PROMPT, RESPONSE = 8, 64, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def smollm2() -> LlamaForCausalLM:
    """Return a model of SmolLM2-135M's sizes."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
    ).to(DEVICE)


def loss(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return GRPO's loss with a KL term and entropy on show: all that a step computes from its logits."""
    logp, entropy = logprobs.from_logits_with_entropy(logits, tokens, mask)
    rewards = torch.arange(SAMPLES, device=DEVICE).remainder(2).float()
    per_row = advantages.grpo(rewards, torch.arange(SAMPLES, device=DEVICE) // 4)
    old = logp.detach()
    per_token = losses.ppo_clip(logp, old, masks.spread(per_row, mask), mask) + 0.01 * kl.k2(logp, old, mask)
    return aggregation.token_mean(per_token - 0.0 * entropy.detach(), mask)


def main(json_path: str | None) -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    model = smollm2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(49_152, (SAMPLES, PROMPT + RESPONSE), device=DEVICE)
    tokens = ids[:, PROMPT:]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    before_each = torch.arange(PROMPT - 1, PROMPT + RESPONSE - 1, device=DEVICE)

    def forward() -> Tensor:
        return model(input_ids=ids, use_cache=False, logits_to_keep=before_each).logits

    def step() -> None:
        optimizer.zero_grad()
        loss(forward(), tokens, mask).backward()
        optimizer.step()

    logits = forward().detach().requires_grad_()
    part = seconds(lambda: torch.autograd.grad(loss(logits, tokens, mask), logits), repeats=3)
    whole = seconds(step, repeats=1)
    name = f"loss from logits to scalar and back, {SAMPLES} x ({PROMPT} + {RESPONSE}) tokens, vocabulary 49k"
    peer = "whole training step of SmolLM2-135M"
    report([row(name, part, "s", peer=peer, peer_value=whole, at_least=50)], json_path)


if __name__ == "__main__":
    command_line(main)
