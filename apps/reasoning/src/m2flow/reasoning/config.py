"""The settings of a reasoning run: what every app has, the task, and how completions are sampled."""

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.apps.config import TrainingConfig
from m2flow.apps.parsing import setting

__all__ = ["ReasoningConfig", "SamplingConfig"]


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn from the policy in training."""

    max_new_tokens: int = setting(4, "tokens of a completion at most", low=1)
    temperature: float = setting(1.0, "softmax temperature; 1 is the policy itself", above=0)


@dataclass(frozen=True)
class ReasoningConfig(TrainingConfig):
    """One run of m2flow-reasoning."""

    task: str = setting("two_digit_sums", "what is learned: a generated task by name")
    task_options: Mapping[str, bool | int | float | str] = setting({}, "settings of the task's generator")
    sampling: SamplingConfig = SamplingConfig()
