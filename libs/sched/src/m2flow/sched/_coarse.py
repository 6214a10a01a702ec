"""Large graphs: neighbours that take turns are put into blocks, and the graph of blocks is searched exactly.

Blocks are runs of a topological order, of about equal work; several orders and numbers of blocks are tried. What is
found is a plan of the full space, not always its best: `_bound.lower_bound` says how far it can be from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from m2flow.sched._problem import Problem, downsets
from m2flow.sched._table import Ints, Rows
from m2flow.sched._tree import Leaf, Tree, Turns

_EXACT_NODES = 5
_EXACT_DOWNSETS = 8
_BLOCKS = (3, 4)


def is_large(problem: Problem) -> bool:
    """Whether the exact search would take long: more than five nodes, unless they hang together like a chain."""
    return len(problem.names) > _EXACT_NODES and len(downsets(problem.everything, problem.before)) > _EXACT_DOWNSETS


@dataclass(frozen=True)
class Contraction:
    """A problem of blocks, and the way back."""

    fine: Problem
    blocks: tuple[tuple[int, ...], ...]
    problem: Problem

    def expand(self, tree: Tree) -> Tree:
        """The plan with every block's nodes in turns."""
        if not isinstance(tree, Leaf):
            parts = [self.expand(p) for p in tree.parts]
            if isinstance(tree, Turns):
                parts = [q for p in parts for q in (p.parts if isinstance(p, Turns) else (p,))]
            return replace(tree, parts=tuple(parts))
        block = self.blocks[tree.node]
        level = self.fine.chunk_counts.index(tree.chunks) if tree.chunks > 1 else -1
        if len(block) == 1:
            return replace(tree, node=block[0], name=self.fine.names[block[0]])
        inner = bool(tree.devices[-1])
        return Turns(tuple(self._member(i, tree, level, inner) for i in block), tree.units)

    def _member(self, node: int, tree: Leaf, level: int, inner: bool) -> Leaf:
        rows = self.fine.leaves(node, level >= 0, 0, {})
        every = self.fine.grid.size * max(1, len(self.fine.chunk_counts))
        row = int(row_of_code(rows, every)[tree.units + max(level, 0) * self.fine.grid.size])
        return Leaf(
            node=node,
            name=self.fine.names[node],
            devices=tuple(int(p) for p in rows.picks[row]),
            batches=0,
            offloaded=inner or tree.offloaded,
            chunks=tree.chunks,
            chunk_s=float(rows.seconds[row]),
            switch_s=rows.switch_s,
            units=tree.units,
        )


def orders(problem: Problem) -> list[list[int]]:
    """Topological orders of the nodes: level by level, and branch by branch."""
    return [list(range(len(problem.names))), depth_first(problem)]


def contractions(problem: Problem) -> Iterator[Contraction]:
    """Blockings that are worth a search, different ones only."""
    seen = set()
    for order in orders(problem):
        for count in _BLOCKS:
            blocks = _balanced(problem, order, count)
            if blocks not in seen:
                seen.add(blocks)
                yield Contraction(problem, blocks, _contract(problem, blocks))


def depth_first(problem: Problem) -> list[int]:
    """A topological order that follows one branch to its end before the next."""
    order: list[int] = []
    left = set(range(len(problem.names)))
    while left:
        ready = [i for i in left if not problem.before[i] & sum(1 << j for j in left)]
        last = order[-1] if order else -1
        follows = [i for i in ready if last >= 0 and problem.before[i] >> last & 1]
        chosen = min(follows or ready)
        order.append(chosen)
        left.remove(chosen)
    return order


def _balanced(problem: Problem, order: list[int], count: int) -> tuple[tuple[int, ...], ...]:
    """The order cut into `count` runs of about equal work; cycles and barriers stand alone."""
    work = {i: _least(problem, i) for i in order}
    blocks: list[tuple[int, ...]] = []
    share, held = sum(work.values()) / count, 0.0
    current: list[int] = []
    walled = {i for a, b in problem.barriers for i in problem.members(a | b)}
    for node in order:
        single = len(problem.groups[node]) > 1 or node in problem.tails or node in walled
        if current and (single or (len(blocks) < count - 1 and held + work[node] / 2 > share)):
            blocks.append(tuple(current))
            current, held = [], 0.0
        current.append(node)
        held += work[node]
        if single:
            blocks.append(tuple(current))
            current, held = [], 0.0
    return tuple(blocks + ([tuple(current)] if current else []))


