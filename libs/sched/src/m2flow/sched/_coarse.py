"""Large graphs: neighbours that take turns are put into blocks, and the graph of blocks is searched exactly.

Blocks are runs of a topological order, of about equal work; several orders and numbers of blocks are tried. What is
found is a plan of the full space, not always its best: `_bound.lower_bound` says how far it can be from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product

import numpy as np

from m2flow.sched._problem import NO_PINS, Pins, Problem, downsets_by_size
from m2flow.sched._table import Floats, Ints, Rows
from m2flow.sched._tree import Leaf, Tree, Turns

_EXACT_NODES = 5
_EXACT_DOWNSETS = 8
_BLOCKS = (3, 4)
_MOST_BLOCKS = 6  # where the ends of barriers stand alone


def is_large(problem: Problem) -> bool:
    """Whether the exact search would take long: more than five nodes, unless they hang together like a chain."""
    if len(problem.names) <= _EXACT_NODES:
        return False
    sizes = accumulate(len(layer) for layer in downsets_by_size(problem.everything, problem.before))
    return any(count > _EXACT_DOWNSETS for count in sizes)


@dataclass(frozen=True)
class Contraction:
    """A problem of blocks, and the way back."""

    fine: Problem
    blocks: tuple[tuple[int, ...], ...]
    problem: Problem

    def expand(self, tree: Tree, pins: Pins) -> Tree:
        """The plan, found with these pins, with every block's nodes in turns."""
        if not isinstance(tree, Leaf):
            parts = [self.expand(p, pins) for p in tree.parts]
            if isinstance(tree, Turns):
                parts = [q for p in parts for q in (p.parts if isinstance(p, Turns) else (p,))]
            return replace(tree, parts=tuple(parts))
        block = self.blocks[tree.node]
        level = self.fine.chunk_counts.index(tree.chunks) if tree.chunks > 1 else -1
        if len(block) == 1:
            return replace(tree, node=block[0], name=self.fine.names[block[0]])
        leave = bool(tree.devices[-1])
        return Turns(tuple(self._member(i, tree, level, leave, pins) for i in block), tree.units)

    def _member(self, node: int, tree: Leaf, level: int, leave: bool, pins: Pins) -> Leaf:
        rows = self.fine.leaves(node, level >= 0, 0, pins)
        every = self.fine.grid.size * max(1, len(self.fine.chunk_counts))
        row = int(row_of_code(rows, every)[tree.units + max(level, 0) * self.fine.grid.size])
        name, away = self.fine.names[node], _away(self.fine.groups[node][0], rows, leave, pins)
        return Leaf.of(rows, row, node=node, name=name, offloaded=away, chunks=tree.chunks, units=tree.units)


def orders(problem: Problem) -> list[list[int]]:
    """Topological orders of the nodes: level by level, and branch by branch."""
    return [list(range(len(problem.names))), depth_first(problem)]


def contractions(problem: Problem) -> Iterator[Contraction]:
    """Blockings that are worth a search, different ones only."""
    seen = set()
    for order in orders(problem):
        for count, walled in product(_BLOCKS, (False, True)):
            blocks = _balanced(problem, order, count, walled)
            if blocks not in seen and not (walled and len(blocks) > _MOST_BLOCKS):
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


