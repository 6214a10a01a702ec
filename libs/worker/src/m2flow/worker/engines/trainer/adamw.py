"""AdamW in one pass over memory: averaging, clipping and the update are the fused kernel's.

Parameters may be cut over the ranks of a mesh: each rank keeps and moves its own pieces, and only the norm is summed.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101); torch.optim.AdamW is the oracle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from m2flow.worker.engines._sharding import local, part, shards, total_norm, whole
from m2flow.worker.engines.trainer.engine import Metrics


@dataclass(frozen=True)
class AdamWConfig:
    """Attributes:
    lr: learning rate.
    betas: decay of the averages of the gradient and of its square.
    eps: added to the root of the second.
    weight_decay: decoupled, times lr, on matrices alone (not on norms and biases).
    max_grad_norm: gradients of a greater 2-norm are scaled to it; infinity does not clip.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.lr < 0 or self.max_grad_norm <= 0 or self.weight_decay < 0:
            raise ValueError(f"AdamW: got {self}, want lr, weight_decay >= 0 and max_grad_norm > 0")


class AdamW:
    """The optimiser of named float32 parameters, whose gradients are sums until `step`."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig, mesh: DeviceMesh | None = None
    ) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._mesh = mesh
        self._steps = 0
        self._first = {name: torch.zeros_like(tensor.data) for name, tensor in self._parameters.items()}
        self._second = {name: torch.zeros_like(tensor.data) for name, tensor in self._parameters.items()}

    @torch.no_grad()
    def step(self, weight: float) -> Metrics:
        """See `TrainerEngine.step`."""
        if not weight > 0:
            raise ValueError(f"step: weight is {weight}, want above 0: what the summed loss is averaged over")
        self._steps += 1
        names = [name for name, tensor in self._parameters.items() if tensor.grad is not None]
        if not names:
            return {"grad_norm": 0.0, "lr": self._config.lr}
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([self._grad(name) for name in names])))
        norm = float(norm if self._mesh is None else total_norm(norm, self._mesh)) / weight
        divisor = weight * max(1.0, norm / self._config.max_grad_norm)
        for decayed in (False, True):
            chosen = [name for name in names if (self._parameters[name].ndim > 1) == decayed]
            if chosen:
                self._update(chosen, self._config.weight_decay if decayed else 0.0, divisor)
        for name in names:
            self._parameters[name].grad = None
        return {"grad_norm": norm, "lr": self._config.lr}

    def _update(self, names: list[str], decay: float, divisor: float) -> None:
        parameters = [local(self._parameters[name].data) for name in names]
        device = parameters[0].device
        torch._fused_adamw_(
            parameters,
            [self._grad(name) for name in names],
            [local(self._first[name]) for name in names],
            [local(self._second[name]) for name in names],
            [],
            [torch.tensor(self._steps, dtype=torch.float32, device=device)] * len(names),
            lr=self._config.lr,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            weight_decay=decay,
            eps=self._config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=torch.tensor(divisor, dtype=torch.float32, device=device),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors under `param.`, `first.` and `second.` names, and `steps`, int64 []: live, or gathered over ranks."""
        return {name: whole(tensor) for name, tensor in self._state().items()}

    def shards(self) -> dict[str, Any]:
        """The same, as far as it is here, live: see `Worker.shards`."""
        return shards(self._state())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved state in; nothing is changed when it does not fit (ValueError)."""
        targets = self._state()
        wrong = sorted(targets.keys() ^ state.keys())
        wrong += [name for name, tensor in targets.items() if name in state and state[name].shape != tensor.shape]
        if wrong:
            raise ValueError(f"optimiser state: {len(wrong)} names or shapes differ, first {wrong[:3]}: same model?")
        self.load_shards({name: part(targets[name], value) for name, value in state.items()})

    def load_shards(self, state: Mapping[str, Tensor]) -> None:
        """Copy some of the state in, cut as it is here."""
        targets = self._state()
        for name, value in state.items():
            local(targets[name]).copy_(value)
        if "steps" in state:
            self._steps = int(state["steps"])

    def resident_bytes(self) -> int:
        """Bytes of the two averages."""
        return sum(local(tensor).nbytes for kind in (self._first, self._second) for tensor in kind.values())

    def _grad(self, name: str) -> Tensor:
        grad = self._parameters[name].grad
        assert grad is not None
        return local(grad)

    def _state(self) -> dict[str, Tensor]:
        live = {name: tensor.data for name, tensor in self._parameters.items()}
        kinds = {"param": live, "first": self._first, "second": self._second}
        state = {f"{kind}.{name}": tensor for kind, named in kinds.items() for name, tensor in named.items()}
        return {"steps": torch.tensor(self._steps), **state}
