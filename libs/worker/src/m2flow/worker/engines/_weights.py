"""Moving a model's parameters in by name."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from m2flow.worker.engines._sharding import local


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the parameters of `model`, converting their dtype where it differs.

    Parameters that share memory (a tied vocabulary projection) have one name, the first. Nothing is copied unless all
    names and shapes agree; raises ValueError otherwise.
    """
    parameters = dict(model.named_parameters())
    missing, unknown = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing or unknown:
        raise ValueError(
            f"weights: got {len(weights)} names, missing {missing[:3]}, unknown {unknown[:3]}: is it that model?"
        )
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(
                f"weights: {name} has shape {tuple(weights[name].shape)}, want {tuple(parameter.shape)}: same model?"
            )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def num_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers that are here, those shared counted once."""
    return sum(local(tensor).nbytes for tensor in [*model.parameters(), *model.buffers()])
