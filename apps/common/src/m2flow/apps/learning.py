"""What an actor learns with: model and optimiser, the losses, a supervised stage, and the files of a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from m2flow.apps.actor import ActorConfig
from m2flow.apps.graded import GradedSample, PolicyLossConfig, graded_samples
from m2flow.apps.imitation import Imitation, imitation_loss, worked_example
from m2flow.apps.policy_loss import PolicyLoss
from m2flow.apps.tokenizer import load_tokenizer
from m2flow.worker import Item
from m2flow.worker.engines.trainer import Metrics
from m2flow.worker.engines.trainer.adamw import AdamWConfig
from m2flow.worker.engines.trainer.torch_engine import TorchTrainerConfig, TorchTrainerEngine

__all__ = ["Learner"]

_STATE = "trainer.safetensors"
_STAGE = "imitation"


class Learner:
    """Gradients of graded groups, and optimiser steps. Which groups make a step is not its concern."""

    def __init__(self, config: ActorConfig) -> None:
        """Loads the model, and a checkpoint's state where there is one: seconds."""
        self._config = config
        directory = config.resume or config.model
        optimizer = AdamWConfig(config.lr, config.betas, 1e-8, config.weight_decay, config.max_grad_norm)
        self.engine = TorchTrainerEngine(
            TorchTrainerConfig(directory, optimizer, config.microbatch_tokens, config.temperature)
        )
        # Now: where it is a checkpoint's, the next one takes its place.
        self._tokenizer = load_tokenizer(directory)
        self._imitation = Imitation(config.imitate_until, config.imitate_max_steps)
        if config.resume:
            # The parameters are the directory's model: the state beside it holds the rest.
            state = load_file(Path(config.resume) / _STATE)
            if _STAGE in state:
                self._imitation.state.copy_(state.pop(_STAGE))
            self.engine.load_state_dict(_parameters(self.engine.state_dict()) | state)
        loss = PolicyLossConfig(
            config.clip_low, config.clip_high, config.loss_aggregation, config.correction, config.max_weight
        )
        self._loss = PolicyLoss(loss, on_policy=config.steps_per_iteration == 1)

    def logprobs(self, group: Item) -> list[NDArray[np.float32]]:
        """The present policy's, of each member's tokens."""
        return self.engine.logprobs([graded.sample for graded in graded_samples(group)])

    def fresh(self, group: Item) -> list[GradedSample]:
        """The members that are not too stale to be learned from."""
        most = self._config.max_staleness
        return [sample for sample in graded_samples(group) if most == "any" or sample.staleness <= most]

    def num_worked_tokens(self, group: Item) -> int:
        """The tokens that have a gradient, of the samples or of the worked example in their place."""
        if self._imitation.is_on:
            return len(group.members[0].fields["example_ids"])
        return sum(len(one.sample.completion_ids) for one in self.fresh(group)) if _teaches(group) else 0

    def accumulate(self, groups: Sequence[Item]) -> tuple[float, Metrics]:
        """Adds the groups' gradients; gives what they weigh in the number that the step divides by, and sums."""
        return self._imitate(groups) if self._imitation.is_on else self._learn(groups)

    def step(self, weight: float, sums: Mapping[str, float], success: float) -> Metrics:
        """Takes the optimiser step on what was accumulated: its metrics, from the sums and weights of `accumulate`.

        `success` is the mean reward of its samples. Raises ValueError where the supervised stage has no step left.
        """
        done = self.engine.step(weight)
        left = dict(sums)
        num_tokens = left.pop("tokens", 0.0)
        found = {"actor/grad_norm": done["grad_norm"], "actor/lr": done["lr"]}
        if self._imitation.is_on:
            found |= self._imitation.stepped(success)
        if "actor/pg_loss" in left:
            found["actor/pg_loss"] = left.pop("actor/pg_loss") / weight
        if num_tokens:
            found |= {name: value / num_tokens for name, value in left.items()}
        return found

    def shards(self) -> dict[str, Any]:
        """Parameters, optimiser and step count; of a supervised stage, how far it is."""
        return self.engine.shards() | self._stage()

    def load_shards(self, shards: Mapping[str, Any]) -> None:
        """Becomes what another was."""
        if _STAGE in shards:
            self._imitation.state.copy_(shards[_STAGE])
        self.engine.load_shards({name: value for name, value in shards.items() if name != _STAGE})

    def save(self, directory: Path) -> None:
        """Writes what `from_pretrained` loads, and the state that `resume` reads, into an existing directory."""
        self.engine.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)
        state = self.engine.state_dict() | self._stage()
        save_file({name: state[name] for name in state.keys() - _parameters(state).keys()}, directory / _STATE)

    def _stage(self) -> dict[str, Tensor]:
        return {_STAGE: self._imitation.state} if self._imitation.until else {}

    def _learn(self, groups: Sequence[Item]) -> tuple[float, Metrics]:
        weight = sum(self._loss.weight(sample.sample) for group in groups for sample in self.fresh(group))
        teaching = [sample for group in groups if _teaches(group) for sample in self.fresh(group)]
        if not teaching:
            return weight, {}
        return weight, self.engine.accumulate([sample.sample for sample in teaching], self._loss.bind(teaching))

    def _imitate(self, groups: Sequence[Item]) -> tuple[float, Metrics]:
        if not groups:
            return 0.0, {}
        sums = self.engine.accumulate([worked_example(group) for group in groups], imitation_loss)
        return sums["tokens"], sums


def _parameters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("param.")}


def _teaches(group: Item) -> bool:
    """Equal rewards give advantages of 0: no gradient, so no pass."""
    return bool(np.any(group.fields["advantages"]))
