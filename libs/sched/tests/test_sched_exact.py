"""The search against exhaustive search, on random graphs.

The oracle below works on plain dictionaries, enumerates every plan that the README's plan space holds, and imports
nothing from the package; it only drops partial plans that are as bad in every respect. 1,000 graphs with
M2FLOW_PROOFS=1, a fixed slice of them otherwise.
"""

import itertools
import math
import os
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import plan
from m2flow.sched._bound import lower_bound
from m2flow.sched._build import build
from m2flow.sched._placement import execution_plan
from m2flow.sched._plans import best_plans
from m2flow.sched._tree import Beside, Pipe, Tree, Turns, shape, walk
from m2flow.sched.simulation import run_plan

NUM_GRAPHS = 1000 if os.environ.get("M2FLOW_PROOFS") == "1" else 40
Spec = dict[str, Any]
INF = math.inf


# ---- random inputs -------------------------------------------------------------------------------------------------


def random_spec(seed: int) -> Spec:
    """A random graph with its costs: chains, branches, joins, cycles, barriers, repeated groups, tails, memory.

    Up to 5 stages and 16 devices, in units of 2 or 3 where there are more than 12 for 4 stages or 9 for 5: the oracle's
    time grows steeply with the units, and with two groups that run two stages each it has 4 at most.
    """
    rng = random.Random(seed)
    stages = rng.choice([1, 2, 3, 3, 4, 4, 5])
    names = [f"s{i}" for i in range(stages)]
    edges = {(i, j) for j in range(1, stages) for i in range(j) if rng.random() < 0.45}
    edges |= {(j - 1, j) for j in range(1, stages) if rng.random() < 0.5}
    groups = list(range(stages))
    if stages > 2 and rng.random() < 0.3:  # one group runs two stages, or each of two does
        groups[stages - 1] = rng.choice(range(stages - 1))
        if stages > 3 and groups[stages - 1] < 2 and rng.random() < 0.5:
            groups[stages - 2] = 1 - groups[stages - 1]
    cycle: tuple[tuple[int, ...], int] | None = None
    if stages > 1 and rng.random() < 0.3 and len(set(groups)) == stages:
        length = min(rng.choice([2, 2, 3]), stages)
        first = rng.randrange(stages - length + 1)
        inside = tuple(range(first, first + length))
        edges |= set(itertools.pairwise(inside))
        if _convex(edges, set(inside)):
            cycle = inside, rng.choice([1, 2, 5])
    inside = cycle[0] if cycle else ()
    free = [e for e in sorted(edges) if not set(e) <= set(inside)]
    barriers = {e for e in free if rng.random() < 0.15}
    second_kind = rng.random() < 0.2 and len(set(groups)) == stages and not cycle
    mode = rng.choice(["", "", "", "temporal", "spatial", "hybrid"])
    fewest = len(set(groups)) if mode in ("spatial", "hybrid") else 1
    twice = sum(groups.count(g) > 1 for g in set(groups)) > 1
    most = 4 if twice else {1: 16, 2: 16, 3: 16, 4: 12, 5: 9}[stages]
    units = rng.randint(fewest, max(fewest, most))
    quantum = 1 if second_kind else rng.choice([q for q in (1, 2, 3) if units * q <= 16])
    limited = rng.random() < 0.6
    spec: Spec = {
        "stages": names,
        "group_of": [f"g{g}" for g in groups],
        "edges": edges,
        "barriers": barriers,
        "cycle": cycle,
        "quantum": quantum,
        "units": [min(16, units * quantum + rng.randrange(quantum)), rng.randint(1, 3) if second_kind else 0],
        "kind_of": {f"g{g}": int(second_kind and rng.random() < 0.4) for g in groups},
        "costs": [(rng.choice([0, 0.2, 1.0]), rng.uniform(0.2, 8), rng.choice([0, 0.3])) for _ in names],
        "items": rng.choice([4, 8, 12]),
        "latency": rng.choice([0, 0.05]),
        "item_bytes": {e: rng.choice([0, 50, 400]) for e in sorted(edges)},
        "bytes_per_s": rng.choice([0, 1000]),
        "mode": mode,
        "staleness": rng.choice([0, 0, 0, 1, 2]),
        "sync": rng.choice([0, 0.5]),
        "switch": {f"g{g}": (rng.uniform(0, 1), rng.uniform(0, 1)) if limited else None for g in groups},
        "held": {f"g{g}": (rng.randint(10, 90), rng.randint(0, 8)) for g in groups},
        "can_offload": {f"g{g}": rng.random() < 0.8 for g in groups},
        "per_rank": {f"g{g}": rng.choice([1, 1, 1, 2]) if most > 4 else 1 for g in groups},
        "limits": {f"g{g}": rng.choice([(0, 0), (0, 0), (2, 0), (0, 3), (2, 5)]) for g in groups},
        "corun": {},
        "tails": {},
    }
    if not any(spec["kind_of"].values()) or all(spec["kind_of"].values()):
        spec["units"][1], spec["kind_of"] = 0, dict.fromkeys(spec["kind_of"], 0)
    for _, consumer in barriers:  # it has one rank, which has to be enough
        group = f"g{groups[consumer]}"
        spec["per_rank"][group] = max(spec["per_rank"][group], spec["limits"][group][0])
    if rng.random() < 0.3 and stages > 1:
        a, b = rng.sample(range(stages), 2)
        spec["corun"][names[a], names[b]] = rng.uniform(1.1, 2)
    heads = [i for i in range(stages) if not any(e[1] == i for e in edges) and i not in inside]
    if heads and rng.random() < 0.4:
        spec["tails"][rng.choice(heads)] = ([0.3, 0.5, 1.0], [0.5, 0.9, 1.0])
    return spec


