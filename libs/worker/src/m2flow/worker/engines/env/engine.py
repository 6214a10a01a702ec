"""A vector environment: several episodes of one task that move together, each until its own end.

Nothing starts anew by itself. An environment whose episode has ended stays where it is until the next `reset`, so that
its last observation can be valued where it was cut off, and no step of another episode is taken for one of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Step", "VectorEnv"]

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Step:
    """What one step of all environments gave. Entry n is of environment n.

    Attributes:
        observations: float32 [N, observation_size]; of one that had ended before: its last.
        rewards: float32 [N]; of one that had ended before: 0.
        terminated: bool [N], True where this step ended the episode by the task's own rules: nothing follows.
        truncated: bool [N], True where this step cut the episode off and something would have followed. An episode that
            ends by both has terminated.
        successes: bool [N], whether the task was fulfilled after the step; of one that had ended before: as it ended.
    """

    observations: Floats
    rewards: Floats
    terminated: Flags
    truncated: Flags
    successes: Flags


class VectorEnv(Protocol):
    """N environments of one task, with flat observations and actions.

    Everything follows from the seeds and the actions: the same ones give the same episodes, in any instance.
    """

    @property
    def num_envs(self) -> int:
        """N."""
        ...

    @property
    def observation_size(self) -> int:
        """Numbers of an observation."""
        ...

    @property
    def action_size(self) -> int:
        """Numbers of an action."""
        ...

    @property
    def playing(self) -> Flags:
        """Bool [N]: whose episode has begun and not ended."""
        ...

    def reset(self, seeds: Sequence[int]) -> Floats:
        """Begins an episode in each environment, by its seed; returns observations, float32 [N, observation_size].

        Ends what was under way. Raises ValueError where the seeds are not N.
        """
        ...

    def step(self, actions: Floats) -> Step:
        """Takes an action, float32 [N, action_size], in each environment that is playing.

        Actions beyond the task's bounds are held to them. Raises ValueError on another shape, and where nothing plays.
        """
        ...

    def render(self) -> NDArray[np.uint8]:
        """A picture of environment 0, uint8 [height, width, 3]. RuntimeError where it was not made to be seen."""
        ...

    def close(self) -> None:
        """Frees the simulators."""
        ...
