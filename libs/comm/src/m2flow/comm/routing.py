"""Which way a payload goes between two addresses, and why."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Backend = Literal["reference", "shared_memory", "cuda_ipc", "grpc", "nccl", "grpc_through_host"]


@dataclass(frozen=True)
class Address:
    """Where an end is. `host` and `process` are compared for equality only; `device` is "cpu" or "cuda:N"."""

    host: str
    process: str
    device: str = "cpu"


class Route(NamedTuple):
    """The backend, and the reason for it in a sentence."""

    backend: Backend
    reason: str


def route(source: Address, target: Address, payload: Literal["cpu", "cuda"], *, peer_to_peer: bool = True) -> Route:
    """Returns how a payload on a device kind goes from one address to another. Does not block.

    `peer_to_peer` says whether the two devices, or hosts, can reach each other's GPU memory.
    """
    if source.process == target.process and source.host == target.host:
        return Route("reference", "both ends are one process: the object itself is handed over")
    same_host = source.host == target.host
    if payload == "cpu":
        if same_host:
            return Route("shared_memory", "both ends are on one host: the reader maps what the writer wrote")
        return Route("grpc", f"the ends are on hosts {source.host!r} and {target.host!r}: bytes go in a gRPC stream")
    if not peer_to_peer:
        return Route("grpc_through_host", "the GPUs cannot reach each other: through pinned host memory and a stream")
    if same_host:
        return Route("cuda_ipc", "both GPUs are on one host: the reader opens the writer's allocation")
    return Route("nccl", f"the GPUs are on hosts {source.host!r} and {target.host!r}: torch.distributed moves it")


def explain_route(
    source: Address, target: Address, payload: Literal["cpu", "cuda"], *, peer_to_peer: bool = True
) -> str:
    """Returns the route and its reason as one line for people."""
    found = route(source, target, payload, peer_to_peer=peer_to_peer)
    return f"{source.device}@{source.host} -> {target.device}@{target.host}: {found.backend} ({found.reason})"
