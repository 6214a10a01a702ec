"""The devices of a cluster spec by kind, with the global ids that plans name."""

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.errors import InputError

MOST_DEVICES = 1 << 17
_FIGURES = "memory_bytes", "flops_per_s", "memory_bytes_per_s"


@dataclass(frozen=True)
class Pool:
    """All devices of one kind; `spec` has the least of each figure that they have."""

    kind: str
    ids: tuple[int, ...]
    spec: sched_pb2.DeviceSpec

    def changed(self, *, count: int | None = None, memory: float = 1.0) -> "Pool":
        """What-if: with `count` devices, the first ones or new ones besides, of `memory` times the bytes."""
        wanted = len(self.ids) if count is None else count
        new = range(self.ids[-1] + 1, self.ids[-1] + 1 + max(0, wanted - len(self.ids)))
        spec = sched_pb2.DeviceSpec()
        spec.CopyFrom(self.spec)
        spec.memory_bytes *= memory
        return Pool(self.kind, (*self.ids[:wanted], *new), spec)


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
            for spec in (listed for listed in node.devices if listed.count):
                ids.setdefault(spec.kind, []).extend(range(following, following + spec.count))
                following += spec.count
                specs[spec.kind] = _least(specs[spec.kind], spec) if spec.kind in specs else spec
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


def links(cluster: sched_pb2.ClusterSpec) -> tuple[float, float]:
    """Bytes a second and latency of a message between any two devices: of the slowest way; 0 where nothing is said."""
    if sum(max(node.count, 1) for node in cluster.nodes) > 1:
        return cluster.network_bytes_per_s, cluster.network_latency_s
    return min((node.link_bytes_per_s for node in cluster.nodes), default=0.0), 0.0


def mixed(cluster: sched_pb2.ClusterSpec) -> list[str]:
    """Kinds whose devices differ in what they can do."""
    found: dict[str, set[tuple[float, ...]]] = {}
    for node in cluster.nodes:
        for spec in node.devices:
            found.setdefault(spec.kind, set()).add(tuple(getattr(spec, name) for name in _FIGURES))
    return [kind for kind, figures in found.items() if len(figures) > 1]


def _least(one: sched_pb2.DeviceSpec, other: sched_pb2.DeviceSpec) -> sched_pb2.DeviceSpec:
    """The least of each figure; one that is not given is not known to be less."""
    least = sched_pb2.DeviceSpec()
    least.CopyFrom(one)
    for name in _FIGURES:
        given = [value for value in (getattr(one, name), getattr(other, name)) if value]
        setattr(least, name, min(given, default=0.0))
    return least
