"""The Gymnasium adapter: the suite of vector environments, and what is its own."""

import gymnasium
import numpy as np
import pytest

from m2flow.worker.engines.env import VectorEnv
from m2flow.worker.engines.env.gymnasium import GymnasiumEnv, GymnasiumEnvConfig
from m2flow.worker.engines.env.testing import POINT, VectorEnvConformance


class TestGymnasiumEnv(VectorEnvConformance):
    def make_env(self, num_envs: int) -> VectorEnv:
        return GymnasiumEnv(GymnasiumEnvConfig(POINT, num_envs))


def walk(env: GymnasiumEnv) -> tuple[list[bool], list[bool]]:
    """Goes straight to the goal; returns whether it terminated, and was truncated, at each step."""
    observations = env.reset([0])
    terminated, truncated = [], []
    while env.playing.any():
        step = env.step(10 * observations[:, 2:])
        observations = step.observations
        terminated.append(bool(step.terminated[0]))
        truncated.append(bool(step.truncated[0]))
    assert step.successes[0]
    return terminated, truncated


def test_terminated_and_truncated_are_kept_apart() -> None:
    terminated, truncated = walk(GymnasiumEnv(GymnasiumEnvConfig(POINT)))
    assert terminated == [False] * (len(terminated) - 1) + [True]
    assert not any(truncated)
    terminated, truncated = walk(GymnasiumEnv(GymnasiumEnvConfig(POINT, options={"stops": False})))
    assert not any(terminated)
    assert truncated == [False] * 19 + [True]


def test_a_goal_becomes_the_way_to_it() -> None:
    near, far = (GymnasiumEnv(GymnasiumEnvConfig(POINT, goal_scale=scale)).reset([3])[0] for scale in (1.0, 10.0))
    assert np.allclose(far, [*near[:2], *(10 * near[2:])])
    env = gymnasium.make(POINT)
    told, _ = env.reset(seed=3)
    assert np.allclose(near, [*told["observation"], *(told["desired_goal"] - told["achieved_goal"])])


def test_a_picture_has_the_size_that_was_asked_for() -> None:
    env = GymnasiumEnv(GymnasiumEnvConfig(POINT, pixels=48))
    env.reset([1])
    assert env.render().shape == (48, 48, 3)
    assert env.render().dtype == np.uint8


def test_actions_that_are_no_box_are_refused() -> None:
    with pytest.raises(ValueError, match="CartPole-v1: got actions Discrete"):
        GymnasiumEnv(GymnasiumEnvConfig("CartPole-v1"))
