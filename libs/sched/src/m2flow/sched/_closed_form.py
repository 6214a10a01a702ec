"""The closed form of a plan's tree: seconds of an iteration, and when each node runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.sched._table import Floats
from m2flow.sched._tree import Apart, Beside, Leaf, Pipe, Tree, Turns

Tails = Mapping[int, Mapping[int, Floats]]


@dataclass(frozen=True)
class Interval:
    """From when to when a node is at work in an iteration, and for how long it is busy in it."""

    start_s: float
    end_s: float
    busy_s: float


def iteration_seconds(tree: Tree, tails: Tails, factors: Mapping[int, float] | None = None) -> float:
    """Seconds of one synchronous iteration, weight publication left out.

    Args:
        tails: See `Problem.tails`.
        factors: By node, what its seconds are multiplied with: what-if.
    """
    return _seconds(tree, tails, factors or {})[0]


def _seconds(tree: Tree, tails: Tails, factors: Mapping[int, float]) -> tuple[float, tuple[float, float]]:
    """Seconds, and those of onload and offload that whoever takes turns with the tree still has to add."""
    if isinstance(tree, Leaf):
        return tree.chunk_s * factors.get(tree.node, 1.0), tree.switch_s if tree.offloaded else (0.0, 0.0)
    parts = [_seconds(p, tails, factors) for p in tree.parts]
    if isinstance(tree, Turns):
        return sum(s + sum(p) for s, p in parts), (0.0, 0.0)
    onloads, offload = [p[0] for _, p in parts], max(p[1] for _, p in parts)
    if isinstance(tree, Beside):
        return max(s for s, _ in parts), (max(onloads), offload)
    pending = sum(onloads), offload
    if isinstance(tree, Apart):
        return sum(s for s, _ in parts), pending
    return _pipe_ends(tree, [s for s, _ in parts], tails)[-1], pending


def _pipe_ends(tree: Pipe, seconds: list[float], tails: Tails) -> list[float]:
    """When each layer is through with its last chunk."""
    first, count = tree.parts[0], tree.chunks
    streams = isinstance(first, Leaf) and first.streams
    ends = []
    for layer in range(len(seconds)):
        if not streams:
            ends.append(sum(seconds[: layer + 1]) + (count - 1) * max(seconds[: layer + 1]))
        elif layer == 0:
            ends.append(seconds[0])
        else:
            assert isinstance(first, Leaf)
            rest = seconds[1 : layer + 1]
            out = [seconds[0] * float(f) for f in tails[first.node][count]]
            ends.append(sum(rest) + max(a + (count - j) * max(rest) for j, a in enumerate(out, start=1)))
    return ends


def intervals(tree: Tree, tails: Tails) -> dict[int, Interval]:
    """When each node runs; of nodes that take turns within a chunk, the span of all their turns."""
    found: dict[int, Interval] = {}
    _place(tree, tails, 0.0, found)
    return found


def _place(tree: Tree, tails: Tails, start: float, found: dict[int, Interval]) -> None:
    if isinstance(tree, Leaf):
        found[tree.node] = Interval(start, start + tree.chunk_s, tree.chunk_s)
        return
    parts = [_seconds(p, tails, {}) for p in tree.parts]
    if isinstance(tree, Pipe):
        _place_pipe(tree, [s for s, _ in parts], tails, start, found)
        return
    for part, (seconds, pending) in zip(tree.parts, parts, strict=True):
        _place(part, tails, start, found)
        if isinstance(tree, Turns):
            start += seconds + sum(pending)
        elif isinstance(tree, Apart):
            start += seconds


def chunk_starts(pipe: Pipe, tails: Tails) -> tuple[dict[int, float], float]:
    """When each node begins its first chunk, and the period after which it begins the next one."""
    found: dict[int, Interval] = {}
    start, period = 0.0, 0.0
    for part in pipe.parts:
        _place(part, tails, start, found)
        seconds = _seconds(part, tails, {})[0]
        if isinstance(part, Leaf) and part.streams:
            start += seconds * float(tails[part.node][pipe.chunks][0])
        else:
            start, period = start + seconds, max(period, seconds)
    return {node: one.start_s for node, one in found.items()}, period


def _place_pipe(tree: Pipe, seconds: list[float], tails: Tails, start: float, found: dict[int, Interval]) -> None:
    ends = _pipe_ends(tree, seconds, tails)
    begin = start
    for layer, part in enumerate(tree.parts):
        streams = isinstance(part, Leaf) and part.streams
        inner: dict[int, Interval] = {}
        _place(part, tails, begin, inner)
        repeats = 1 if streams else tree.chunks
        shift = start + ends[layer] - (begin + seconds[layer])  # from the first chunk's end to the last one's
        for node, one in inner.items():
            found[node] = Interval(one.start_s, one.end_s + (0.0 if streams else shift), one.busy_s * repeats)
        if streams and isinstance(part, Leaf):
            begin += seconds[0] * float(tails[part.node][tree.chunks][0])
        else:
            begin += seconds[layer]
