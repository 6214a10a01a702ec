"""The policy that a run starts from: made once for each task, with film or without, shape and seed, and kept."""

import importlib.metadata
from pathlib import Path

from m2flow.apps.atomic import new_directory
from m2flow.apps.paths import expanded
from m2flow.apps.seeding import derived_seed
from m2flow.embodied.config import EmbodiedConfig
from m2flow.worker.engines.env.gymnasium import GymnasiumEnv, GymnasiumEnvConfig

__all__ = ["is_prepared", "prepared"]

_CACHE = "~/.cache/m2flow"


def is_prepared(config: EmbodiedConfig, cache_dir: str = _CACHE) -> bool:
    """Whether the task has been made before, with a film where the config wants one."""
    return _target(config, cache_dir).is_dir()


def prepared(config: EmbodiedConfig, cache_dir: str = _CACHE) -> Path:
    """Returns the directory of the untrained policy, under `cache_dir`. Blocks: it makes the task, the first time."""
    target = _target(config, cache_dir)
    if not target.is_dir():
        with new_directory(target) as directory:
            _make(config, directory)
    return target


def _target(config: EmbodiedConfig, cache_dir: str) -> Path:
    task = (config.env.id, _version(config.env.id), *["film"] * config.evaluation.film)
    shape = (repr(config.policy.hidden), repr(config.policy.log_std))
    return expanded(cache_dir) / f"policy-{derived_seed(config.seed, *task, *shape):016x}"


def _make(config: EmbodiedConfig, directory: Path) -> None:
    # Here, because every further run finds the policy made.
    from m2flow.embodied.policy import GaussianPolicy, PolicyShape, save_policy  # noqa: PLC0415

    env = GymnasiumEnv(GymnasiumEnvConfig(config.env.id))
    env.close()
    shape = PolicyShape(env.observation_size, env.action_size, config.policy.hidden, config.policy.log_std)
    save_policy(GaussianPolicy(shape, seed=derived_seed(config.seed, "policy") >> 1), directory)


def _version(env_id: str) -> str:
    """The version of the package that a task's sizes come from."""
    module = env_id.partition(":")[0].partition(".")[0]
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return ""