def _convex(edges: set[tuple[int, int]], inside: set[int]) -> bool:
    """Whether no path leaves the stages and comes back."""
    left, grown = {b for a, b in edges if a in inside and b not in inside}, True
    while grown:
        new = {b for a, b in edges if a in left} - left
        left, grown = left | new, bool(new)
    return not left & inside


def as_request(spec: Spec) -> sched_pb2.PlanRequest:
    """The spec in messages: enough samples that the fitted curves are the spec's formulas."""
    graph = flow_pb2.WorkflowGraph(name="random", source_items=spec["items"])
    kind_names = ("cuda", "cpu")
    for name, group in zip(spec["stages"], spec["group_of"], strict=True):
        graph.stages.add(name=name, kind=flow_pb2.STAGE_KIND_WORK, group=group, expansion=1)
    for i, (a, b) in enumerate(sorted(spec["edges"])):
        producer = spec["stages"][a]
        if (a, b) in spec["barriers"]:
            graph.stages.add(name=f"barrier{i}", kind=flow_pb2.STAGE_KIND_BARRIER, expansion=1)
            graph.streams.add(producer=producer, consumer=f"barrier{i}")
            producer = f"barrier{i}"
        graph.streams.add(producer=producer, consumer=spec["stages"][b], item_bytes=spec["item_bytes"][a, b])
    if spec["cycle"]:
        inside, rounds = spec["cycle"]
        last, first = spec["stages"][inside[-1]], spec["stages"][inside[0]]
        graph.streams.add(producer=last, consumer=first, feedback=True, rounds=rounds)
    for group in dict.fromkeys(spec["group_of"]):
        graph.groups.add(
            name=group,
            device_kind=kind_names[spec["kind_of"][group]],
            devices_per_rank=spec["per_rank"][group],
            min_devices=spec["limits"][group][0],
            max_devices=spec["limits"][group][1],
            can_offload=spec["can_offload"][group],
        )
    last = spec["group_of"][-1]
    graph.stages.add(name="publish", kind=flow_pb2.STAGE_KIND_PUBLISH, group=last, to=spec["group_of"][0])
    profile = sched_pb2.Profile(transfer_latency_s=spec["latency"], transfer_bytes_per_s=spec["bytes_per_s"])
    profile.syncs.add(source=last, target=spec["group_of"][0], seconds=spec["sync"])
    for name, (fixed, work, serial) in zip(spec["stages"], spec["costs"], strict=True):
        for devices, items in itertools.product((1, 2, 4), (1, 2, 8)):
            seconds = fixed + work * items / devices + serial * items
            profile.samples.add(stage=name, devices=devices, items=items, seconds=seconds)
    for (slow, other), factor in spec["corun"].items():
        fixed, work, serial = spec["costs"][spec["stages"].index(slow)]
        seconds = (fixed + work + serial) * factor
        profile.samples.add(stage=slow, devices=1, items=1, seconds=seconds, beside=[other])
    for node, (times, done) in spec["tails"].items():
        profile.curves.add(stage=spec["stages"][node], time_fraction=times, item_fraction=done)
    for group, switch in spec["switch"].items():
        if switch is not None:
            on, off = max(switch[0], 1e-9), max(switch[1], 1e-9)
            held = spec["held"][group]
            profile.switches.add(
                group=group, onload_s=on, offload_s=off, resident_bytes=held[0], offloaded_bytes=held[1]
            )
    cluster = sched_pb2.ClusterSpec()
    node = cluster.nodes.add(name="n", count=1)
    for kind, units in zip(kind_names, spec["units"], strict=True):
        if units:
            node.devices.add(kind=kind, count=units, memory_bytes=100)
    return sched_pb2.PlanRequest(
        workflow=graph,
        profile=profile,
        cluster=cluster,
        mode=spec["mode"],
        max_staleness=spec["staleness"],
        device_quantum=spec["quantum"],
    )


