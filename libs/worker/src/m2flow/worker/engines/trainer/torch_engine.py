"""The trainer engine in plain torch, on one device or, its parameters cut by FSDP2, on one device a rank.

Samples are packed as prefix trees, so a prompt is run once for its group, and worked examples once for the
microbatch. Logits are computed where a completion's token is predicted, in chunks. Gradients are sums; what they are
divided by, and the clipping factor, go into the fused optimiser as one number, so no pass over them is spent on it.

The ranks of a mesh move in step: each is given its own samples, which may be none, all run as many microbatches as the
one that has most, and the gradient is that of the sum over all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from m2flow.worker.engines._causal_lm import CausalLM
from m2flow.worker.engines._logprobs import pair_logprobs
from m2flow.worker.engines._sharding import most, shard_module, whole
from m2flow.worker.engines._weights import num_bytes
from m2flow.worker.engines.trainer._packing import Microbatch, pack
from m2flow.worker.engines.trainer.adamw import AdamW, AdamWConfig
from m2flow.worker.engines.trainer.engine import LossFn, LossInputs, Metrics, Sample


@dataclass(frozen=True)
class TorchTrainerConfig:
    """Attributes:
    path: Hugging Face model directory.
    optimizer: the optimiser's settings.
    microbatch_tokens: most tokens of one forward and backward pass. Memory and time, not results.
    temperature: the policy is softmax(logits / temperature); the rollout engine's.
    device: a torch device. Parameters are float32: an update of 1e-5 is lost in bfloat16.
    """

    path: str
    optimizer: AdamWConfig
    microbatch_tokens: int = 2048
    temperature: float = 1.0
    device: str = "cpu"


class TorchTrainerEngine:
    """`TrainerEngine` over a transformers model; see the module.

    With a `mesh` every method must be called by all its ranks, but `resident_bytes`, `shards` and `load_shards`.
    """

    def __init__(self, config: TorchTrainerConfig, mesh: DeviceMesh | None = None) -> None:
        """Load the model: seconds. Memory is four times its float32 size once it has stepped, over the mesh's ranks."""
        if config.temperature <= 0:
            raise ValueError(f"temperature: got {config.temperature}, want above 0: a greedy policy has no gradient")
        if config.microbatch_tokens < 1:
            raise ValueError(f"microbatch_tokens: got {config.microbatch_tokens}, want at least 1")
        self._config = config
        self._mesh = mesh
        self._lm = CausalLM.load(Path(config.path), dtype=torch.float32, device=torch.device(config.device))
        self._policy = _Policy(self._lm, config.temperature)
        if mesh is not None:
            shard_module(self._policy, self._lm.block_classes, mesh)
        self._optimizer = AdamW(dict(self._lm.model.named_parameters()), config.optimizer, mesh)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        results: list[NDArray[np.float32]] = []
        for microbatch, is_own in self._microbatches(samples):
            values, _ = self._policy(microbatch)
            if is_own:
                rows = values.cpu().numpy()
                results.extend(row[valid] for row, valid in zip(rows, microbatch.valid, strict=True))
        self._forget_gathered()
        return results

    def accumulate(self, samples: Sequence[Sample], loss: LossFn) -> Metrics:
        sums: Metrics = {}
        for microbatch, is_own in self._microbatches(samples):
            logprobs, entropy = self._policy(microbatch)
            total, metrics = logprobs.sum() * 0.0, Metrics()
            if is_own:
                mask = torch.from_numpy(microbatch.mask).to(logprobs.device)
                loss_sum, metrics = loss(LossInputs(microbatch.samples, logprobs, entropy, mask))
                # The gradients of other ranks pass through this one, whether it has any or not.
                total = loss_sum if self._mesh is None else total + loss_sum
            if total.requires_grad:
                total.backward()
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        self._forget_gathered()
        return sums

    def step(self, weight: float) -> Metrics:
        return self._optimizer.step(weight)

    def named_weights(self) -> Mapping[str, Tensor]:
        return {name: whole(parameter.detach()) for name, parameter in self._lm.model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._optimizer.load_state_dict(state)

    def shards(self) -> dict[str, Any]:
        """The state as far as this rank has it, live: what `Worker.shards` gives."""
        return self._optimizer.shards()

    def load_shards(self, shards: Mapping[str, Tensor]) -> None:
        """Copy some of it in, cut as it is here."""
        self._optimizer.load_shards(shards)

    def save_pretrained(self, path: Path) -> None:
        weights = self.named_weights()
        if self._mesh is None or self._mesh.get_local_rank() == 0:
            self._lm.model.save_pretrained(path, state_dict=weights)  # type: ignore[operator]

    def resident_bytes(self) -> int:
        return num_bytes(self._lm.model) + self._optimizer.resident_bytes()

    def _microbatches(self, samples: Sequence[Sample]) -> Iterator[tuple[Microbatch, bool]]:
        """Microbatches, and whether they are of `samples`; the others keep this rank in step."""
        own = list(pack(samples, self._config.microbatch_tokens))
        num_idle = 0 if self._mesh is None else most(len(own), self._mesh) - len(own)
        yield from ((microbatch, True) for microbatch in own)
        if num_idle:
            yield from [(next(pack([Sample([0], [0])], self._config.microbatch_tokens)), False)] * num_idle

    def _forget_gathered(self) -> None:
        """Drops whole parameters that a forward pass left here: the next step would not change them."""
        if isinstance(self._policy, FSDPModule):
            self._policy.reshard()


class _Policy(nn.Module):
    """From a microbatch to logprobs and entropy: one forward pass of what is cut over ranks."""

    def __init__(self, lm: CausalLM, temperature: float) -> None:
        super().__init__()
        self.model = lm.model
        self._lm = lm
        self._temperature = temperature

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Logprobs and entropy, float32 [B, T] each, 0 where padded."""
        hidden = self._lm.hidden_of(microbatch.trie)
        device = hidden.device
        hidden = hidden[torch.from_numpy(microbatch.rows).to(device)]
        pair_rows = torch.from_numpy(microbatch.pair_rows).to(device)
        logprobs, entropy = pair_logprobs(
            hidden,
            self._lm.head,
            pair_rows,
            torch.from_numpy(microbatch.pair_tokens).to(device),
            temperature=self._temperature,
        )
        pairs = torch.from_numpy(microbatch.pairs).to(device)
        padded = torch.from_numpy(~microbatch.valid).to(device)
        return logprobs[pairs].masked_fill(padded, 0.0), entropy[pair_rows][pairs].masked_fill(padded, 0.0)