def _balanced(problem: Problem, order: list[int], count: int, walled: bool) -> tuple[tuple[int, ...], ...]:
    """The order cut into `count` runs of about equal work; cycles, long tails and, if asked, the ends of barriers stand
    alone."""
    work = {i: _least(problem, i) for i in order}
    blocks: list[tuple[int, ...]] = []
    share, held = sum(work.values()) / count, 0.0
    current: list[int] = []
    walls = {i for a, b in problem.barriers for i in problem.members(a | b)} if walled else set()
    for node in order:
        single = len(problem.groups[node]) > 1 or node in problem.tails or node in walls
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
    rows = problem.leaves(node, False, 0, NO_PINS)
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
    """`Leaves` of blocks: members in turns on the same devices, all resident, or all that can offloaded after their
    turn, which is in the block's seconds.

    What a group with nodes in several blocks holds while idle counts in each of them: too much, never too little.
    """

    def __init__(self, problem: Problem, blocks: tuple[tuple[int, ...], ...]) -> None:
        self._problem, self._blocks = problem, blocks
        self._cache: dict[tuple[int, bool, tuple[tuple[str, int, bool], ...]], Rows] = {}

    def __call__(self, node: int, chunked: bool, beside: int, pins: Pins) -> Rows:
        block = self._blocks[node]
        if len(block) == 1:
            return self._problem.leaves(block[0], chunked, 0, pins)
        groups = dict.fromkeys(g for i in block for g in self._problem.groups[i] if g in pins.units)
        key = node, chunked, tuple((g, pins.units[g], g in pins.offloaded) for g in groups)
        if key not in self._cache:
            self._cache[key] = self._rows(block, chunked, pins)
        return self._cache[key]

    def _rows(self, block: tuple[int, ...], chunked: bool, pins: Pins) -> Rows:
        members = [self._problem.leaves(i, chunked, 0, pins) for i in block]
        groups = [self._problem.groups[i][0] for i in block]
        size = self._problem.grid.size * (len(self._problem.chunk_counts) if chunked else 1)
        picks = [row_of_code(m, size) for m in members]
        codes = np.flatnonzero(np.all([p >= 0 for p in picks], axis=0))
        chosen = [p[codes] for p in picks]
        seconds = np.sum([m.seconds[p] for m, p in zip(members, chosen, strict=True)], axis=0)
        devices = np.stack([m.picks[p][:, 0] for m, p in zip(members, chosen, strict=True)], axis=1)
        pinned = [m for g, m in zip(groups, members, strict=True) if g in pins.units]
        found = []
        for leave in dict.fromkeys((False, not self._problem.unlimited and any(m.can_offload for m in members))):
            away = [_away(g, m, leave, pins) for g, m in zip(groups, members, strict=True)]
            idle = [(m.off if out else m.keep)[p] for m, p, out in zip(members, chosen, away, strict=True)]
            rest, most = _held(groups, idle, [m.run[p] for m, p in zip(members, chosen, strict=True)])
            switch_s = sum(sum(m.switch_s) for m, out in zip(members, away, strict=True) if out)
            flags = np.full((len(codes), 1), leave)
            found.append((codes, seconds + switch_s, rest, most, np.concatenate([devices, flags], axis=1)))
        n, seconds, rest, most, devices = (np.concatenate(columns) for columns in zip(*found, strict=True))
        fits = (most <= 1 + 1e-9).all(axis=1)
        order = np.flatnonzero(fits)[np.argsort(n[fits], kind="stable")]
        return Rows(
            n=n[order],
            seconds=seconds[order],
            switch_s=(0.0, 0.0),
            keep=rest[order],
            off=rest[order],
            run=most[order],
            can_offload=bool(pinned) and all(m.can_offload for m in pinned),
            picks=devices[order],
            batches=np.zeros(len(order), dtype=np.int64),
        )


def _away(group: str, rows: Rows, leave: bool, pins: Pins) -> bool:
    """Whether a group's member of a block is offloaded after its turn, in a block whose members leave if they can."""
    return group in pins.offloaded if group in pins.units else leave and rows.can_offload


def _held(groups: list[str], idle: list[Floats], run: list[Floats]) -> tuple[Floats, Floats]:
    """[R, kinds] what members hold together while idle, each group once, and when the largest of them runs."""
    rest: dict[str, Floats] = {}
    for group, held in zip(groups, idle, strict=True):
        rest[group] = np.maximum(rest.get(group, held), held)
    total = np.sum(list(rest.values()), axis=0)
    more = [np.maximum(most - rest[group], 0) for group, most in zip(groups, run, strict=True)]
    return total, total + np.max(more, axis=0)


def row_of_code(rows: Rows, size: int) -> Ints:
    """[size] the fastest row of each code; -1 where there is none."""
    found = np.full(size, -1, dtype=np.int64)
    order = np.lexsort((-rows.seconds, rows.n))  # the fastest last, so that it stays
    found[rows.n[order]] = order
    return found
