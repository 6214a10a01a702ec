"""What m2flow-embodied is made of: its settings, its recipe, its workers and its episodes, put together."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from m2flow.apps.app import App, Job
from m2flow.embodied.config import EmbodiedConfig
from m2flow.embodied.env_worker import EnvWorker
from m2flow.embodied.episodes import lane_item
from m2flow.embodied.evaluation import Evaluation
from m2flow.embodied.learner import LearnerWorker
from m2flow.embodied.outcome import measure
from m2flow.embodied.policy_worker import PolicyWorker
from m2flow.embodied.prepared import prepared
from m2flow.embodied.problems import env_problems
from m2flow.embodied.recipe import ppo
from m2flow.embodied.seeds import episode_seed
from m2flow.worker import GroupSpec, Item

__all__ = ["APP"]

_HERE = Path(__file__).parent


def _build(config: EmbodiedConfig, weights: Path, resume: Path | None) -> Job:
    size = config.episodes_per_step // config.num_lanes

    def items(step: int) -> Sequence[Item]:
        return [
            lane_item(step, lane, config.num_lanes, [episode_seed(config.seed, step, lane, n) for n in range(size)])
            for lane in range(config.num_lanes)
        ]

    evaluation = Evaluation(config.evaluation.num_episodes, size)
    return Job(
        program=partial(ppo, rounds=float(config.env.episode_steps)),
        groups={
            "env": _env(config, size),
            "policy": PolicyWorker.group({"model": str(weights), "seed": config.seed}, name="policy"),
            "learner": _learner(config, weights, resume),
        },
        expansions={"gather:rollout": 1.0 / config.num_lanes},
        items=items,
        measure=partial(measure, num_episodes=config.episodes_per_step),
        evaluate=evaluation,
        evaluated_groups=("env", "policy"),
        trainer="learner",
        unit="env_steps",
        film=evaluation.film if config.evaluation.film else None,
    )


def _env(config: EmbodiedConfig, size: int) -> GroupSpec:
    settings = {
        "id": config.env.id,
        "goal_scale": config.env.goal_scale,
        "episodes_per_lane": size,
        "pixels": config.evaluation.pixels,
    }
    return EnvWorker.group(settings, name="env", max_devices=config.num_lanes)


def _learner(config: EmbodiedConfig, weights: Path, resume: Path | None) -> GroupSpec:
    settings = {
        "model": str(weights),
        "seed": config.seed,
        "minibatch_size": config.minibatch_size,
        "num_epochs": config.num_epochs,
        "gamma": config.ppo.gamma,
        "lam": config.ppo.lam,
        "clip": config.ppo.clip,
        "value_coef": config.ppo.value_coef,
        "entropy_coef": config.ppo.entropy_coef,
        "lr": config.optimiser.lr,
        "betas": list(config.optimiser.betas),
        "weight_decay": config.optimiser.weight_decay,
        "max_grad_norm": config.optimiser.max_grad_norm,
        "resume": str(resume or ""),
    }
    return LearnerWorker.group(settings, name="learner", devices_per_rank=None)


APP: App[EmbodiedConfig] = App(
    name="embodied",
    purpose="Teaches policies to act, in simulators.",
    config_class=EmbodiedConfig,
    recipes={path.stem: path for path in sorted((_HERE / "recipes").glob("*.yaml"))},
    default_recipe="reach",
    default_profile=_HERE / "profile.yaml",
    problems=env_problems,
    prepare=prepared,
    build=_build,
)