# ---- the oracle ----------------------------------------------------------------------------------------------------
# An option is (seconds, onload, offload, base, peak, shares) with base and peak by kind of device.

Option = tuple[float, float, float, tuple[float, float], tuple[float, float], int]


class Oracle:
    """Exhaustive search over one choice of pins: {group: units}, clusters, offloaded groups."""

    def __init__(self, spec: Spec, pins: dict[str, int], clusters: list[set[str]], offloaded: set[str]) -> None:
        self.spec, self.pins, self.clusters, self.offloaded = spec, pins, clusters, offloaded
        inside = spec["cycle"][0] if spec["cycle"] else ()
        self.nodes = [(i,) for i in range(len(spec["stages"])) if i not in inside]
        if inside:
            self.nodes.append(inside)
        self.nodes.sort()
        where = {s: n for n, stages in enumerate(self.nodes) for s in stages}
        self.edges = {(where[a], where[b]) for a, b in spec["edges"] if where[a] != where[b]}
        self.single = {spec["group_of"][consumer] for _, consumer in spec["barriers"]}
        self.walls = {(where[a], where[b]) for a, b in spec["barriers"]}
        self.counts = [k for k in range(2, spec["items"] + 1) if spec["items"] % k == 0]
        self.alone_kind = [len({g for g in spec["group_of"] if spec["kind_of"][g] == k}) == 1 for k in (0, 1)]
        self.memo: dict[Any, Any] = {}

    def groups(self, nodes: frozenset[int]) -> set[str]:
        return {self.spec["group_of"][s] for n in nodes for s in self.nodes[n]}

    # single nodes

    def stage_seconds(self, stage: int, items: float, devices: int, beside: frozenset[int]) -> float:
        fixed, work, serial = self.spec["costs"][stage]
        seconds = fixed + work * items / devices + serial * items
        others = {self.spec["stages"][s] for n in beside for s in self.nodes[n]}
        for (slow, other), factor in self.spec["corun"].items():
            if slow == self.spec["stages"][stage] and other in others:
                seconds *= factor
        return float(seconds + self._feed(stage, items))

    def _feed(self, stage: int, items: float) -> float:
        """Seconds to bring a chunk in: a message for every stream, and its bytes."""
        inputs = [(a, b) for a, b in self.spec["edges"] if b == stage and not self._same_cycle(a, b)]
        rate = self.spec["bytes_per_s"]
        moved = sum(items * self.spec["item_bytes"][e] / rate for e in inputs) if rate else 0.0
        return len(inputs) * self.spec["latency"] + moved  # type: ignore[no-any-return]

    def _same_cycle(self, a: int, b: int) -> bool:
        return bool(self.spec["cycle"]) and {a, b} <= set(self.spec["cycle"][0])

    def devices(self, group: str, n: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
        """(devices, units by kind) that a group may use out of n units."""
        kind, per_rank = self.spec["kind_of"][group], self.spec["per_rank"][group]
        least, most = self.spec["limits"][group]
        quantum = self.quantum(kind)
        options = [self.pins[group]] if group in self.pins else range(1, n[kind] + 1)
        found = []
        for units in options:
            devices = units * quantum // per_rank * per_rank
            devices = min(devices, most // per_rank * per_rank) if most else devices
            devices = min(devices, per_rank) if group in self.single else devices
            if units <= n[kind] and devices >= max(per_rank, least):
                found.append((devices, (units, 0) if kind == 0 else (0, units)))
        return found

    def quantum(self, kind: int) -> int:
        return self.spec["quantum"] if kind == 0 else self.spec["units"][1] if self.alone_kind[1] else 1  # type: ignore[no-any-return]

    def available(self) -> tuple[int, int]:
        return self.spec["units"][0] // self.quantum(0), self.spec["units"][1] // max(self.quantum(1), 1)

    def ways(self, node: int, chunks: int, n: tuple[int, int], beside: frozenset[int]) -> Iterator[tuple[Any, ...]]:
        """(seconds, groups in turns or not, memory held by kind when idle, after offload and running)."""
        stages, spec = self.nodes[node], self.spec
        items = spec["items"] / chunks
        if len(stages) == 1:
            group = spec["group_of"][stages[0]]
            for devices, _ in self.devices(group, n):
                yield self.stage_seconds(stages[0], items, devices, beside), 0, *self._memory([group])
            return
        rounds = spec["cycle"][1]
        groups = [spec["group_of"][s] for s in stages]
        for picks in itertools.product(*(self.devices(g, n) for g in groups)):
            devices, units = zip(*picks, strict=True)
            if len(set(units)) == 1:
                parts = [self._cycle_part(s, items, d, beside) for s, d in zip(stages, devices, strict=True)]
                yield rounds * sum(parts), 1, *self._memory(groups)
            if all(sum(u[k] for u in units) <= n[k] for k in (0, 1)):
                for batches in (2, 3, 4, 8):
                    once = [
                        self._cycle_part(s, items / batches, d, beside, set(stages) - {s})
                        for s, d in zip(stages, devices, strict=True)
                    ]
                    total, slowest = sum(once), max(once)
                    seconds = total + max(
                        (rounds * batches - 1) * slowest, (rounds - 1) * total + (batches - 1) * slowest
                    )
                    memory = [self._memory([g]) for g in groups]
                    yield seconds, 2, *(tuple(max(m[i][k] for m in memory) for k in (0, 1)) for i in (0, 1, 2))

    def _cycle_part(
        self, stage: int, items: float, devices: int, beside: frozenset[int], mates: Collection[int] = ()
    ) -> float:
        seconds, feed = self.stage_seconds(stage, items, devices, beside), self._feed(stage, items)
        names = self.spec["stages"]
        factor = math.prod(self.spec["corun"].get((names[stage], names[other]), 1.0) for other in mates)
        return (seconds - feed) * factor + feed

    def _memory(self, groups: list[str]) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
        totals = [[0.0, 0.0] for _ in range(3)]
        for group in groups:
            if self.spec["switch"][group] is None:
                continue
            keep, off = self.spec["held"][group]
            kind = self.spec["kind_of"][group]
            for i, value in enumerate((keep, min(off, keep), keep)):
                totals[i][kind] += value / 100
        return tuple(map(tuple, totals))  # type: ignore[return-value]

    def leaf(self, node: int, chunks: int, n: tuple[int, int], shared: bool, beside: frozenset[int]) -> list[Option]:
        groups = sorted(self.groups(frozenset({node})))
        pinned = [g for g in groups if g in self.pins]
        may = all(self.spec["can_offload"][g] for g in groups)
        if pinned:
            flags = [pinned[0] in self.offloaded] if may or pinned[0] not in self.offloaded else []
        else:
            flags = [False, True] if shared and may else [False]
        visits = self.spec["cycle"][1] if len(self.nodes[node]) > 1 else 1  # a cycle leaves its devices in every round
        again = bool(pinned) and any(pinned[0] in self.groups(frozenset({m})) for m in range(node))
        found = []
        for seconds, shares, keep, off, run in self.ways(node, chunks, n, beside):
            for flag in flags:
                base = off if flag else keep
                peak = tuple(max(a, b) for a, b in zip(run, base, strict=True))
                switch = [self.spec["switch"][g] or (0.0, 0.0) for g in groups] if flag else [(0.0, 0.0)]
                if again:
                    peak, base = tuple(p - b for p, b in zip(peak, base, strict=True)), (0.0, 0.0)
                on, off_again = (visits * sum(s[i] for s in switch) for i in (0, 1))
                found.append((seconds, on, off_again, base, peak, shares))
        return best_of([o for o in found if max(o[4]) <= 1 + 1e-9])  # type: ignore[type-var]

    # compositions

    def downsets(self, nodes: frozenset[int]) -> Iterator[frozenset[int]]:
        for size in range(1, len(nodes)):
            for chosen in itertools.combinations(sorted(nodes), size):
                part = frozenset(chosen)
                if not any(b in part and a in nodes - part for a, b in self.edges):
                    yield part

    def splits(self, n: tuple[int, int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for a, b in itertools.product(range(n[0] + 1), range(n[1] + 1)):
            yield (a, b), (n[0] - a, n[1] - b)

    def separable(self, part: frozenset[int], rest: frozenset[int]) -> bool:
        left, right = self.groups(part), self.groups(rest)
        return not left & right and not any(left & c and right & c for c in self.clusters)

    def unlinked(self, part: frozenset[int], rest: frozenset[int]) -> bool:
        return not any((a in part and b in rest) or (a in rest and b in part) for a, b in self.edges)

    def turns(
        self, part: frozenset[int], rest: frozenset[int], n: tuple[int, int], solve: Callable[..., Any]
    ) -> list[Option]:
        left, right = self.groups(part), self.groups(rest)
        sharing = 0 if left <= right or right <= left or not self.common(part, rest) else 1
        present = left | right
        need = sum(max((self.pins[g] for g in c & present), default=0) for c in self.clusters)
        if sum(n) < need:
            return []
        found = []
        for a, b in itertools.product(solve(part), solve(rest)):
            peak = tuple(max(a[4][k] + b[3][k], b[4][k] + a[3][k]) for k in (0, 1))
            if max(peak) <= 1 + 1e-9:
                base = tuple(a[3][k] + b[3][k] for k in (0, 1))
                found.append((a[0] + a[1] + a[2] + b[0] + b[1] + b[2], 0.0, 0.0, base, peak, a[5] | b[5] | sharing))
        return found  # type: ignore[return-value]

    def common(self, part: frozenset[int], rest: frozenset[int]) -> bool:
        """Whether the two sides use one kind of device."""
        left, right = ({self.spec["kind_of"][g] for g in self.groups(side)} for side in (part, rest))
        return bool(left & right)

    def together(self, a: Option, b: Option, kind: str, apart: int) -> Option:
        seconds = max(a[0], b[0]) if kind == "beside" else a[0] + b[0]
        onload = max(a[1], b[1]) if kind == "beside" else a[1] + b[1]
        base, peak = (tuple(max(x, y) for x, y in zip(a[i], b[i], strict=True)) for i in (3, 4))  # type: ignore[arg-type]
        return seconds, onload, max(a[2], b[2]), base, peak, a[5] | b[5] | apart  # type: ignore[return-value]

    def whole(self, nodes: frozenset[int], n: tuple[int, int], shared: bool, beside: frozenset[int]) -> list[Option]:
        """Every plan of `nodes` for an iteration on n units."""
        key = nodes, n, shared, beside
        if key in self.memo:
            return self.memo[key]  # type: ignore[no-any-return]
        if len(nodes) == 1:
            found = self.leaf(min(nodes), 1, n, shared, beside)
        else:
            side = {p: 2 if self.common(p, nodes - p) else 0 for p in self.downsets(nodes)}
            found = [o for _, o in self.pipelines(nodes, n, shared, beside)]
            for part in self.downsets(nodes):
                rest = nodes - part
                found += self.turns(part, rest, n, lambda x: self.whole(x, n, True, beside))
                if not self.separable(part, rest):
                    continue
                if self.unlinked(part, rest):
                    for n1, n2 in self.splits(n):
                        left, right = (
                            self.whole(part, n1, shared, beside | rest),
                            self.whole(rest, n2, shared, beside | part),
                        )
                        found += [self.together(a, b, "beside", side[part]) for a, b in itertools.product(left, right)]
                if any(a in part and b in rest for a, b in self.walls):
                    for n1, n2 in self.splits(n):
                        left, right = self.whole(part, n1, shared, beside), self.whole(rest, n2, shared, beside)
                        found += [self.together(a, b, "apart", side[part]) for a, b in itertools.product(left, right)]
        self.memo[key] = best_of(found)
        return self.memo[key]  # type: ignore[no-any-return]

    def chunk(
        self, nodes: frozenset[int], k: int, n: tuple[int, int], shared: bool, beside: frozenset[int]
    ) -> list[Option]:
        """Every way to run one of k chunks of `nodes` as one layer."""
        key = "chunk", nodes, k, n, shared, beside
        if key in self.memo:
            return self.memo[key]  # type: ignore[no-any-return]
        found = self.leaf(min(nodes), k, n, shared, beside) if len(nodes) == 1 else []
        side = {p: 2 if self.common(p, nodes - p) else 0 for p in self.downsets(nodes)}
        for part in self.downsets(nodes):
            rest = nodes - part
            found += self.turns(part, rest, n, lambda x: self.chunk(x, k, n, True, beside))
            if self.separable(part, rest) and self.unlinked(part, rest):
                for n1, n2 in self.splits(n):
                    left, right = (
                        self.chunk(part, k, n1, shared, beside | rest),
                        self.chunk(rest, k, n2, shared, beside | part),
                    )
                    found += [self.together(a, b, "beside", side[part]) for a, b in itertools.product(left, right)]
        self.memo[key] = best_of(found)
        return self.memo[key]  # type: ignore[no-any-return]

    def pipelines(
        self, nodes: frozenset[int], n: tuple[int, int], shared: bool, beside: frozenset[int]
    ) -> Iterator[tuple[float, Option]]:
        """(busiest seconds, option) of every pipeline over `nodes`."""
        if any(a in nodes and b in nodes for a, b in self.walls):
            return
        for k, part, (n1, n2) in itertools.product(self.counts, list(self.downsets(nodes)), list(self.splits(n))):
            rest = nodes - part
            if not self.separable(part, rest):
                continue
            tail = self.spec["tails"].get(self.nodes[min(part)][0]) if len(part) == 1 else None
            outer = beside | rest
            first = self.leaf(min(part), 1, n1, shared, outer) if tail else self.chunk(part, k, n1, shared, outer)
            for a, (fill, slowest, onload, offload, base, peak, shares) in itertools.product(
                first, self.layers(nodes, rest, k, n2, shared, beside)
            ):
                if tail:
                    released = [a[0] * time_of(tail, j / k) + (k - j) * slowest for j in range(1, k + 1)]
                    seconds, busy = fill + max(released), max(a[0], k * slowest)
                else:
                    slowest = max(slowest, a[0])
                    seconds, busy = a[0] + fill + (k - 1) * slowest, k * slowest
                rest_option = (seconds, onload, offload, base, peak, shares)
                apart = 2 if self.common(part, rest) else 0
                joined = self.together((0.0, *a[1:]), rest_option, "pipe", apart)  # type: ignore[arg-type]
                yield busy, joined

    def layers(
        self,
        nodes: frozenset[int],
        left: frozenset[int],
        k: int,
        n: tuple[int, int],
        shared: bool,
        beside: frozenset[int],
    ) -> list[tuple[Any, ...]]:
        """(fill, slowest, onload, offload, base, peak, shares) of the last layers of a pipeline, `left` in all."""
        key = "layers", nodes, left, k, n, shared, beside
        if key in self.memo:
            return self.memo[key]  # type: ignore[no-any-return]
        found: list[tuple[Any, ...]] = [
            (o[0], o[0], o[1], o[2], o[3], o[4], o[5]) for o in self.chunk(left, k, n, shared, beside | (nodes - left))
        ]
        for part in self.downsets(left):
            if not self.separable(part, left - part):
                continue
            for n1, n2 in self.splits(n):
                here = self.chunk(part, k, n1, shared, beside | (nodes - part))
                for a, b in itertools.product(here, self.layers(nodes, left - part, k, n2, shared, beside)):
                    base = tuple(max(x, y) for x, y in zip(a[3], b[4], strict=True))
                    peak = tuple(max(x, y) for x, y in zip(a[4], b[5], strict=True))
                    found.append(
                        (
                            a[0] + b[0],
                            max(a[0], b[1]),
                            a[1] + b[2],
                            max(a[2], b[3]),
                            base,
                            peak,
                            a[5] | b[6] | (2 if self.common(part, left - part) else 0),
                        )
                    )
        self.memo[key] = best_of(found)
        return self.memo[key]  # type: ignore[no-any-return]

    def best(self) -> float:
        everything, n, none = frozenset(range(len(self.nodes))), self.available(), frozenset[int]()
        allowed = {"": {0, 1, 2, 3}, "temporal": {0, 1}, "spatial": {0, 2}, "hybrid": {3}}[self.spec["mode"]]
        sync, best = self.spec["sync"], INF
        for option in self.whole(everything, n, False, none):
            if option[5] in allowed:
                best = min(best, option[0] + sync)
        if len(everything) > 1:
            for busy, option in self.pipelines(everything, n, False, none):
                if option[5] in allowed:
                    for s in range(1, self.spec["staleness"] + 1):
                        best = min(best, max(busy + sync, (option[0] + sync) / (s + 1)))
        return best


def time_of(tail: tuple[list[float], list[float]], fraction: float) -> float:
    """When that fraction of the items is out, by a straight line between the curve's points."""
    points = [(0.0, 0.0), *zip(*tail, strict=True)]
    for (t0, d0), (t1, d1) in itertools.pairwise(points):
        if fraction <= d1 + 1e-12:
            return t0 + (t1 - t0) * (fraction - d0) / (d1 - d0)
    return 1.0


def flat(option: tuple[Any, ...]) -> tuple[tuple[float, ...], int]:
    numbers: list[float] = []
    for part in option[:-1]:
        numbers += part if isinstance(part, tuple) else [part]
    return tuple(numbers), option[-1]


def best_of(options: list[Any]) -> list[Any]:
    """Drops options that another, with the same sharing, beats or equals in every number."""
    ordered = sorted({o: flat(o) for o in options}.items(), key=lambda x: (sum(x[1][0]), x[1]))
    kept: list[tuple[Any, tuple[tuple[float, ...], int]]] = []
    for option, (numbers, shares) in ordered:
        if not any(s == shares and all(a <= b for a, b in zip(ns, numbers, strict=True)) for _, (ns, s) in kept):
            kept.append((option, (numbers, shares)))
    return [o for o, _ in kept]


def exhaustive(spec: Spec) -> float:
    """The fastest plan's seconds; infinity if none fits."""
    repeated = sorted({g for g in spec["group_of"] if spec["group_of"].count(g) > 1})
    partitions = [[set(repeated)]] if len(repeated) == 1 else [[set(repeated)], [{g} for g in repeated]]
    if not repeated:
        return Oracle(spec, {}, [], set()).best()
    best, most = INF, max(Oracle(spec, {}, [], set()).available())
    for clusters in partitions:
        if len(repeated) > 1 and spec["mode"] == ("temporal" if len(clusters) > 1 else "spatial"):
            continue  # groups on disjoint devices are apart, overlapping ones share
        for units in itertools.product(range(1, most + 1), repeat=len(repeated)):
            for away in itertools.product((False, True), repeat=len(repeated)):
                offloaded = {g for g, a in zip(repeated, away, strict=True) if a}
                pins = dict(zip(repeated, units, strict=True))
                best = min(best, Oracle(spec, pins, clusters, offloaded).best())
    return best


# ---- the comparison ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(NUM_GRAPHS))
def test_search_equals_exhaustive_search(seed: int) -> None:
    spec = random_spec(seed)
    expected = exhaustive(spec)
    answer = plan(as_request(spec))
    assert bool(answer.plans) == (expected < INF), answer.infeasible
    assert answer.exact
    if answer.plans:
        assert min(p.searched_s for p in answer.plans) == pytest.approx(expected, rel=1e-6)


def _turns_inside(tree: Tree) -> tuple[bool, bool]:
    """Whether a layer of a pipeline takes turns, and whether it also has parts side by side in a turn."""
    turns = [t for pipe in walk(tree) if isinstance(pipe, Pipe) for t in walk(pipe) if isinstance(t, Turns)]
    return bool(turns), any(isinstance(t, Beside) for turn in turns for t in walk(turn))


@pytest.mark.parametrize("seed", [seed for seed in range(NUM_GRAPHS) if not random_spec(seed)["cycle"]])
def test_a_plan_takes_no_longer_than_was_searched(seed: int) -> None:
    """Simulated, the twenty best plans keep to the closed form, and to the lower bound.

    Without loops (their items go round one by one), neighbours that slow each other and iterations that overlap, and
    with one rank a group, in which the two differ. Turns within a chunk may be late once, by a chunk; parts side by
    side in such a turn are not in step.
    """
    spec = random_spec(seed)
    spec.update(corun={}, staleness=0, per_rank=dict.fromkeys(spec["per_rank"], 0))
    model = build(as_request(spec))
    least = lower_bound(model.problem)
    for found in best_plans(model.problem, spec["mode"], 20).plans:
        simulated = run_plan(model, execution_plan(model, found))[0]
        turns, side_by_side = _turns_inside(found.tree)
        late = max((part.chunks for part in walk(found.tree) if isinstance(part, Pipe)), default=1)
        assert simulated >= least * (1 - 1e-9), shape(found.tree)
        if not side_by_side:
            assert simulated <= found.seconds * (1 + (1 / late if turns else 0) + 1e-9), shape(found.tree)
