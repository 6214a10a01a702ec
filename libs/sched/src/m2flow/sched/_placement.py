"""From a plan's tree to an execution plan: device ids, granularity, order, residency and capacities."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import ceil

import numpy as np

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.sched._build import Model
from m2flow.sched._closed_form import Tails, chunk_starts, intervals, iteration_seconds
from m2flow.sched._plans import Candidate
from m2flow.sched._tree import Leaf, Pipe, Tree, Turns, leaves, walk
from m2flow.sched._workflow import work_sources
from m2flow.sched.cost import Estimate

Ids = dict[str, tuple[int, ...]]


def execution_plan(model: Model, candidate: Candidate) -> flow_pb2.ExecutionPlan:
    """Returns the plan with its prediction. Stages that cost no device time are not in it: they go where items go."""
    devices = _devices(model, candidate)
    plan = flow_pb2.ExecutionPlan(mode=candidate.mode, staleness=candidate.staleness)
    offloaded = {g for leaf in leaves(candidate.tree) if leaf.offloaded for g in model.workflow.nodes[leaf.node].groups}
    for group in model.workflow.graph.groups:
        if group.name not in devices:
            continue
        plan.groups.add(
            group=group.name,
            device_ids=devices[group.name],
            num_ranks=len(devices[group.name]) // (group.devices_per_rank or len(devices[group.name])),
            residency=flow_pb2.RESIDENCY_OFFLOADED if group.name in offloaded else flow_pb2.RESIDENCY_RESIDENT,
        )
    _add_stages(model, candidate, plan)
    _add_edges(model, candidate, plan)
    for members in share_groups(devices):
        together = sorted({d for g in members for d in devices[g]})
        plan.share_groups.add(groups=members, device_ids=together)
    _add_prediction(model, candidate, devices, offloaded, plan)
    return plan


def share_groups(devices: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Groups that share devices, directly or through a third, two or more together."""
    found: list[tuple[list[str], set[int]]] = []
    for group, ids in devices.items():
        touching = [f for f in found if f[1] & set(ids)]
        found = [f for f in found if f not in touching]
        found.append(([*(g for f in touching for g in f[0]), group], set(ids).union(*(f[1] for f in touching))))
    return [members for members, _ in found if len(members) > 1]


def _devices(model: Model, candidate: Candidate) -> Ids:
    """Device ids of every group; pinned groups have theirs from the start, the rest fill up in the order of turns."""
    free = {k: tuple(model.pools[k].ids) for k in model.kinds}
    taken = dict.fromkeys(model.kinds, 0)
    blocks: Ids = {}
    for cluster in candidate.pins.clusters:
        kind = model.workflow.groups[next(iter(sorted(cluster)))].device_kind
        quantum = model.problem.quanta[model.kinds.index(kind)]
        for group in cluster:
            blocks[group] = free[kind][taken[kind] : taken[kind] + candidate.pins.units[group] * quantum]
        taken[kind] += max(candidate.pins.units[g] for g in cluster) * quantum
    placed: Ids = {}
    _assign(model, candidate.tree, free, blocks, placed)
    return placed


def _assign(model: Model, tree: Tree, ids: Ids, blocks: Ids, placed: Ids) -> None:
    if isinstance(tree, Leaf):
        _assign_leaf(model, tree, ids, blocks, placed)
        return
    if isinstance(tree, Turns):
        for part in tree.parts:
            _assign(model, part, ids, blocks, placed)
        return
    wanted = [{d for g in _groups(model, p) for d in blocks.get(g, ())} for p in tree.parts]
    used: set[int] = set()
    for i, part in enumerate(tree.parts):
        mine: Ids = {}
        reserved = used.union(*(w for j, w in enumerate(wanted) if j != i))
        for k, kind in enumerate(model.kinds):
            count = int(model.problem.grid.vectors[part.units][k]) * model.problem.quanta[k]
            first = [d for d in ids[kind] if d in wanted[i]]
            rest = [d for d in ids[kind] if d not in wanted[i] and d not in reserved]
            mine[kind] = tuple(sorted((first + rest)[:count]))
            used.update(mine[kind])
        _assign(model, part, mine, blocks, placed)


def _assign_leaf(model: Model, leaf: Leaf, ids: Ids, blocks: Ids, placed: Ids) -> None:
    groups = model.workflow.nodes[leaf.node].groups
    used = {d for g in groups for d in blocks.get(g, ())} if leaf.batches else set()
    for group, count in zip(groups, leaf.devices, strict=True):
        kind = model.workflow.groups[group].device_kind
        pool = blocks.get(group) or (tuple(d for d in ids[kind] if d not in used) if used else ids[kind])
        placed[group] = pool[:count]
        if leaf.batches:
            used.update(placed[group])


