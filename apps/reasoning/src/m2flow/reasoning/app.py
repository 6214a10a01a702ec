"""What m2flow-reasoning is made of: its settings, its recipe, its workers and its data, put together."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from m2flow.apps.actor import actor_group
from m2flow.apps.app import App, Job
from m2flow.apps.evaluation import EVALUATED, Evaluation
from m2flow.apps.functions import function_problems
from m2flow.apps.model import prepare_model
from m2flow.apps.model_check import model_problems, room_problems
from m2flow.apps.outcome import measure
from m2flow.apps.reward import RewardWorker
from m2flow.apps.rollout import rollout_group
from m2flow.apps.tasks import make_task, task_problems
from m2flow.apps.tasks_problem import problem_items
from m2flow.reasoning.config import ReasoningConfig
from m2flow.reasoning.recipe import grpo
from m2flow.worker import GroupSpec

__all__ = ["APP"]

_HERE = Path(__file__).parent


def _build(config: ReasoningConfig, weights: Path, resume: Path | None) -> Job:
    task = make_task(config.task, config.task_options, config.seed)
    return Job(
        program=partial(grpo, groups_per_minibatch=config.groups_per_minibatch, num_epochs=config.num_epochs),
        groups={
            "rollout": rollout_group(config, weights),
            "reward": _reward(config),
            "actor": actor_group(config, weights, resume),
        },
        expansions={"rollout.generate": float(config.samples_per_prompt)},
        items=lambda step: problem_items(task.training(step, config.prompts_per_step), step),
        measure=measure,
        evaluate=Evaluation(
            task,
            num_problems=config.evaluation.num_problems,
            samples_per_problem=config.evaluation.samples_per_problem,
            temperature=config.sampling.temperature,
            seed=config.seed,
        ),
        evaluated_groups=EVALUATED,
    )


def _reward(config: ReasoningConfig) -> GroupSpec:
    settings = {
        "task": config.task,
        "task_options": dict(config.task_options),
        "seed": config.seed,
        "function": config.reward.function,
        "num_processes": config.reward.num_processes,
        "timeout_s": config.reward.timeout_s,
        "on_failure": config.reward.on_failure,
    }
    spec = RewardWorker.group(settings, name="reward")
    # A restart would ask the function again, and again.
    return replace(spec, on_death="stop") if config.reward.on_failure == "stop" else spec


def _problems(config: ReasoningConfig) -> list[str]:
    found = task_problems(config.task, config.task_options)
    return found + (function_problems("reward.function", config.reward.function) if config.reward.function else [])


APP: App[ReasoningConfig] = App(
    name="reasoning",
    purpose="Teaches language models to reason, on tasks whose answers can be checked.",
    config_class=ReasoningConfig,
    recipes={path.stem: path for path in sorted((_HERE / "recipes").glob("*.yaml"))},
    default_recipe="two_digit",
    default_profile=_HERE / "profile.yaml",
    problems=_problems,
    prepare=lambda config: prepare_model(config.model.source, config.model.cache_dir),
    build=_build,
    model_problems=model_problems,
    room_problems=room_problems,
)
