"""Gymnasium environments as a vector environment: any id that `gymnasium.make` knows, with a box of actions.

An id such as "gymnasium_robotics:FetchReachDense-v4" names the module that registers it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from m2flow.worker.engines.env.engine import Flags, Floats, Step

__all__ = ["GymnasiumEnv", "GymnasiumEnvConfig"]

_GOAL = ("achieved_goal", "desired_goal")
# Software rendering, one thread; what the user has set stands.
_OFFSCREEN = {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa", "LP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class GymnasiumEnvConfig:
    """Attributes:
    id: what `gymnasium.make` makes.
    num_envs: environments.
    goal_scale: what the way to the goal is multiplied by, where observations tell a goal.
    pixels: side of a rendered picture; 0: nothing is rendered.
    options: further arguments of `gymnasium.make`.
    """

    id: str
    num_envs: int = 1
    goal_scale: float = 1.0
    pixels: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


class GymnasiumEnv:
    """A `VectorEnv`, in this process.

    A box of observations is flattened. A goal's dictionary becomes its observation followed by the way to the goal
    (desired less achieved, times `goal_scale`); another dictionary becomes its entries in the order of their names.
    Success is what an environment tells as `is_success` or `success`.
    """

    def __init__(self, config: GymnasiumEnvConfig) -> None:
        """Makes the environments: a tenth of a second each. Raises ValueError where their actions are no box."""
        for name, value in _OFFSCREEN.items():
            os.environ.setdefault(name, value)
        seen: dict[str, Any] = {"render_mode": "rgb_array", "width": config.pixels, "height": config.pixels}
        options = {**config.options, **(seen if config.pixels else {})}
        self._config = config
        self._envs = [gymnasium.make(config.id, disable_env_checker=True, **options) for _ in range(config.num_envs)]
        actions = self._envs[0].action_space
        if not isinstance(actions, gymnasium.spaces.Box):
            raise ValueError(f"{config.id}: got actions {actions}, want a Box: choose an environment that has one")
        self._shape = actions.shape
        self._low, self._high = actions.low.ravel(), actions.high.ravel()
        self._observations = np.zeros((config.num_envs, self._size()), dtype=np.float32)
        self._playing = np.zeros(config.num_envs, dtype=np.bool_)
        self._successes = np.zeros(config.num_envs, dtype=np.bool_)

    @property
    def num_envs(self) -> int:
        """N."""
        return len(self._envs)

    @property
    def observation_size(self) -> int:
        """Numbers of an observation."""
        return int(self._observations.shape[1])

    @property
    def action_size(self) -> int:
        """Numbers of an action."""
        return len(self._low)

    @property
    def playing(self) -> Flags:
        """Bool [N]: whose episode has begun and not ended."""
        return self._playing.copy()

    def reset(self, seeds: Sequence[int]) -> Floats:
        """Begins an episode in each environment, by its seed; see `VectorEnv`."""
        if len(seeds) != self.num_envs:
            raise ValueError(f"reset: got {len(seeds)} seeds, want {self.num_envs}, one an environment")
        for place, (env, seed) in enumerate(zip(self._envs, seeds, strict=True)):
            observation, _ = env.reset(seed=int(seed) % (1 << 31))
            self._observations[place] = self._flat(observation)
        self._playing[:] = True
        self._successes[:] = False
        return self._observations.copy()

    def step(self, actions: Floats) -> Step:
        """Takes an action in each environment that is playing; see `VectorEnv`."""
        if actions.shape != (self.num_envs, self.action_size):
            raise ValueError(f"step: got actions {list(actions.shape)}, want [{self.num_envs}, {self.action_size}]")
        if not self._playing.any():
            raise ValueError("step: every episode has ended, want reset first")
        rewards = np.zeros(self.num_envs, dtype=np.float32)
        terminated, truncated = np.zeros_like(self._playing), np.zeros_like(self._playing)
        held = np.clip(actions, self._low, self._high)
        for place in np.flatnonzero(self._playing):
            observation, reward, ended, cut, info = self._envs[place].step(held[place].reshape(self._shape))
            self._observations[place] = self._flat(observation)
            rewards[place] = reward
            terminated[place], truncated[place] = ended, cut and not ended
            self._successes[place] = bool(info.get("is_success", info.get("success", False)))
        self._playing &= ~(terminated | truncated)
        return Step(self._observations.copy(), rewards, terminated, truncated, self._successes.copy())

    def render(self) -> NDArray[np.uint8]:
        """A picture of environment 0; see `VectorEnv`."""
        if not self._config.pixels:
            raise RuntimeError("render: the environment was made without pixels, want GymnasiumEnvConfig(pixels=...)")
        return np.asarray(self._envs[0].render(), dtype=np.uint8)

    def close(self) -> None:
        """Frees the simulators."""
        for env in self._envs:
            env.close()

    def _size(self) -> int:
        space: Any = self._envs[0].observation_space
        return len(self._flat(space.sample()))

    def _flat(self, observation: Any) -> Floats:
        if not isinstance(observation, Mapping):
            return np.asarray(observation, dtype=np.float32).ravel()
        if all(name in observation for name in _GOAL):
            way = self._config.goal_scale * (observation["desired_goal"] - observation["achieved_goal"])
            return np.concatenate([np.ravel(observation["observation"]), np.ravel(way)]).astype(np.float32)
        return np.concatenate([np.ravel(observation[name]) for name in sorted(observation)]).astype(np.float32)
