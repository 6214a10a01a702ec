"""AdamW in one pass over memory: averaging, clipping and the update are the fused kernel's.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101); torch.optim.AdamW is the oracle.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from m2flow.worker.engines.trainer.engine import Metrics


@dataclass(frozen=True)
class AdamWConfig:
    """Attributes:
    lr: learning rate after warm-up.
    betas: decay of the averages of the gradient and of its square.
    eps: added to the root of the second.
    weight_decay: decoupled, times lr, on matrices alone (not on norms and biases).
    max_grad_norm: gradients of a greater 2-norm are scaled to it; infinity does not clip.
    warmup_steps: lr rises linearly over so many steps.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.lr < 0 or self.max_grad_norm <= 0 or self.warmup_steps < 0 or self.weight_decay < 0:
            raise ValueError(f"AdamW: got {self}, want lr, weight_decay, warmup_steps >= 0 and max_grad_norm > 0")


class AdamW:
    """The optimiser of named float32 parameters, whose gradients are sums until `step`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._steps = 0
        self._first = {name: torch.zeros_like(tensor.data) for name, tensor in self._parameters.items()}
        self._second = {name: torch.zeros_like(tensor.data) for name, tensor in self._parameters.items()}

    @torch.no_grad()
    def step(self, weight: float) -> Metrics:
        """See `TrainerEngine.step`."""
        if not weight > 0:
            raise ValueError(f"step: weight is {weight}, want above 0: what the summed loss is averaged over")
        lr = self._config.lr * min(1.0, (self._steps + 1) / max(1, self._config.warmup_steps))
        self._steps += 1
        names = [name for name, tensor in self._parameters.items() if tensor.grad is not None]
        if not names:
            return {"grad_norm": 0.0, "lr": lr}
        grads: list[Tensor] = [self._parameters[name].grad for name in names]  # type: ignore[misc]
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))) / weight
        divisor = weight * max(1.0, norm / self._config.max_grad_norm)
        for decayed in (False, True):
            chosen = [name for name in names if (self._parameters[name].ndim > 1) == decayed]
            if chosen:
                self._update(chosen, lr, self._config.weight_decay if decayed else 0.0, divisor)
        for name in names:
            self._parameters[name].grad = None
        return {"grad_norm": norm, "lr": lr}

    def _update(self, names: list[str], lr: float, decay: float, divisor: float) -> None:
        parameters = [self._parameters[name].data for name in names]
        device = parameters[0].device
        torch._fused_adamw_(
            parameters,
            [self._parameters[name].grad for name in names],  # type: ignore[misc]
            [self._first[name] for name in names],
            [self._second[name] for name in names],
            [],
            [torch.tensor(self._steps, dtype=torch.float32, device=device)] * len(names),
            lr=lr,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            weight_decay=decay,
            eps=self._config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=torch.tensor(divisor, dtype=torch.float32, device=device),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Live tensors under `param.`, `first.` and `second.` names, and `steps`, int64 []."""
        state = {"steps": torch.tensor(self._steps)}
        for kind, tensors in self._kinds().items():
            state |= {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved state in; nothing is changed when it does not fit (ValueError)."""
        targets = {f"{kind}.{name}": tensor for kind, named in self._kinds().items() for name, tensor in named.items()}
        wrong = sorted((targets.keys() | {"steps"}) ^ state.keys())
        wrong += [name for name, tensor in targets.items() if name in state and state[name].shape != tensor.shape]
        if wrong:
            raise ValueError(f"optimiser state: {len(wrong)} names or shapes differ, first {wrong[:3]}: same model?")
        for name, tensor in targets.items():
            tensor.copy_(state[name])
        self._steps = int(state["steps"])

    def resident_bytes(self) -> int:
        """Bytes of the two averages."""
        return sum(tensor.nbytes for kind in (self._first, self._second) for tensor in kind.values())

    def _kinds(self) -> dict[str, dict[str, Tensor]]:
        live = {name: tensor.data for name, tensor in self._parameters.items()}
        return {"param": live, "first": self._first, "second": self._second}
