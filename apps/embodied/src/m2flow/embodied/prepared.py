"""The policy that a run starts from: made once for each task, shape and seed, and kept."""

import importlib.metadata
from pathlib import Path

from m2flow.apps.atomic import new_directory
from m2flow.apps.paths import expanded
from m2flow.apps.seeding import derived_seed
from m2flow.embodied.config import EmbodiedConfig
from m2flow.worker.engines.env.gymnasium import GymnasiumEnv, GymnasiumEnvConfig

__all__ = ["prepared"]


def prepared(config: EmbodiedConfig, cache_dir: str = "~/.cache/m2flow") -> Path:
    """Returns the directory of the untrained policy, under `cache_dir`. Blocks: it makes the task, the first time."""
    shape = (repr(config.policy.hidden), repr(config.policy.log_std))
    key = derived_seed(config.seed, config.env.id, _version(config.env.id), *shape)
    target = expanded(cache_dir) / f"policy-{key:016x}"
    if not target.is_dir():
        with new_directory(target) as directory:
            _make(config, directory)
    return target


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
