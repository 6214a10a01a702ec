"""What anyone who adapts a simulator can test it with: a small Gymnasium environment, and a suite of checks."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from m2flow.worker.engines.env.engine import Floats, VectorEnv
from m2flow.worker.testing.conformance import refused

__all__ = ["POINT", "PointReach", "VectorEnvConformance"]

POINT = "m2flow.worker.engines.env.testing:PointReach-v0"
_STEPS = 20
_NEAR = 0.1


class PointReach(gymnasium.Env[dict[str, NDArray[np.float64]], NDArray[np.float32]]):
    """A point in a square that is to reach a goal: microseconds a step, and both ways to end.

    It moves by the action, each number from -1 to 1, times 0.1. The reward is the distance to the goal, negative. With
    `stops` an episode terminates at the goal; every episode is truncated after 20 steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as Gymnasium names it)

    def __init__(
        self, *, stops: bool = True, render_mode: str | None = None, width: int = 32, height: int = 32
    ) -> None:
        self.render_mode = render_mode
        self._stops = stops
        self._size = (height, width)
        plane = gymnasium.spaces.Box(-2.0, 2.0, (2,), dtype=np.float64)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space: Any = gymnasium.spaces.Dict(dict.fromkeys(names, plane))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), dtype=np.float32)
        self._at = self._goal = np.zeros(2)
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
        """Begins at a random place with a random goal."""
        super().reset(seed=seed)
        self._at, self._goal = self.np_random.uniform(-0.5, 0.5, (2, 2))
        self._num_steps = 0
        return self._observation(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, NDArray[np.float64]], float, bool, bool, dict[str, Any]]:
        """Moves."""
        self._at = self._at + 0.1 * action
        self._num_steps += 1
        distance = float(np.linalg.norm(self._goal - self._at))
        near = distance < _NEAR
        return self._observation(), -distance, self._stops and near, self._num_steps >= _STEPS, {"is_success": near}

    def render(self) -> Any:
        """A dot for the point, a brighter one for the goal."""
        picture = np.zeros((*self._size, 3), dtype=np.uint8)
        for place, value in ((self._at, 128), (self._goal, 255)):
            row, column = ((place + 1.0) / 2.0 * np.array(self._size)).astype(int).clip(0, min(self._size) - 1)
            picture[row, column] = value
        return picture

    def _observation(self) -> dict[str, NDArray[np.float64]]:
        at = self._at.copy()
        return {"observation": at, "achieved_goal": at.copy(), "desired_goal": self._goal.copy()}


gymnasium.register("PointReach-v0", f"{__name__}:PointReach")


class VectorEnvConformance:
    """Inherit it in a pytest class and give it `make_env`, of a task whose episodes end within `longest` steps."""

    longest = 200

    def make_env(self, num_envs: int) -> VectorEnv:
        """A new instance."""
        raise NotImplementedError

    def actions(self, env: VectorEnv, place: int) -> Floats:
        """Actions that depend on nothing but the place in time."""
        shape = (env.num_envs, env.action_size)
        return np.random.default_rng(place).uniform(-1, 1, shape).astype(np.float32)

    def test_shapes_and_types_are_those_of_the_protocol(self) -> None:
        env = self.make_env(3)
        observations = env.reset([1, 2, 3])
        step = env.step(self.actions(env, 0))
        assert observations.shape == step.observations.shape == (3, env.observation_size)
        assert observations.dtype == step.observations.dtype == step.rewards.dtype == np.float32
        for flags in (step.terminated, step.truncated, step.successes, env.playing):
            assert flags.shape == (3,)
            assert flags.dtype == np.bool_
        assert step.rewards.shape == (3,)
        env.close()

    def test_the_same_seeds_and_actions_give_the_same_episodes_wherever_they_run(self) -> None:
        whole, part = self.make_env(3), self.make_env(1)
        many, one = whole.reset([4, 5, 6]), part.reset([5])
        assert np.array_equal(many[1], one[0])
        for place in range(10):
            actions = self.actions(whole, place)
            first, second = whole.step(actions), part.step(actions[1:2])
            assert np.array_equal(first.observations[1], second.observations[0])
            assert first.rewards[1] == second.rewards[0]
            if not part.playing.any():
                break
        again = whole.reset([4, 5, 6])
        assert np.array_equal(again, many)
        assert not np.array_equal(many[0], many[1])

    def test_an_episode_ends_once_and_then_stays_where_it_is(self) -> None:
        env = self.make_env(4)
        env.reset([1, 2, 3, 4])
        ends = np.zeros(4, dtype=int)
        kept = env.step(self.actions(env, 0))
        ends += kept.terminated | kept.truncated
        for place in range(1, self.longest):
            before, last = env.playing, env.step(self.actions(env, place))
            assert not (last.terminated & last.truncated).any()
            ended = last.terminated | last.truncated
            assert not (ended & ~before).any()
            assert np.array_equal(env.playing, before & ~ended)
            assert not last.rewards[~before].any()
            ends += ended
            assert np.array_equal(last.observations[~before], kept.observations[~before])
            assert np.array_equal(last.successes[~before], kept.successes[~before])
            kept = last
            if not env.playing.any():
                break
        assert ends.tolist() == [1, 1, 1, 1]
        refused(ValueError, "every episode has ended", lambda: env.step(self.actions(env, 0)))

    def test_what_does_not_fit_is_refused(self) -> None:
        env = self.make_env(2)
        refused(ValueError, "got 3 seeds, want 2", lambda: env.reset([1, 2, 3]))
        env.reset([1, 2])
        wide = np.zeros((2, env.action_size + 1), dtype=np.float32)
        refused(ValueError, "got actions", lambda: env.step(wide))
        refused(RuntimeError, "made without pixels", env.render)
