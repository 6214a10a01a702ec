"""The devices of a cluster spec by kind, with the global ids that plans name."""

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.errors import InputError

MOST_DEVICES = 1 << 17


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


def num_devices(cluster: sched_pb2.ClusterSpec) -> int:
    """Devices of every kind and cores, over all nodes."""
    return sum(max(n.count, 1) * (n.cores + sum(d.count for d in n.devices)) for n in cluster.nodes)


def with_devices(cluster: sched_pb2.ClusterSpec, kind: str, more: int) -> sched_pb2.ClusterSpec | None:
    """The cluster with `more` devices (cores) of a kind on one of its nodes, fewer if negative.

    None if no node can spare so many (one stays on each), or they would be more than can be planned.
    """
    if num_devices(cluster) + more > MOST_DEVICES:
        return None
    changed = sched_pb2.ClusterSpec()
    changed.CopyFrom(cluster)
    listed = any(spec.kind == kind for node in cluster.nodes for spec in node.devices)
    for node in changed.nodes:
        for spec in node.devices if listed else ():
            if spec.kind == kind and spec.count + more >= 1:
                _alone(changed, node)
                spec.count += more
                return changed
        if kind == "cpu" and not listed and node.cores and node.cores + more >= 1:
            _alone(changed, node)
            node.cores += more
            return changed
    return None


def _alone(cluster: sched_pb2.ClusterSpec, node: sched_pb2.NodeSpec) -> None:
    """Leaves one machine in `node`; its equals become an entry of their own, at the end."""
    if node.count > 1:
        cluster.nodes.add().CopyFrom(node)
        cluster.nodes[-1].count = node.count - 1
        node.count = 1
