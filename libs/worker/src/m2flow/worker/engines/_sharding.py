"""Parameters cut over the ranks of a group: FSDP2's, dim 0 of each in as many pieces as there are ranks.

What is not cut is a plain tensor, and every function here leaves it as it is.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from m2flow.comm import Shard


def shard_module(root: nn.Module, blocks: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Cuts the parameters of `root`, which every rank holds alike; modules of classes in `blocks` are gathered alone.

    Gradients are summed over ranks, not averaged: what they are divided by is known at the step.
    """
    cut: list[Any] = [module for module in root.modules() if type(module).__name__ in blocks]
    for module in [*cut, root]:
        fully_shard(module, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, live."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All pieces. Every rank must ask; blocks for the others."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(like: Tensor, value: Tensor) -> Tensor:
    """Of a whole `value`, what this rank holds of `like`."""
    return value[_rows(like)] if isinstance(like, DTensor) else value


def shards(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Each tensor, or this rank's piece of it and where that begins; nothing where the piece is empty."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor
        elif local(tensor).numel():
            start = _rows(tensor).start
            found[name] = Shard(local(tensor), (start, *[0] * (tensor.ndim - 1)), tuple(tensor.shape))
    return found


def total_norm(norm: Tensor, mesh: DeviceMesh) -> Tensor:
    """The 2-norm of all pieces, from this rank's."""
    square = norm.square()
    dist.all_reduce(square, group=mesh.get_group())
    return square.sqrt()


def most(count: int, mesh: DeviceMesh) -> int:
    """The greatest of the ranks' counts."""
    counted = torch.tensor(count)
    dist.all_reduce(counted, dist.ReduceOp.MAX, group=mesh.get_group())
    return int(counted)


def _rows(tensor: DTensor) -> slice:
    """Where this rank's piece lies along dim 0: pieces are of one size, but for the last of them."""
    mesh = tensor.device_mesh
    size = -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * size, tensor.shape[0])
    return slice(start, start + local(tensor).shape[0])
