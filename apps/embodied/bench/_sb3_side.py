"""stable-baselines3's PPO on the same task, until it succeeds or its steps are spent; prints a JSON line an evaluation.

    python _sb3_side.py SEED MAX_STEPS plain|ours NUM_ENVS [unwatched]

`plain` has its default settings and sees the dictionary of the task; `ours` sees what m2flow's policy sees and has the
recipe's settings. `unwatched` takes all the steps and evaluates nothing.
"""

import json
import sys

import gymnasium
import gymnasium_robotics
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

TASK = "FetchReachDense-v4"
NUM_EPISODES = 32
EVERY = 3200
TARGET = 0.95


class Way(gymnasium.ObservationWrapper):
    """The observation and the way to the goal, in decimetres."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (13,), dtype=np.float32)

    def observation(self, told: dict[str, np.ndarray]) -> np.ndarray:
        way = 10.0 * (told["desired_goal"] - told["achieved_goal"])
        return np.concatenate([told["observation"], way]).astype(np.float32)


def make(ours: bool) -> gymnasium.Env:
    env = gymnasium.make(TASK, disable_env_checker=True)
    return Way(env) if ours else env


def success(model: PPO, env: gymnasium.Env) -> float:
    reached = 0.0
    for number in range(NUM_EPISODES):
        told, _ = env.reset(seed=1_000_000 + number)
        over = False
        while not over:
            action, _ = model.predict(told, deterministic=True)
            told, _, ended, cut, info = env.step(action)
            over = ended or cut
        reached += float(info["is_success"])
    return reached / NUM_EPISODES


def main() -> None:
    seed, max_steps, ours, num_envs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "ours", int(sys.argv[4])
    gymnasium.register_envs(gymnasium_robotics)
    torch.set_num_threads(1)
    envs = DummyVecEnv([lambda: make(ours)] * num_envs)
    settings = {"n_steps": 3200 // num_envs, "seed": seed, "device": "cpu"}
    policy = "MultiInputPolicy"
    if ours:
        policy = "MlpPolicy"
        settings |= {"n_steps": 50, "batch_size": 100, "n_epochs": 10, "gamma": 0.95, "learning_rate": 1e-3}
        settings |= {"policy_kwargs": {"log_std_init": -0.5}}
    model = PPO(policy, envs, **settings)
    if "unwatched" in sys.argv:
        model.learn(max_steps)
        return
    held_out = make(ours)
    reached = success(model, held_out)
    print(json.dumps({"steps": 0, "success": reached}), flush=True)
    while model.num_timesteps < max_steps and reached < TARGET:
        model.learn(EVERY, reset_num_timesteps=False)
        reached = success(model, held_out)
        print(json.dumps({"steps": model.num_timesteps, "success": reached}), flush=True)


if __name__ == "__main__":
    main()
