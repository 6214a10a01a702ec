"""Which way a payload goes between two addresses, and why: what the transports ask, and what people are told."""

from typing import Literal, NamedTuple

Backend = Literal["reference", "shared_memory", "cuda_ipc", "grpc", "nccl"]


class Address(NamedTuple):
    """Where an end is: see `Endpoint.address` and `address_of`. Both names are compared for equality only."""

    host: str
    process: str


class Route(NamedTuple):
    """The backend, and the reason for it in a sentence."""

    backend: Backend
    reason: str


def route(source: Address, target: Address, payload: Literal["cpu", "cuda"], *, parked: bool = False) -> Route:
    """Returns how a payload that lies on a kind of device goes from one address to another. Does not block.

    `parked` says that tensors are taken from their GPU to host memory first. The items of a channel are, and what a
    plain endpoint sends; so is what GPUs have that cannot reach each other. Calls and weights are always encoded:
    within one process they go as within one host.
    """
    same_host = source.host == target.host
    if same_host and source.process == target.process:
        return Route("reference", "both ends are in one process: the object itself is handed over")
    hosts = f"the ends are on hosts {source.host!r} and {target.host!r}"
    if payload == "cuda" and not parked:
        if same_host:
            return Route("cuda_ipc", "both GPUs are on one host: the reader opens the writer's allocation")
        return Route("nccl", f"{hosts}: torch.distributed moves what is on GPUs (m2flow.comm.process_group)")
    parking = "parked in host memory, " if payload == "cuda" else ""
    if same_host:
        return Route("shared_memory", f"{parking}both ends are on one host: the reader maps what the writer wrote")
    return Route("grpc", f"{parking}{hosts}: bytes go in a gRPC stream")


def explain_route(source: Address, target: Address, payload: Literal["cpu", "cuda"], *, parked: bool = False) -> str:
    """Returns the route and its reason as one line for people."""
    found = route(source, target, payload, parked=parked)
    ends = f"{source.process} on {source.host} -> {target.process} on {target.host}"
    return f"{payload} payload, {ends}: {found.backend} ({found.reason})"