def _groups(model: Model, tree: Tree) -> set[str]:
    return {g for leaf in leaves(tree) for g in model.workflow.nodes[leaf.node].groups}


def _turns(tree: Tree, before: Sequence[int], inside: bool = False, turns: str = "") -> Iterator[tuple[Leaf, str]]:
    """Leaves in the order of their turns, with how long these are: "iteration", "chunk", or "" if nobody shares.

    What takes turns inside a pipeline does so chunk by chunk, also where the pipeline takes turns with others.

    Args:
        before: See `Problem.before`.
        inside: Whether the tree is part of a pipeline.
        turns: Of what the tree is part of.
    """
    if isinstance(tree, Leaf):
        yield tree, turns
    elif isinstance(tree, Pipe):
        rank = _ranks(tree, before)
        for part in tree.parts:
            yield from sorted(_turns(part, before, True, turns), key=lambda turn: rank[turn[0].node])
    else:
        if isinstance(tree, Turns):
            turns = "chunk" if inside else "iteration"
        for part in tree.parts:
            yield from _turns(part, before, inside, turns)


def _ranks(pipe: Pipe, before: Sequence[int]) -> dict[int, tuple[float, bool]]:
    """Who of a layer comes first: who feeds the slowest of later layers; last, whom no stream joins to another layer.

    The bounds of their edges make the first give way to the rest; nothing would hold back the last.
    """
    layer_of = {leaf.node: number for number, part in enumerate(pipe.parts) for leaf in leaves(part)}
    streams = [(i, j) for j in layer_of for i in layer_of if before[j] >> i & 1]
    linked = {i for ends in streams for i in ends if len({layer_of[j] for j in ends}) > 1}
    for _ in layer_of:
        linked |= {i for ends in streams for i in ends if linked & set(ends)}
    chunk_s = {leaf.node: leaf.chunk_s for leaf in leaves(pipe)}
    feeds: dict[int, float] = {}
    for node in sorted(layer_of, reverse=True):  # consumers first
        behind = [j for i, j in streams if i == node]
        longest = [max(feeds[j], chunk_s[j] if layer_of[j] > layer_of[node] else 0.0) for j in behind]
        feeds[node] = max(longest, default=0.0)
    return {node: (-feeds[node], node not in linked) for node in layer_of}


def _add_stages(model: Model, candidate: Candidate, plan: flow_pb2.ExecutionPlan) -> None:
    position = 0
    for leaf, turns in _turns(candidate.tree, model.problem.before):
        for stage in model.workflow.nodes[leaf.node].stages:
            pieces = 1 if leaf.streams else leaf.chunks * max(leaf.batches, 1)
            volume = model.workflow.volumes[stage]
            granularity = max(1, ceil(volume / pieces - 1e-9))
            plan.stages.add(stage=stage, granularity=granularity, position=position, hold=turns == "iteration")
            position += 1
    for publish in model.workflow.publishes:
        plan.stages.add(stage=publish.name, granularity=1, position=position, hold=False)
        position += 1


def _add_edges(model: Model, candidate: Candidate, plan: flow_pb2.ExecutionPlan) -> None:
    """Bounds that make turns within a chunk alternate; all other edges have none.

    Where items meet others on the way, or find their rank by their place, there is no bound: those that wait for others
    would fill it. Nor is there one in an asynchronous plan: it would have to hold more than an iteration, or those of a
    later one would keep out this one's; nor behind a stage that keeps its devices for the iteration, whose turn would
    end for want of room. The feedback of a cycle holds the chunk that goes round.
    """
    home: dict[str, Leaf] = {}
    chunks: dict[tuple[int, int], int] = {}
    for part in walk(candidate.tree):
        if isinstance(part, Leaf):
            home.update(dict.fromkeys(model.workflow.nodes[part.node].stages, part))
        elif isinstance(part, Pipe) and any(isinstance(inner, Turns) for inner in walk(part)):
            chunks.update(_chunks_ahead(part, model.problem.tails))
    sources = work_sources(model.workflow)
    several = {g.group for g in plan.groups if g.num_ranks > 1}
    placed = {s for s in model.workflow.by_place if model.workflow.stages[s].group in several}
    held = {s.stage for s in plan.stages if s.hold}
    for stream in model.workflow.graph.streams:
        capacity, volume = 0, model.workflow.volumes[stream.consumer]
        producer, consumer = home.get(stream.producer), home.get(stream.consumer)
        if stream.feedback:
            capacity = ceil(volume / home[min(sources[stream.producer])].chunks - 1e-9)
        elif producer and consumer and not (plan.staleness or stream.consumer in placed or stream.producer in held):
            ahead = chunks.get((producer.node, consumer.node), 0)
            capacity = ahead * max(1, ceil(volume / consumer.chunks - 1e-9))
        plan.edges.add(producer=stream.producer, consumer=stream.consumer, capacity=capacity)


