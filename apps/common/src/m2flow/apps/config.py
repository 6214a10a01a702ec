"""The settings that every app shares, and the one place where a run's configuration is made.

An app's config class inherits `TrainingConfig` (one that trains a language model: `LanguageModelConfig`) and adds its
own sections, its batch words and what follows from them, which is printed, never set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from m2flow.apps.errors import ConfigError
from m2flow.apps.parsing import build, setting
from m2flow.apps.yaml_tree import load_yaml, merge_overrides

__all__ = [
    "CheckpointConfig",
    "EvaluationConfig",
    "OptimiserConfig",
    "RunConfig",
    "TrainingConfig",
    "load_config",
]


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW."""

    lr: float = setting(1.0e-5, "learning rate", above=0, below=math.inf)
    betas: tuple[float, float] = setting((0.9, 0.95), "AdamW's decay rates", low=0, below=1)
    weight_decay: float = setting(0.0, "decoupled weight decay", low=0, below=math.inf)
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm", above=0)


@dataclass(frozen=True)
class EvaluationConfig:
    """How often the policy is measured on what it is never trained on."""

    every: int = setting(10, "steps between evaluations; one also before the first step and after the last", low=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is kept."""

    every: int = setting(10, "steps between checkpoints; the last step always has one", low=1)
    keep: int = setting(1, "newest checkpoints kept", low=1)


@dataclass(frozen=True)
class RunConfig:
    """Where the run leaves its files."""

    root: str = setting("runs", "directory under which a run directory is made, named by app and time")
    dir: str = setting("", "the run directory itself; empty: a new one under run.root")
    samples: int = setting(16, "rollouts written per step", low=0)
    profiles: str = setting("~/.cache/m2flow/profiles", "what runs measured, for later ones; empty: not kept, not used")
    timeline_iterations: int = setting(50, "newest iterations that the timeline keeps", low=1)


@dataclass(frozen=True)
class TrainingConfig:
    """What any training run needs to know. Its methods are what an app says of its own batch words."""

    batch_words: ClassVar[tuple[str, ...]] = ()
    # Settings that only the first step reads, by their full names: a checkpoint holds what they made.
    first_step_words: ClassVar[tuple[str, ...]] = ()
    # What groups run on beside cores and accelerators, by kind: groups of such a kind take no turns with the others.
    resources: ClassVar[Mapping[str, int]] = {}

    seed: int = setting(0, "the one seed: data, sampling, evaluation", low=0)
    num_steps: int = setting(30, "iterations of the macro flow", low=1)
    plan: str = setting("auto", "auto, temporal, spatial, hybrid, or a plan file (json or yaml)")
    staleness: int = setting(0, "steps that sampling may run ahead of its weights, under a plan by its name", low=0)
    profile_iterations: int = setting(1, "plan=auto: iterations measured under each probed plan, warm-up apart", low=1)
    cpu_slots: int | Literal["all"] = setting("all", "cores to use, one device each", low=1)
    launcher: Literal["process", "inproc", "ray"] = setting(
        "process", "inproc: workers are threads, for a debugger; ray: on all nodes of the Ray cluster at RAY_ADDRESS"
    )
    optimiser: OptimiserConfig = OptimiserConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    @property
    def source_items(self) -> int:
        """Items that enter the flow in one iteration."""
        return 1

    @property
    def subject(self) -> str:
        """What is trained, or on what: what planning names where a run has the weights."""
        return ""

    def batch_problems(self) -> list[str]:
        """What is wrong with the batch words taken together, with what would be right; empty when all is well."""
        return []

    def derived_numbers(self) -> Mapping[str, int]:
        """Every number that follows from the batch words, in the order in which they are printed."""
        return {}


C = TypeVar("C", bound=TrainingConfig)


def load_config(cls: type[C], path: Path, overrides: Sequence[str] = ()) -> C:
    """Returns the config of one YAML file plus `a.b=c` overrides. Starts nothing and changes no value.

    Raises ConfigError with every problem found: unknown keys, wrong types, numbers out of bounds, and batch words
    that do not divide.
    """
    config = build(cls, merge_overrides(load_yaml(path), overrides))
    if problems := config.batch_problems():
        raise ConfigError(problems)
    return config
