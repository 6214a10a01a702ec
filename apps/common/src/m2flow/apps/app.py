"""What an app hands to the command line and to the driver: its settings, its recipe, its data. Nothing in it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from m2flow.apps.config import TrainingConfig
from m2flow.flow.tracing import Program
from m2flow.worker import GroupSpec, Item, WorkerGroup

__all__ = ["App", "Job", "StepOutcome"]

C = TypeVar("C", bound=TrainingConfig)


@dataclass(frozen=True)
class StepOutcome:
    """What one iteration came to: numbers by verl's names, and some rollouts to look at.

    `metrics` has at least critic/score/mean, the mean score of the rollouts. `volume` counts what the iteration made,
    in the job's unit: throughput is told in it. `warning` is for people; "" where all is well.
    """

    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, object]]
    volume: float
    warning: str = ""


@dataclass(frozen=True)
class Job:
    """One training run, ready to be planned.

    `program` is the macro flow, `groups` the specifications that it is called with, `expansions` the items that a
    stage gives for one that it takes. `items(step)` are the source items of a step, counted from 1: the same for the
    same step, whenever asked. `measure` turns what reached the sink into numbers. `evaluate(groups, step)` asks
    running groups how good they are on what they are not trained on, by name: "eval/greedy_accuracy"; it needs those
    in `evaluated_groups`. `film(groups)` is an animated WebP picture of them at work, for an app that has something
    to see. `trainer` is the group that holds the state: it has save_checkpoint(directory). `unit` is what throughput
    counts.
    """

    program: Program
    groups: Mapping[str, GroupSpec]
    expansions: Mapping[str, float]
    items: Callable[[int], Sequence[Item]]
    measure: Callable[[Sequence[Item]], StepOutcome]
    evaluate: Callable[[Mapping[str, WorkerGroup], int], Mapping[str, float]]
    evaluated_groups: tuple[str, ...] = ("rollout",)
    trainer: str = "actor"
    unit: str = "tokens"
    film: Callable[[Mapping[str, WorkerGroup]], bytes] | None = None


@dataclass(frozen=True)
class App(Generic[C]):
    """One application.

    `purpose` is a sentence for `--help`. `recipes` are the shipped YAML files by name, `default_profile` the profile
    that `plan` reads unless told. `problems(config)` finds what is wrong with the app's own settings,
    `model_problems` with the model that training starts from, `room_problems` with the room that training takes; they
    start no run. `prepare(config)` returns the model's directory, made if need be. `build(config, weights, resume)`
    returns the job over the model in `weights`; where `resume` is a checkpoint, its trainer goes on from it.
    """

    name: str
    purpose: str
    config_class: type[C]
    recipes: Mapping[str, Path]
    default_recipe: str
    default_profile: Path
    problems: Callable[[C], list[str]]
    prepare: Callable[[C], Path]
    build: Callable[[C, Path, Path | None], Job]
    model_problems: Callable[[C], list[str]] = lambda config: []
    room_problems: Callable[[C], list[str]] = lambda config: []
