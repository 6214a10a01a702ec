"""The settings of a reasoning run: what every app has, the task, how completions are sampled, and the loss."""

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.apps.language import LanguageModelConfig
from m2flow.apps.parsing import setting

__all__ = ["ReasoningConfig"]


@dataclass(frozen=True)
class ReasoningConfig(LanguageModelConfig):
    """One run of m2flow-reasoning."""

    task: str = setting(
        "two_digit_sums", "one_digit_sums, two_digit_sums, two_digit_pairs, or gym/NAME of reasoning-gym"
    )
    task_options: Mapping[str, bool | int | float | str] = setting({}, "settings of reasoning-gym's generator")