def _chunks_ahead(pipe: Pipe, tails: Tails) -> dict[tuple[int, int], int]:
    """By producer and consumer, the chunks that the one is ahead of the other in the closed form, where every chunk
    begins one period after the one before; one more for a producer that others of its layer may hold up."""
    starts, period = chunk_starts(pipe, tails)
    layer_of = {leaf.node: number for number, part in enumerate(pipe.parts) for leaf in leaves(part)}
    first = [min(starts[leaf.node] for leaf in leaves(part)) for part in pipe.parts]
    found = {}
    for producer, consumer in product(starts, starts):
        held_up = layer_of[producer] != layer_of[consumer] and starts[producer] > first[layer_of[producer]]
        ahead = ceil((starts[consumer] - starts[producer]) / (period or 1.0) - 1e-9)
        found[producer, consumer] = max(1, ahead) + held_up
    head = pipe.parts[0]
    if isinstance(head, Leaf) and head.streams:
        found = {ends: ahead for ends, ahead in found.items() if ends[0] != head.node}
    return found


def _add_prediction(
    model: Model, candidate: Candidate, devices: Ids, offloaded: set[str], plan: flow_pb2.ExecutionPlan
) -> None:
    tree, tails, sync_s = candidate.tree, model.problem.tails, model.problem.sync_s
    plan.prediction.iteration_s = candidate.seconds
    plan.prediction.error_s = error_seconds(model, tree)
    for node, interval in intervals(tree, tails).items():
        for stage in model.workflow.nodes[node].stages:
            plan.prediction.stages.add(
                stage=stage, start_s=interval.start_s, end_s=interval.end_s, busy_s=interval.busy_s
            )
    end = iteration_seconds(tree, tails)
    for publish in model.workflow.publishes:
        plan.prediction.stages.add(stage=publish.name, start_s=end, end_s=end + sync_s, busy_s=sync_s)
    plan.prediction.peak_bytes.update(peak_bytes(model, tree, devices, offloaded))


def error_seconds(model: Model, tree: Tree) -> float:
    """Half the width of the believed interval: the stages' own errors, carried through the closed form."""
    tails, base, square = model.problem.tails, iteration_seconds(tree, model.problem.tails), 0.0
    for node, _, estimate in estimates(model, tree):
        share = estimate.relative_error / len(model.workflow.nodes[node].stages)
        square += (iteration_seconds(tree, tails, {node: 1 + share}) - base) ** 2
    return float(square**0.5)


def estimates(model: Model, tree: Tree) -> Iterator[tuple[int, str, Estimate]]:
    """What is asked of each stage: its node, its name and the answer."""
    for leaf in leaves(tree):
        node = model.workflow.nodes[leaf.node]
        for stage in node.stages:
            devices = leaf.devices[node.groups.index(model.workflow.stages[stage].group)]
            pieces = 1 if leaf.streams else leaf.chunks * max(leaf.batches, 1)
            items = model.workflow.volumes[stage] / pieces
            yield leaf.node, stage, model.costs.stages[stage].estimate(items, devices)


def peak_bytes(model: Model, tree: Tree, devices: Ids, offloaded: set[str]) -> dict[int, int]:
    """Bytes on each device at most: what all its groups hold while idle, and the most that one adds when it runs."""
    held: dict[str, tuple[float, float]] = {}
    for leaf in leaves(tree):
        node = model.workflow.nodes[leaf.node]
        for group in node.groups:
            stages = tuple(s for s in node.stages if model.workflow.stages[s].group == group)
            items = {s: model.workflow.volumes[s] / leaf.chunks for s in stages}
            count = np.array([float(max(len(devices[group]), 1))])
            keep, off, run = (float(b[0]) for b in model.costs.group_memory(group, stages, items, count))
            rest = off if group in offloaded else keep
            before = held.get(group, (0.0, 0.0))
            held[group] = max(before[0], rest), max(before[1], run - rest, 0.0)
    used = np.unique(np.concatenate([devices[g] for g in held]))
    idle, extra = np.zeros(len(used)), np.zeros(len(used))
    for group, (rest, more) in held.items():
        here = np.searchsorted(used, devices[group])
        idle[here] += rest
        extra[here] = np.maximum(extra[here], more)
    return dict(zip(used.tolist(), (idle + extra).astype(np.int64).tolist(), strict=True))
