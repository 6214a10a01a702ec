"""What the search is given: nodes, their order, and what each costs on how many devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from m2flow.sched._table import Floats, Grid, Rows


@dataclass(frozen=True)
class Pins:
    """Groups with several nodes: their units, which of them overlap, and which are offloaded.

    Args:
        units: By group.
        clusters: A partition of the groups: devices of two groups of one cluster overlap, else they are disjoint.
        offloaded: The groups that give their memory back between turns.
    """

    units: Mapping[str, int] = field(default_factory=dict)
    clusters: tuple[frozenset[str], ...] = ()
    offloaded: frozenset[str] = frozenset()


NO_PINS = Pins()


class Leaves(Protocol):
    """Costs of single nodes."""

    def __call__(self, node: int, chunked: bool, beside: int, pins: Pins) -> Rows:
        """Rows of `node` beside the nodes of the mask, with some groups pinned to a number of units.

        For the whole iteration at once, or, `chunked`, for every chunk count of the problem, at its level.
        """
        ...


@dataclass(frozen=True)
class Problem:
    """A search problem; sets of nodes are bit masks.

    Args:
        names: Of the nodes, in a topological order.
        groups: Of each node, its groups' names.
        before: Of each node, the mask of its direct predecessors.
        barriers: Pairs of masks (one bit each) that no pipeline may hold together.
        grid: The devices.
        chunk_counts: Chunks that a pipeline may have, 1 left out.
        leaves: Costs.
        tails: By node, for each chunk count K the [K] fractions of its time after which chunk 1..K is out.
        disturbs: Of each node, the mask of nodes that slow it down when they run beside it.
        sync_s: Seconds of weight publication at the end of an iteration.
        max_staleness: Iterations that may start before their predecessor's weights are there.
        quanta: Devices in a unit, by kind.
        kind_of: The kind of device of each group, by index; 0 for those that are not named.
        light: Groups whose sharing does not count when a plan is called spatial: the least work, where there are more
            groups than device units.
        sizes: By group that runs several nodes, the numbers of units that differ for it.
        near: Pins of a good plan of a problem much like this one; the search begins with them.
        unlimited: Whether everything fits beside everything, so that nothing is ever offloaded.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    before: tuple[int, ...]
    barriers: tuple[tuple[int, int], ...]
    grid: Grid
    chunk_counts: tuple[int, ...]
    leaves: Leaves
    tails: Mapping[int, Mapping[int, Floats]] = field(default_factory=dict)
    disturbs: tuple[int, ...] = ()
    sync_s: float = 0.0
    max_staleness: int = 0
    quanta: tuple[int, ...] = (1,)
    kind_of: Mapping[str, int] = field(default_factory=dict)
    light: frozenset[str] = frozenset()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    near: Pins | None = None
    unlimited: bool = False

    @cached_property
    def everything(self) -> int:
        return (1 << len(self.names)) - 1

    @cached_property
    def kinds(self) -> int:
        return len(self.grid.shape)

    def members(self, nodes: int) -> list[int]:
        return [i for i in range(len(self.names)) if nodes >> i & 1]

    @cached_property
    def _groups_of(self) -> dict[int, frozenset[str]]:
        return {}

    def groups_of(self, nodes: int) -> frozenset[str]:
        known = self._groups_of.get(nodes)
        if known is None:
            known = self._groups_of[nodes] = frozenset(g for i in self.members(nodes) for g in self.groups[i])
        return known

    def meet(self, part: frozenset[str], rest: frozenset[str]) -> bool:
        """Whether a group of one side could share a device with one of the other: they use one kind of device."""
        kinds = {self.kind_of.get(g, 0) for g in part}
        return any(self.kind_of.get(g, 0) in kinds for g in rest)

    def relevant(self, nodes: int, beside: int) -> int:
        """The part of `beside` that slows any of `nodes`."""
        if not self.disturbs:
            return 0
        mask = 0
        for i in self.members(nodes):
            mask |= self.disturbs[i]
        return mask & beside & ~nodes

    def pipelined(self, nodes: int) -> bool:
        """Whether a pipeline may hold these nodes together."""
        return not any(nodes & a and nodes & b for a, b in self.barriers)


def downsets(nodes: int, before: tuple[int, ...]) -> list[int]:
    """Every non-empty subset of `nodes` that holds, with a node, its predecessors among `nodes`; smallest first."""
    return [chosen for layer in downsets_by_size(nodes, before) for chosen in layer]


def downsets_by_size(nodes: int, before: tuple[int, ...]) -> Iterator[list[int]]:
    """The down-sets of one node, of two, and so on; of many nodes that nothing joins there are very many."""
    members = [i for i in range(len(before)) if nodes >> i & 1]
    layer = {0}
    for _ in members:
        layer = {
            chosen | 1 << i
            for chosen in layer
            for i in members
            if not chosen >> i & 1 and before[i] & nodes & ~chosen == 0
        }
        yield sorted(layer)


def independent(part: int, rest: int, before: tuple[int, ...]) -> bool:
    """Whether no stream joins the two sets."""
    return not any(
        (before[i] & rest if part >> i & 1 else before[i] & part if rest >> i & 1 else 0) for i in range(len(before))
    )
