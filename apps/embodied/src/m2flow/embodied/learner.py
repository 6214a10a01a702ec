"""The learner: what was played in, values and advantages, then PPO's passes over its steps; weights out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from m2flow.worker import Item, Worker, stage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LearnerConfig", "LearnerWorker"]


@dataclass(frozen=True)
class LearnerConfig:
    """Attributes:
    model: directory that `save_policy` wrote.
    seed: the run's; with the iteration it seeds the order of steps.
    minibatch_size: environment steps of one optimiser step, at most.
    num_epochs: passes over what was played.
    gamma, lam, clip, value_coef, entropy_coef: PPO's.
    lr, betas, weight_decay, max_grad_norm: AdamW's.
    resume: directory that `save_checkpoint` wrote, which is then `model` too; or empty.
    """

    model: str
    seed: int
    minibatch_size: int
    num_epochs: int
    gamma: float
    lam: float
    clip: float
    value_coef: float
    entropy_coef: float
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    resume: str = ""


class LearnerWorker(Worker):
    """Its config is a `LearnerConfig` as a dict."""

    in_step: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("m2flow.embodied.learning",)

    def setup(self) -> None:
        """Loads the policy, and a checkpoint's optimiser where there is one."""
        from m2flow.embodied.learning import Learner  # noqa: PLC0415

        self._learner = Learner(LearnerConfig(**{**self.config, "betas": tuple(self.config["betas"])}))

    @stage
    def judge(self, items: list[Item]) -> Iterator[Item]:
        """What was played with `advantages`, whitened over all of it, and `returns`, float32 [B, T] each.

        Where an episode was truncated, what would have followed is worth the value of its last observation.
        """
        for item in items:
            advantages, returns = self._learner.judge(item.fields)
            yield item.with_fields(advantages=advantages, returns=returns)

    @stage
    def train(self, items: list[Item]) -> Iterator[Item]:
        """PPO on what was judged; gives what became of each episode, and under `metrics` what the steps came to."""
        for item in items:
            metrics = self._learner.learn(item.fields, item.iteration)
            yield Item(item.seq, item.iteration, {**_outcomes(item.fields), "metrics": metrics})

    def named_weights(self) -> "Mapping[str, Tensor]":
        """The parameters."""
        return self._learner.named_weights()

    def shards(self) -> "Mapping[str, Tensor]":
        """Parameters and the optimiser's moments, by name: live."""
        return self._learner.shards()

    def load_shards(self, shards: "Mapping[str, Tensor]") -> None:
        """Becomes what another was."""
        self._learner.load_shards(shards)

    def save_checkpoint(self, directory: str) -> None:
        """Writes what `load_policy` reads, and the optimiser's moments, into an existing directory."""
        self._learner.save(Path(directory))

    def num_updates(self) -> int:
        """Optimiser steps that were taken, a checkpoint's included."""
        return self._learner.num_updates()

    def resident_bytes(self) -> int:
        """The bytes of parameters, gradients and moments."""
        return self._learner.resident_bytes()


def _outcomes(fields: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What became of each episode of a batch, an entry each."""
    mask, successes = fields["mask"], fields["successes"]
    lengths = mask.sum(1)
    last = np.maximum(lengths - 1, 0)
    return {
        "returns": [float(value) for value in (fields["rewards"] * mask).sum(1)],
        "lengths": [int(value) for value in lengths],
        "terminated": [bool(value) for value in fields["terminated"].any(1)],
        "success_once": [bool(value) for value in (successes & mask).any(1)],
        "success_at_end": [bool(value) for value in successes[np.arange(len(last)), last]],
    }
