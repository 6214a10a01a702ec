"""The policy worker: observations in, actions out, with the noise that seed, place and step give."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from m2flow.apps.seeding import derived_seed
from m2flow.worker import Item, Worker, stage
from m2flow.worker.engines.env import Floats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PolicyWorker", "PolicyWorkerConfig"]


@dataclass(frozen=True)
class PolicyWorkerConfig:
    """Attributes:
    model: directory that `save_policy` wrote.
    seed: the run's; with iteration, place and step it seeds the noise of each action.
    """

    model: str
    seed: int


class PolicyWorker(Worker):
    """Its config is a `PolicyWorkerConfig` as a dict. An action depends on seed, place and weights, not on the plan."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"
    preload: ClassVar[tuple[str, ...]] = ("m2flow.embodied.policy",)

    def setup(self) -> None:
        """Loads the policy."""
        from m2flow.embodied.policy import load_policy  # noqa: PLC0415

        self._config = PolicyWorkerConfig(**self.config)
        self._policy = load_policy(Path(self._config.model))

    @stage
    def act(self, items: list[Item]) -> list[Item]:
        """Each lane with `actions`, float32 [n, size], and their `logprobs`, float32 [n].

        Lanes are looked at one by one, so that what shares a message changes not even the rounding.
        """
        return [self._acted(item) for item in items]

    def _acted(self, item: Item) -> Item:
        observations = item.fields["observations"]
        actions, logprobs = self._policy.act(observations, self._noise(item, len(observations)))
        return replace(item, fields={"actions": actions, "logprobs": logprobs})

    def decide(self, observations: list[Floats]) -> list[Floats]:
        """The most likely actions, for each array of observations [n, size]."""
        return [self._policy.decide(part) for part in observations]

    def load_weights(self, weights: "Mapping[str, Tensor]", version: int) -> None:
        """Takes published weights; what it does from now on has them."""
        self._policy.load_state_dict(dict(weights))

    def resident_bytes(self) -> int:
        """The bytes of the networks."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._policy.parameters())

    def _noise(self, item: Item, num_envs: int) -> Floats:
        key = derived_seed(self._config.seed, "action", item.iteration, *item.seq, item.fields["place"])
        return np.random.Generator(np.random.Philox(key=key)).standard_normal(
            (num_envs, self._policy.shape.action_size), dtype=np.float32
        )
