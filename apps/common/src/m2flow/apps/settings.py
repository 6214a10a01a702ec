"""What the words on the command line name: a recipe with overrides, a run to go on with, a checkpoint."""

import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from m2flow.apps.app import App
from m2flow.apps.checkpoint import ResumeState, latest_checkpoint, read_resume_state
from m2flow.apps.config import TrainingConfig, load_config
from m2flow.apps.errors import CheckFailed, ConfigError, ResumeError
from m2flow.apps.parsing import build
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.yaml_tree import load_yaml

__all__ = ["find_checkpoint", "newest_checkpoint", "refuse_idle_resume", "resolve_config", "run_of"]

C = TypeVar("C", bound=TrainingConfig)


def resolve_config(app: App[C], settings: Sequence[str], *, base: RunDirectory | None = None) -> C:
    """Returns the config of `[RECIPE] [a.b=c ...]`, or of the run `base` with overrides. Raises ConfigError."""
    named = list(settings[:1]) if settings and "=" not in settings[0] else []
    overrides = settings[len(named) :]
    if base is not None:
        if named:
            raise ConfigError([f"--resume: got a recipe too ({named[0]}), want overrides only: a run keeps its own"])
        return load_config(app.config_class, base.config, overrides)
    recipe = named[0] if named else app.default_recipe
    path = app.recipes.get(recipe, Path(recipe))
    if recipe not in app.recipes and not path.is_file():
        shipped = ", ".join(app.recipes)
        raise ConfigError([f"recipe: got {recipe!r}, want one of {shipped}, or an existing YAML file: correct it"])
    return load_config(app.config_class, path, overrides)


def newest_checkpoint(run: RunDirectory) -> tuple[Path, ResumeState]:
    """Returns the checkpoint that the run goes on from. Raises ResumeError when it has none."""
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is None:
        raise ResumeError(f"{run.path}: holds no checkpoint, want one: start again without --resume")
    return checkpoint, read_resume_state(checkpoint)


def refuse_idle_resume(config: TrainingConfig, run: RunDirectory, state: ResumeState) -> None:
    """Raises ResumeError where going on would do nothing, or would not be going on."""
    own = build(type(config), load_yaml(run.config))
    kept = {"seed": state.seed, **{name: attrgetter(name)(own) for name in config.first_step_words}}
    changed = [
        f"{name}: got {json.dumps(got)}, want {json.dumps(want)}, the run's own: a resumed run keeps its {name}"
        for name, want in kept.items()
        if (got := attrgetter(name)(config)) != want
    ]
    if changed:
        raise ResumeError("\n".join(changed))
    if state.step >= config.num_steps:
        raise ResumeError(f"nothing to do: {state.step} of {config.num_steps} steps are done: raise num_steps to go on")


def find_checkpoint(path: Path) -> Path:
    """Returns `path` where it is a checkpoint, or the newest one of the run there. Raises CheckFailed otherwise."""
    if (path / "config.json").is_file():
        return path
    checkpoint = latest_checkpoint(path / "checkpoints")
    if checkpoint is None:
        raise CheckFailed([f"--checkpoint: {path} is no checkpoint and holds none: name a step_N directory or a run"])
    return checkpoint


def run_of(checkpoint: Path) -> RunDirectory | None:
    """Returns the run that wrote `checkpoint`; None where it lies in no run."""
    checkpoints = checkpoint.absolute().parent
    run = checkpoints.parent
    return RunDirectory.open(run) if checkpoints.name == "checkpoints" and (run / "config.yaml").is_file() else None
