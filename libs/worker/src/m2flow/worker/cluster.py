"""The devices at hand: discovered on this machine, declared by the user, or virtual.

Device ids are global: they count up over the nodes in their order, and over each node's devices in theirs.
"""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m2flow.worker.device import Device

LOCAL_NODE = "node0"


@dataclass(frozen=True)
class Cluster:
    """Some devices in the order of their ids."""

    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        got = [device.id for device in self.devices]
        if got != list(range(len(got))):
            raise ValueError(f"cluster: got device ids {got}, want 0 to {len(got) - 1} in order: use Cluster.of")

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Cluster":
        """The cluster of these devices, numbered anew in their order."""
        return cls(tuple(replace(device, id=number) for number, device in enumerate(devices)))

    @classmethod
    def local(cls, cpu_slots: int | None = None) -> "Cluster":
        """This machine: its cores in `cpu_slots` slots of equal size (None: one per core), then its CUDA devices.

        Only the cores that this process may use count. Raises ValueError on more slots than cores.
        """
        return cls.of([*_cpu_slots(cpu_slots), *_cuda_devices()])

    @classmethod
    def virtual(cls, num_devices: int, *, memory_bytes: int = 0, num_nodes: int = 1) -> "Cluster":
        """Devices that exist by name and memory size only, for synthetic workers.

        `num_devices` in all, dealt to `num_nodes` nodes evenly. Raises ValueError where they do not divide.
        """
        if num_nodes < 1 or num_devices < 1 or num_devices % num_nodes:
            raise ValueError(
                f"virtual cluster: got {num_devices} devices on {num_nodes} nodes, "
                "want a positive multiple of the nodes"
            )
        per_node = num_devices // num_nodes
        return cls(
            tuple(
                Device(number, f"node{number // per_node}", "virtual", number % per_node, memory_bytes)
                for number in range(num_devices)
            )
        )

    @classmethod
    def from_nodes(cls, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Cluster":
        """The cluster of what was found on each node: kind, memory_bytes, labels and cores of its devices, in order."""
        devices = []
        for node, rows in found.items():
            counts: Counter[str] = Counter()
            for row in rows:
                kind = row["kind"]
                labels, cores = dict(row["labels"]), tuple(row["cores"])
                devices.append(Device(0, node, kind, counts[kind], row["memory_bytes"], labels, cores))
                counts[kind] += 1
        return cls.of(devices)

    def with_resource(
        self,
        kind: str,
        *,
        count: int = 1,
        node: str = LOCAL_NODE,
        memory_bytes: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> "Cluster":
        """This cluster and `count` devices of the user's own `kind` on `node`. Raises ValueError on a reserved kind."""
        if kind in ("cpu", "cuda", "virtual"):
            raise ValueError(f"resource: got kind {kind!r}, want a word of your own: that one is discovered")
        first = sum(device.node == node and device.kind == kind for device in self.devices)
        added = [Device(0, node, kind, first + number, memory_bytes, labels or {}) for number in range(count)]
        return Cluster.of([*self.devices, *added])

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, in order of their first device."""
        return tuple(dict.fromkeys(device.node for device in self.devices))

    def on(self, node: str) -> tuple[Device, ...]:
        """The devices of one node."""
        return tuple(device for device in self.devices if device.node == node)


def _cpu_slots(num_slots: int | None) -> list[Device]:
    cores = sorted(os.sched_getaffinity(0))
    count = len(cores) if num_slots is None else num_slots
    if not 0 <= count <= len(cores):
        raise ValueError(
            f"cpu_slots: got {count}, want 0 to {len(cores)}, the cores that this process may use: "
            'to run more ranks than cores, place several on one slot ("0*4")'
        )
    if count == 0:
        return []
    bounds = [len(cores) * number // count for number in range(count + 1)]
    memory = _host_memory_bytes() // count
    return [
        Device(0, LOCAL_NODE, "cpu", number, memory, cores=tuple(cores[bounds[number] : bounds[number + 1]]))
        for number in range(count)
    ]


def _host_memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def _cuda_devices() -> list[Device]:
    """What nvidia-smi shows, within CUDA_VISIBLE_DEVICES: no CUDA context is made to look."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode != 0:
        return []
    return _visible_cuda(answer.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible_cuda(table: str, visible: str | None) -> list[Device]:
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    if visible is not None:
        wanted = [word.strip() for word in visible.split(",") if word.strip()]
        by_name = {row[0]: row for row in rows} | {row[1]: row for row in rows}
        rows = [by_name[word] for word in wanted if word in by_name]
    devices = []
    for number, (_, uuid, model, memory) in enumerate(rows):
        memory_bytes = int(memory) << 20 if memory.isdigit() else 0  # "[N/A]": it shares the host's.
        devices.append(Device(0, LOCAL_NODE, "cuda", number, memory_bytes, {"model": model, "uuid": uuid}))
    return devices
