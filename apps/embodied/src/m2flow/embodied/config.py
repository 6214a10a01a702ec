"""The settings of an embodied run: the environment, its episodes, the policy, and how it learns from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from m2flow.apps.config import EvaluationConfig, TrainingConfig
from m2flow.apps.parsing import setting

__all__ = ["EmbodiedConfig", "EnvConfig", "PPOConfig", "PlayConfig", "PolicyConfig"]


@dataclass(frozen=True)
class EnvConfig:
    """The task."""

    id: str = setting("gymnasium_robotics:FetchReachDense-v4", "a Gymnasium id, with the module that registers it")
    episode_steps: int = setting(50, "steps of an episode in the mean: planners use it, no result depends on it", low=1)
    goal_scale: float = setting(10.0, "the way to the goal is seen multiplied by this: 10 is decimetres", above=0)


@dataclass(frozen=True)
class PolicyConfig:
    """Two networks of one shape: the mean of a Gaussian, and the value."""

    hidden: tuple[int, ...] = setting((64, 64), "units of each hidden layer")
    log_std: float = setting(-0.5, "logarithm of the standard deviation at the start; it is learned")


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation with generalised advantages."""

    gamma: float = setting(0.95, "discount of a step", low=0, high=1)
    lam: float = setting(0.95, "the trace of generalised advantages", low=0, high=1)
    clip: float = setting(0.2, "the importance ratio is clipped at 1 plus and minus this", low=0)
    value_coef: float = setting(0.5, "weight of the value loss", low=0)
    entropy_coef: float = setting(0.0, "weight of the policy's entropy", low=0)


@dataclass(frozen=True)
class PlayConfig(EvaluationConfig):
    """Whole episodes by the mean action, from seeds that are never trained on and the same in every run."""

    num_episodes: int = setting(32, "episodes of an evaluation", low=1)
    film: bool = setting(True, "one of them is filmed, for report.html")
    pixels: int = setting(160, "side of the film's picture", low=16)


@dataclass(frozen=True)
class EmbodiedConfig(TrainingConfig):
    """One run of m2flow-embodied."""

    batch_words: ClassVar[tuple[str, ...]] = ("episodes_per_step", "num_lanes", "minibatch_size", "num_epochs")
    first_step_words: ClassVar[tuple[str, ...]] = ("policy.hidden", "policy.log_std")

    episodes_per_step: int = setting(8, "episodes of one iteration, each in an environment of its own", low=1)
    num_lanes: int = setting(2, "parts of them that go round by themselves: one is simulated while another acts", low=1)
    minibatch_size: int = setting(100, "environment steps per optimiser step", low=1)
    num_epochs: int = setting(10, "passes over one iteration's steps", low=1)
    env: EnvConfig = EnvConfig()
    policy: PolicyConfig = PolicyConfig()
    ppo: PPOConfig = PPOConfig()
    evaluation: PlayConfig = PlayConfig()

    @property
    def source_items(self) -> int:
        """Lanes."""
        return self.num_lanes

    @property
    def subject(self) -> str:
        """The task."""
        return self.env.id

    def batch_problems(self) -> list[str]:
        """What does not divide."""
        if self.episodes_per_step % self.num_lanes == 0:
            return []
        wanted = f"want a multiple of num_lanes ({self.num_lanes}): set it to"
        low = max(1, self.episodes_per_step // self.num_lanes) * self.num_lanes
        return [f"episodes_per_step: got {self.episodes_per_step}, {wanted} {low} or {low + self.num_lanes}"]

    def derived_numbers(self) -> Mapping[str, int]:
        """Episodes; how many steps they take is the task's."""
        return {
            "episodes_per_lane": self.episodes_per_step // self.num_lanes,
            "total_episodes": self.episodes_per_step * self.num_steps,
        }
