"""What m2flow-agentic is made of: its settings, its recipe, its workers and its data, put together."""

from functools import partial
from pathlib import Path

from m2flow.agentic.agent import AgentWorker
from m2flow.agentic.config import AgenticConfig
from m2flow.agentic.evaluation import EVALUATED, ToolEvaluation
from m2flow.agentic.expressions import ExpressionTask
from m2flow.agentic.recipe import grpo
from m2flow.agentic.tools import ToolWorker
from m2flow.apps.actor import actor_group
from m2flow.apps.app import App, Job
from m2flow.apps.functions import function_problems
from m2flow.apps.model import prepare_model
from m2flow.apps.model_check import model_problems, room_problems
from m2flow.apps.outcome import measure
from m2flow.apps.rollout import rollout_group
from m2flow.apps.tasks_problem import problem_items
from m2flow.worker import GroupSpec

__all__ = ["APP"]

_HERE = Path(__file__).parent


def _build(config: AgenticConfig, weights: Path, resume: Path | None) -> Job:
    task = ExpressionTask(config.seed)
    return Job(
        program=partial(
            grpo,
            groups_per_minibatch=config.groups_per_minibatch,
            num_epochs=config.num_epochs,
            rounds=config.max_turns - 1.0,
        ),
        groups={
            "agent": _agent(config, weights),
            "rollout": rollout_group(config, weights),
            "tools": _tools(config),
            "actor": actor_group(
                config,
                weights,
                resume,
                imitate_until=config.supervised.until,
                imitate_max_steps=config.supervised.max_steps,
            ),
        },
        expansions={"agent.open": float(config.samples_per_prompt)},
        items=lambda step: problem_items(task.training(step, config.prompts_per_step), step),
        measure=measure,
        evaluate=ToolEvaluation(
            task.held_out(config.evaluation.num_problems),
            samples_per_problem=config.evaluation.samples_per_problem,
            temperature=config.sampling.temperature,
            seed=config.seed,
        ),
        evaluated_groups=EVALUATED,
    )


def _agent(config: AgenticConfig, weights: Path) -> GroupSpec:
    settings = {
        "model": str(weights),
        "samples_per_prompt": config.samples_per_prompt,
        "max_turns": config.max_turns,
        "seed": config.seed,
        "with_examples": config.supervised.until > 0,
    }
    return AgentWorker.group(settings, name="agent", device_kind="agent")


def _tools(config: AgenticConfig) -> GroupSpec:
    tools = config.tools
    settings = {
        "targets": dict(tools.targets),
        "num_processes": tools.num_processes,
        "timeout_s": tools.timeout_s,
        "max_result_characters": tools.max_result_characters,
    }
    return ToolWorker.group(settings, name="tools", device_kind="tool")


def _problems(config: AgenticConfig) -> list[str]:
    found = []
    if config.sampling.stop != ("\n",):
        found.append(f"sampling.stop: got {list(config.sampling.stop)}, want the newline alone: a turn is a line")
    for name, target in config.tools.targets.items():
        found += function_problems(f"tools.targets.{name}", str(target))
    return found


APP: App[AgenticConfig] = App(
    name="agentic",
    purpose="Teaches a language model to call tools, on whole conversations.",
    config_class=AgenticConfig,
    recipes={path.stem: path for path in sorted((_HERE / "recipes").glob("*.yaml"))},
    default_recipe="calculator",
    default_profile=_HERE / "profile.yaml",
    problems=_problems,
    prepare=lambda config: prepare_model(config.model.source, config.model.cache_dir),
    build=_build,
    model_problems=model_problems,
    room_problems=room_problems,
)
