"""The batch words: one meaning each, checked against each other, and every number that follows from them.

| word | meaning |
|---|---|
| prompts_per_step | prompts drawn for one iteration |
| samples_per_prompt | rollouts per prompt (the group) |
| minibatch_size | samples per optimiser step, over all ranks |
| num_epochs | passes over one iteration's samples |
| microbatch_tokens | padded tokens per forward/backward on one rank: memory only, never changes results |
| granularity | items per message between stages: time only, chosen by the plan |
"""

from typing import Protocol

__all__ = ["BatchWords", "batch_problems", "derived_numbers", "groups_per_minibatch"]


class BatchWords(Protocol):
    """What is read of a config."""

    @property
    def num_steps(self) -> int: ...
    @property
    def prompts_per_step(self) -> int: ...
    @property
    def samples_per_prompt(self) -> int: ...
    @property
    def minibatch_size(self) -> int: ...
    @property
    def num_epochs(self) -> int: ...
    @property
    def microbatch_tokens(self) -> int: ...


def batch_problems(words: BatchWords) -> list[str]:
    """Returns what does not divide, with values that would; empty when all is well."""
    samples = words.prompts_per_step * words.samples_per_prompt
    size, group = words.minibatch_size, words.samples_per_prompt
    if size % group == 0 and samples % size == 0:
        return []
    fitting = [n * group for n in range(1, min(words.prompts_per_step, 1024) + 1) if words.prompts_per_step % n == 0]
    choices = ", ".join(str(n) for n in dict.fromkeys([*fitting, samples]))
    wanted = f"want a multiple of samples_per_prompt ({group}) that divides the {samples} samples of a step"
    return [f"minibatch_size: got {size}, {wanted}: set it to one of {choices}"]


def groups_per_minibatch(words: BatchWords) -> int:
    """Returns the groups that one optimiser step is taken on."""
    return words.minibatch_size // words.samples_per_prompt


def derived_numbers(words: BatchWords) -> dict[str, int]:
    """Returns every number that follows from the batch words, in the order in which they are printed."""
    samples = words.prompts_per_step * words.samples_per_prompt
    minibatches = samples // words.minibatch_size
    return {
        "samples_per_step": samples,
        "groups_per_minibatch": groups_per_minibatch(words),
        "minibatches_per_epoch": minibatches,
        "optimiser_steps_per_step": minibatches * words.num_epochs,
        "total_optimiser_steps": minibatches * words.num_epochs * words.num_steps,
        "total_prompts": words.prompts_per_step * words.num_steps,
        "total_samples": samples * words.num_steps,
    }
