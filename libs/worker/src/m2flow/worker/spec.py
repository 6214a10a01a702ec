"""A group before it exists: what it is made of and what it can be asked, so that planning needs no device."""

import re
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, Literal

# What the runtime itself calls; not for callers of a group.
_RESERVED = frozenset({"setup", "close", "group", "context", "config", "on_death", "in_step", "shards", "load_shards"})


@dataclass(frozen=True)
class GroupSpec:
    """A group of workers of one class. Nothing of it runs.

    `target` names the class as "module:qualname". `methods` are all public methods, `stages` those marked as such.
    """

    name: str
    target: str
    config: Any
    methods: tuple[str, ...]
    stages: tuple[str, ...]
    device_kind: str = "cpu"
    devices_per_rank: int | None = 1
    ranks_per_process: int = 1
    min_devices: int = 1
    max_devices: int = 0
    can_offload: bool = False
    in_step: bool = False
    on_death: Literal["retry", "drop", "stop"] = "stop"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"group name: got {self.name!r}, want small letters, digits and underscores")
        if self.devices_per_rank is not None and self.devices_per_rank < 1:
            raise ValueError(
                f"group {self.name}: got devices_per_rank={self.devices_per_rank}, want at least 1, or None for all"
            )
        if self.ranks_per_process < 1:
            raise ValueError(f"group {self.name}: got ranks_per_process={self.ranks_per_process}, want at least 1")
        if self.ranks_per_process > 1 and self.device_kind == "cuda":
            raise ValueError(
                f"group {self.name}: got ranks_per_process={self.ranks_per_process} on 'cuda', want 1: "
                "a process sees the CUDA devices of one rank"
            )
        if self.min_devices < 1 or (self.max_devices and self.max_devices < self.min_devices):
            raise ValueError(
                f"group {self.name}: got {self.min_devices} to {self.max_devices} devices, want 1 <= min <= max"
            )


def method_names(worker: type) -> tuple[str, ...]:
    """The public methods of a worker class, without those that only the runtime calls."""
    names = (name for name in dir(worker) if not name.startswith("_") and name not in _RESERVED)
    return tuple(name for name in names if callable(getattr_static(worker, name)))


def group_name(class_name: str) -> str:
    """A class's name in snake case, without "worker"."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name.lstrip("_")).lower()
    return words.removesuffix("_worker") or words
