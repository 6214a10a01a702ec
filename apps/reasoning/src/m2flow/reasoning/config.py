"""The settings of a reasoning run: what every app has, the task, how completions are sampled, and the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from m2flow.apps.language import LanguageModelConfig
from m2flow.apps.parsing import setting

__all__ = ["ReasoningConfig", "RewardFunctionConfig"]


@dataclass(frozen=True)
class RewardFunctionConfig:
    """A judge of the user's in place of the task's, in processes of its own."""

    function: str = setting("", "module:qualname of a function of a sample's fields; empty: the task judges")
    num_processes: int = setting(1, "processes that it runs in", low=1)
    timeout_s: float = setting(10.0, "seconds for a sample; then its process is ended and replaced", above=0)
    on_failure: Literal["score", "skip", "stop"] = setting(
        "score", "a sample that it fails on scores 0, is skipped, or stops the run"
    )


@dataclass(frozen=True)
class ReasoningConfig(LanguageModelConfig):
    """One run of m2flow-reasoning."""

    task: str = setting(
        "two_digit_sums",
        "one_digit_sums, two_digit_sums, two_digit_pairs, gym/NAME of reasoning-gym, or file/PATH of JSON lines",
    )
    task_options: Mapping[str, bool | int | float | str] = setting({}, "settings of reasoning-gym's generator")
    reward: RewardFunctionConfig = RewardFunctionConfig()
