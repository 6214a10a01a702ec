"""The devices of a cluster spec by kind, with the global ids that plans name."""

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.errors import InputError


@dataclass(frozen=True)
class Pool:
    """All devices of one kind; `spec` has the smallest memory of them."""

    kind: str
    ids: tuple[int, ...]
    spec: sched_pb2.DeviceSpec


def pools(cluster: sched_pb2.ClusterSpec) -> Mapping[str, Pool]:
    """Returns the pools by kind. Ids count over the nodes, and on a node over its device specs, in their order.

    The cores of nodes become devices of kind "cpu", numbered after all others, where no node lists that kind.

    Raises:
        InputError: the cluster has no device.
    """
    ids: dict[str, list[int]] = {}
    specs: dict[str, sched_pb2.DeviceSpec] = {}
    following = 0
    for node in cluster.nodes:
        for _ in range(max(node.count, 1)):
            for spec in node.devices:
                ids.setdefault(spec.kind, []).extend(range(following, following + spec.count))
                following += spec.count
                known = specs.get(spec.kind)
                if known is None or 0 < spec.memory_bytes < (known.memory_bytes or float("inf")):
                    specs[spec.kind] = spec
    cores = sum(node.cores * max(node.count, 1) for node in cluster.nodes)
    if "cpu" not in ids and cores:
        ids["cpu"] = list(range(following, following + cores))
        specs["cpu"] = sched_pb2.DeviceSpec(kind="cpu", count=cores)
    if not following and not cores:
        raise InputError("the cluster has no devices, want one or more: list nodes with devices or cores")
    return {kind: Pool(kind, tuple(i), specs[kind]) for kind, i in ids.items()}
