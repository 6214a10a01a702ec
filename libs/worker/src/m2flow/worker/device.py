"""A place where work runs: a core slot, an accelerator, or a resource that the user declares."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One device.

    `id` is unique over nodes, `index` counts the devices of one kind on one node. `kind` is "cpu", "cuda", "virtual"
    or the user's own ("robot"); `cores` is the core set of a "cpu" slot; `memory_bytes` is 0 where it is not known.
    """

    id: int
    node: str
    kind: str
    index: int
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Its name on its node, such as "cpu:0"."""
        return f"{self.kind}:{self.index}"

    def has_label(self, word: str) -> bool:
        """Whether `word` is its kind, or a key or a value of its labels."""
        return word == self.kind or word in self.labels or word in self.labels.values()