def _least(problem: Problem, node: int) -> float:
    rows = problem.leaves(node, False, 0, {})
    return float(rows.seconds.min()) if len(rows.n) else 0.0


def _contract(problem: Problem, blocks: tuple[tuple[int, ...], ...]) -> Problem:
    home = {node: b for b, block in enumerate(blocks) for node in block}

    def masks(nodes: int) -> int:
        return sum({1 << home[i] for i in problem.members(nodes)})

    before = []
    for b, block in enumerate(blocks):
        mask = 0
        for node in block:
            mask |= masks(problem.before[node])
        before.append(mask & ~(1 << b))
    return replace(
        problem,
        names=tuple("+".join(problem.names[i] for i in block) for block in blocks),
        groups=tuple(tuple(dict.fromkeys(g for i in block for g in problem.groups[i])) for block in blocks),
        before=tuple(before),
        barriers=tuple((masks(a), masks(b)) for a, b in problem.barriers),
        leaves=BlockLeaves(problem, blocks),
        tails={home[i]: t for i, t in problem.tails.items()},
        disturbs=(),
    )


class BlockLeaves:
    """`Leaves` of blocks: members in turns on the same devices, resident together, or else offloaded each turn."""

    def __init__(self, problem: Problem, blocks: tuple[tuple[int, ...], ...]) -> None:
        self._problem, self._blocks = problem, blocks
        self._cache: dict[tuple[int, bool], Rows] = {}

    def __call__(self, node: int, chunked: bool, beside: int, pins: Mapping[str, int]) -> Rows:
        block = self._blocks[node]
        if len(block) == 1:
            return self._problem.leaves(block[0], chunked, 0, pins)
        if (node, chunked) not in self._cache:
            self._cache[node, chunked] = self._rows(block, chunked)
        return self._cache[node, chunked]

    def _rows(self, block: tuple[int, ...], chunked: bool) -> Rows:
        members = [self._problem.leaves(i, chunked, 0, {}) for i in block]
        size = self._problem.grid.size * (len(self._problem.chunk_counts) if chunked else 1)
        picks = [row_of_code(m, size) for m in members]
        codes = np.flatnonzero(np.all([p >= 0 for p in picks], axis=0))
        chosen = [p[codes] for p in picks]
        seconds = np.sum([m.seconds[p] for m, p in zip(members, chosen, strict=True)], axis=0)
        keeps, offs, runs = ([getattr(m, name)[p] for m, p in zip(members, chosen, strict=True)] for name in
                             ("keep", "off", "run"))  # fmt: skip
        keep, off = np.sum(keeps, axis=0), np.sum(offs, axis=0)
        together = np.max([keep + np.maximum(r - k, 0) for r, k in zip(runs, keeps, strict=True)], axis=0)
        apart = np.max([off + np.maximum(r - o, 0) for r, o in zip(runs, offs, strict=True)], axis=0)
        inner = (together > 1 + 1e-9).any(axis=1) & all(m.can_offload for m in members)
        switch_s = sum(m.switch_s[0] for m in members), sum(m.switch_s[1] for m in members)
        return Rows(
            n=codes,
            seconds=seconds + np.where(inner, sum(switch_s), 0.0),
            switch_s=switch_s,
            keep=np.where(inner[:, None], off, keep),
            off=off,
            run=np.where(inner[:, None], apart, together),
            can_offload=all(m.can_offload for m in members),
            picks=np.stack([*(m.picks[p][:, 0] for m, p in zip(members, chosen, strict=True)), inner], axis=1),
            batches=np.zeros(len(codes), dtype=np.int64),
        )


def row_of_code(rows: Rows, size: int) -> Ints:
    """[size] the fastest row of each code; -1 where there is none."""
    found = np.full(size, -1, dtype=np.int64)
    order = np.lexsort((-rows.seconds, rows.n))  # the fastest last, so that it stays
    found[rows.n[order]] = order
    return found
