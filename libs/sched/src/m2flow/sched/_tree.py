"""A plan as a tree: who takes turns, who runs side by side, and in how many chunks.

Turns    parts one after the other on the same devices: the sum of their seconds, and of their switching
Pipe     parts in layers on disjoint devices, K chunks: the sum of the chunk seconds + (K - 1) x the slowest;
         behind a long-tailed first part, whose chunk j is out at A(j): max_j A(j) + fill + (K - j) x slowest
Beside   parts that no stream joins, at once on disjoint devices: the largest of their seconds
Apart    parts one after the other on disjoint devices, where a barrier forbids a pipeline: the sum
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from m2flow.sched._table import Grid, Rows, Table


@dataclass(frozen=True)
class Leaf:
    """One node. `devices` of each of its groups; `chunk_s` seconds of one of `chunks` chunks."""

    node: int
    name: str
    devices: tuple[int, ...]
    batches: int
    offloaded: bool
    chunks: int
    chunk_s: float
    switch_s: tuple[float, float]
    units: int
    streams: bool = False

    @classmethod
    def of(cls, rows: Rows, row: int, *, node: int, name: str, offloaded: bool, chunks: int, units: int) -> "Leaf":
        """One way to run a node: a row of its costs."""
        return cls(
            node=node,
            name=name,
            devices=tuple(int(p) for p in rows.picks[row]),
            batches=int(rows.batches[row]),
            offloaded=offloaded,
            chunks=chunks,
            chunk_s=float(rows.seconds[row]),
            switch_s=rows.switch_s,
            units=units,
        )


@dataclass(frozen=True)
class Turns:
    parts: tuple["Tree", ...]
    units: int


@dataclass(frozen=True)
class Pipe:
    parts: tuple["Tree", ...]
    chunks: int
    units: int


@dataclass(frozen=True)
class Beside:
    parts: tuple["Tree", ...]
    units: int


@dataclass(frozen=True)
class Apart:
    parts: tuple["Tree", ...]
    units: int


Tree = Leaf | Turns | Pipe | Beside | Apart
_KINDS: dict[str, type[Turns] | type[Beside] | type[Apart]] = {"turns": Turns, "beside": Beside, "apart": Apart}
_SIGN = {Turns: " ; ", Pipe: " | ", Beside: " & ", Apart: " / "}


def leaves(tree: Tree) -> Iterator[Leaf]:
    """The leaves in the order of their turns."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        for part in tree.parts:
            yield from leaves(part)


def walk(tree: Tree) -> Iterator[Tree]:
    """The tree and all its parts, the parts' parts included."""
    yield tree
    if not isinstance(tree, Leaf):
        for part in tree.parts:
            yield from walk(part)


def shape(tree: Tree) -> str:
    """ "(rollout | (reward ; actor)) x8": turns `;`, pipeline `|` with its chunks, side by side `&`, apart `/`."""
    if isinstance(tree, Leaf):
        return tree.name
    inner = _SIGN[type(tree)].join(shape(p) for p in tree.parts)
    return f"({inner}) x{tree.chunks}" if isinstance(tree, Pipe) else f"({inner})"


class Reader:
    """Reads plans back from tables.

    Args:
        names: Of the nodes.
        grid: The devices.
        chunk_counts: By level.
    """

    def __init__(self, names: tuple[str, ...], grid: Grid, chunk_counts: tuple[int, ...]) -> None:
        self._names, self._size, self._chunk_counts = names, grid.size, chunk_counts

    def read(self, table: Table, row: int, level: int = -1) -> Tree:
        """The plan of one row; `level` is the index of the chunk count that it runs at, -1 for a whole iteration."""
        block = table.blocks[int(table.block[row])]
        first, second = int(table.left[row]), int(table.right[row])
        units = int(table.n[row]) % self._size
        if block.op == "leaf":
            assert block.rows is not None
            chunks = self._chunk_counts[level] if level >= 0 else 1
            name, offloaded = self._names[block.node], bool(second)
            return Leaf.of(
                block.rows, first, node=block.node, name=name, offloaded=offloaded, chunks=chunks, units=units
            )
        if block.op == "layers":
            return replace(self._pipe(block.tables[0], first), units=units)
        parts = self.read(block.tables[0], first, level), self.read(block.tables[1], second, level)
        kind = _KINDS[block.op]
        flat: list[Tree] = []
        for part in parts:
            flat += part.parts if isinstance(part, kind) else [part]
        return kind(tuple(flat), units)

    def _pipe(self, table: Table, row: int) -> Pipe:
        parts: list[Tree] = []
        level = int(table.n[row]) // self._size
        while True:
            inner = table.blocks[int(table.block[row])]
            first, second = int(table.left[row]), int(table.right[row])
            if inner.op == "prefix":
                parts.insert(0, self.read(inner.tables[1], second, level))
                table, row = inner.tables[0], first
                continue
            head = self.read(inner.tables[0], first, -1 if inner.op == "head" else level)
            parts.insert(0, replace(head, streams=True) if inner.op == "head" and isinstance(head, Leaf) else head)
            return Pipe(tuple(parts), self._chunk_counts[level], 0)
