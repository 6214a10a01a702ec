"""The settings of an agentic run: what every language-model run has, and the tools."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from m2flow.apps.language import LanguageModelConfig
from m2flow.apps.parsing import setting

__all__ = ["AgenticConfig", "SupervisedConfig", "ToolsConfig"]


@dataclass(frozen=True)
class ToolsConfig:
    """What the model can call, and for how long."""

    targets: Mapping[str, bool | int | float | str] = setting(
        {"calc": "m2flow.agentic.calculator:calculate"}, "a function of text to text for each tool, as module:qualname"
    )
    num_processes: int = setting(2, "processes of each tool", low=1)
    timeout_s: float = setting(2.0, "seconds that a call has; then its process is ended and replaced", above=0)
    max_result_characters: int = setting(64, "a longer result is an error", low=1)


@dataclass(frozen=True)
class SupervisedConfig:
    """A supervised stage: the first steps are taken on worked conversations, until sampled ones succeed."""

    until: float = setting(
        0.0, "share of a step's conversations whose success ends it; 0: there is none", low=0, high=1
    )
    max_steps: int = setting(20, "optimiser steps in which that has to be reached; else the run fails", low=1)


@dataclass(frozen=True)
class AgenticConfig(LanguageModelConfig):
    """One run of m2flow-agentic."""

    # Neither waits for a core's turn: the agent handles text, a tool's processes are not the trainer's.
    resources: ClassVar[Mapping[str, int]] = {"agent": 1, "tool": 1}

    max_turns: int = setting(3, "turns that the model has in a conversation", low=1)
    tools: ToolsConfig = ToolsConfig()
    supervised: SupervisedConfig = SupervisedConfig()
