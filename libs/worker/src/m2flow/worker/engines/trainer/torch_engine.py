"""The trainer engine in plain torch, on one device.

Samples are packed as prefix trees, so a prompt is run once for its group, and worked examples once for the
microbatch. Logits are computed where a completion's token is predicted, in chunks. Gradients are sums; what they are
divided by, and the clipping factor, go into the fused optimiser as one number, so no pass over them is spent on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m2flow.worker.engines._causal_lm import CausalLM
from m2flow.worker.engines._logprobs import pair_logprobs
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
    """`TrainerEngine` over a transformers model; see the module."""

    def __init__(self, config: TorchTrainerConfig) -> None:
        """Load the model: seconds. Memory is four times its float32 size once it has stepped."""
        if config.temperature <= 0:
            raise ValueError(f"temperature: got {config.temperature}, want above 0: a greedy policy has no gradient")
        if config.microbatch_tokens < 1:
            raise ValueError(f"microbatch_tokens: got {config.microbatch_tokens}, want at least 1")
        self._config = config
        self._lm = CausalLM.load(Path(config.path), dtype=torch.float32, device=torch.device(config.device))
        self._optimizer = AdamW(dict(self._lm.model.named_parameters()), config.optimizer)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        results: list[NDArray[np.float32]] = []
        for microbatch in pack(samples, self._config.microbatch_tokens):
            values, _ = self._forward(microbatch)
            rows = values.cpu().numpy()
            results.extend(row[valid] for row, valid in zip(rows, microbatch.valid, strict=True))
        return results

    def accumulate(self, samples: Sequence[Sample], loss: LossFn) -> Metrics:
        sums: Metrics = {}
        for microbatch in pack(samples, self._config.microbatch_tokens):
            logprobs, entropy = self._forward(microbatch)
            mask = torch.from_numpy(microbatch.mask).to(logprobs.device)
            total, metrics = loss(LossInputs(microbatch.samples, logprobs, entropy, mask))
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def step(self, weight: float) -> Metrics:
        return self._optimizer.step(weight)

    def named_weights(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._lm.model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._optimizer.load_state_dict(state)

    def save_pretrained(self, path: Path) -> None:
        self._lm.model.save_pretrained(path)  # type: ignore[operator]

    def resident_bytes(self) -> int:
        return num_bytes(self._lm.model) + self._optimizer.resident_bytes()

    def _forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Logprobs and entropy, float32 [B, T] each, 0 where padded."""
        device = self._lm.device
        hidden = self._lm.hidden_of(microbatch.trie)[torch.from_numpy(microbatch.rows).to(device)]
        pair_rows = torch.from_numpy(microbatch.pair_rows).to(device)
        logprobs, entropy = pair_logprobs(
            hidden,
            self._lm.head,
            pair_rows,
            torch.from_numpy(microbatch.pair_tokens).to(device),
            temperature=self._config.temperature,
        )
        pairs = torch.from_numpy(microbatch.pairs).to(device)
        padded = torch.from_numpy(~microbatch.valid).to(device)
        return logprobs[pairs].masked_fill(padded, 0.0), entropy[pair_rows][pairs].masked_fill(padded, 0.0)
