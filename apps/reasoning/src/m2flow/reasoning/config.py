"""The settings of a reasoning run: what every app has, the task, how completions are sampled, and the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from m2flow.apps.language import LanguageModelConfig
from m2flow.apps.parsing import setting

__all__ = ["LossConfig", "ReasoningConfig", "SamplingConfig"]


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn from the policy in training."""

    max_new_tokens: int = setting(4, "tokens of a completion at most, its stop token included", low=1)
    temperature: float = setting(1.0, "softmax temperature; 1 is the policy itself", above=0)
    stop: tuple[str, ...] = setting(("\n",), "texts that end a completion, each one token of the model")


@dataclass(frozen=True)
class LossConfig:
    """The clipped policy loss."""

    clip_low: float = setting(0.2, "the importance ratio is clipped at 1 minus this", low=0)
    clip_high: float = setting(0.2, "the importance ratio is clipped at 1 plus this", low=0)
    aggregation: Literal["token_mean", "sequence_mean"] = setting("token_mean", "what the loss is averaged over")


@dataclass(frozen=True)
class ReasoningConfig(LanguageModelConfig):
    """One run of m2flow-reasoning."""

    task: str = setting(
        "two_digit_sums", "one_digit_sums, two_digit_sums, two_digit_pairs, or gym/NAME of reasoning-gym"
    )
    task_options: Mapping[str, bool | int | float | str] = setting({}, "settings of reasoning-gym's generator")
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
