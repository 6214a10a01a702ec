"""A worker around a trainer engine, on one rank or cut over many: what sharding and re-placing are tested with."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.worker.base import Worker
from m2flow.worker.engines.trainer.adamw import AdamWConfig
from m2flow.worker.engines.trainer.engine import LossInputs, Metrics, Sample, train_minibatch
from m2flow.worker.engines.trainer.mesh import join_ranks
from m2flow.worker.engines.trainer.torch_engine import TorchTrainerConfig, TorchTrainerEngine


class TrainerProbe(Worker):
    """`config` is {"path": a model's directory, "microbatch_tokens": int}."""

    in_step = True

    def setup(self) -> None:
        config = TorchTrainerConfig(
            self.config["path"], AdamWConfig(lr=1e-2), microbatch_tokens=self.config["microbatch_tokens"]
        )
        self._engine = TorchTrainerEngine(config, join_ranks(self.context))

    def train(self, samples: Sequence[Any], weight: float) -> Metrics:
        """A step on pairs of prompt and completion, dealt to the ranks in turn; the rank's own metrics."""
        mine = [Sample(*pair) for pair in samples[self.context.rank :: self.context.world_size]]
        return train_minibatch(self._engine, mine, _minus_logprob, weight=weight)

    def logprobs(self, samples: Sequence[Any]) -> list[Any]:
        """Of all the samples, on every rank; those of rank 0 have one microbatch more."""
        values = self._engine.logprobs([Sample(*pair) for pair in samples])
        if self.context.rank == 0:
            self._engine.logprobs([Sample(*samples[0])])
        else:
            self._engine.logprobs([])
        return values

    def digests(self) -> dict[str, str]:
        """What stands for each tensor of the state, whole, to the bit."""
        state = self._engine.state_dict()
        return {name: hashlib.blake2b(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}

    def state(self) -> Mapping[str, Tensor]:
        """The whole state."""
        return self._engine.state_dict()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Becomes a whole state."""
        self._engine.load_state_dict(state)

    def save(self, path: str) -> None:
        """Writes the model."""
        self._engine.save_pretrained(Path(path))

    def resident_bytes(self) -> int:
        return self._engine.resident_bytes()

    def shards(self) -> Mapping[str, Any]:
        return self._engine.shards()

    def load_shards(self, shards: Mapping[str, Any]) -> None:
        self._engine.load_shards(shards)


def _minus_logprob(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    loss = -(inputs.logprobs * inputs.mask).sum()
    return loss, {"loss": float(loss.detach()), "tokens": float(torch.count_nonzero(inputs.mask))}
