"""A workflow graph reduced to what costs device time: nodes and the edges between them.

Stages that cost nothing (sources, gathers, maps) are walked through; a stage cycle closed by feedback becomes one
node; a barrier, or `after`, between two nodes marks their edge, so that no pipeline crosses it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.sched.errors import InputError

_PASSIVE = {
    flow_pb2.STAGE_KIND_SOURCE,
    flow_pb2.STAGE_KIND_MAP,
    flow_pb2.STAGE_KIND_FILTER,
    flow_pb2.STAGE_KIND_GATHER,
    flow_pb2.STAGE_KIND_BARRIER,
    flow_pb2.STAGE_KIND_SINK,
    flow_pb2.STAGE_KIND_MERGE,
    flow_pb2.STAGE_KIND_JOIN,
}
_MEETS = {flow_pb2.STAGE_KIND_GATHER, flow_pb2.STAGE_KIND_JOIN, flow_pb2.STAGE_KIND_MERGE}


@dataclass(frozen=True)
class Node:
    """One stage, or one cycle of stages, that occupies devices.

    Args:
        name: The stages' names joined by "+".
        stages: In graph order.
        groups: The distinct groups of the stages, in graph order.
        rounds: Times that an item goes round; 1 for a node that is no cycle.
        cyclic: Whether a feedback stream closes it.
    """

    name: str
    stages: tuple[str, ...]
    groups: tuple[str, ...]
    rounds: float
    cyclic: bool


@dataclass(frozen=True)
class Edge:
    """Items move from one node to another; `via` are the passive stages passed on the way."""

    producer: int
    consumer: int
    stage: str
    barrier: bool
    item_bytes: float
    via: tuple[str, ...]


@dataclass(frozen=True)
class Workflow:
    """The reduced graph. `volumes` are items of each stage's input in one iteration."""

    graph: flow_pb2.WorkflowGraph
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    volumes: Mapping[str, float]
    publishes: tuple[flow_pb2.Stage, ...]

    @cached_property
    def groups(self) -> dict[str, flow_pb2.WorkerGroup]:
        return {g.name: g for g in self.graph.groups}

    @cached_property
    def stages(self) -> dict[str, flow_pb2.Stage]:
        return {s.name: s for s in self.graph.stages}

    @cached_property
    def by_place(self) -> set[str]:
        """Stages whose items find their rank, if there are several, by their place, rather than go to whichever asks
        first: they meet others there, keep an order or go round a loop, or the ranks move in step."""
        inputs = _producers(self.graph)
        meet = {e.stage for e in self.edges if any(self.stages[via].kind in _MEETS for via in e.via)}
        bound = {g.name for g in self.graph.groups if g.in_step}.union(*(n.groups for n in self.nodes if n.cyclic))
        return {
            s.name
            for s in self.graph.stages
            if s.order_window or s.group in bound or s.name in meet or len(inputs[s.name]) > 1
        }


def reduce_graph(graph: flow_pb2.WorkflowGraph) -> Workflow:
    """Returns the nodes that cost device time, in a topological order of the graph.

    Raises:
        InputError: a stage names a group, a producer or a consumer that is not there; a cycle has no feedback stream;
            nothing in the graph costs device time.
    """
    _check(graph)
    volumes = stage_volumes(graph)
    works = (s for s in graph.stages if s.kind != flow_pb2.STAGE_KIND_PUBLISH)
    worked = [s.name for s in works if s.group or s.kind not in _PASSIVE]
    if not worked:
        raise InputError(f"workflow {graph.name!r} has no work stage, want one or more: trace a stage of a group")
    links = _links(graph, set(worked))
    nodes = tuple(_node(graph, stages, links) for stages in _components(worked, links))
    index = {stage: i for i, node in enumerate(nodes) for stage in node.stages}
    edges: dict[tuple[str, str], Edge] = {}
    for link in links:
        ends = index[link.producer], index[link.consumer]
        if ends[0] != ends[1]:
            known = edges.get((link.producer, link.consumer))
            barrier = link.barrier or (known is not None and known.barrier)
            edges[link.producer, link.consumer] = Edge(*ends, link.consumer, barrier, link.item_bytes, link.via)
    publishes = tuple(s for s in graph.stages if s.kind == flow_pb2.STAGE_KIND_PUBLISH)
    return Workflow(graph, nodes, tuple(edges.values()), volumes, publishes)


def stage_volumes(graph: flow_pb2.WorkflowGraph) -> dict[str, float]:
    """Items that enter each stage in one iteration; a merge adds its inputs, a join has the largest, and no more come
    out of a quota than it lets pass."""
    volumes, leaving = dict[str, float](), dict[str, float]()
    stages = {s.name: s for s in graph.stages}
    producers = _producers(graph)
    for name in _topological(stages, producers):
        sources = [leaving[p] for p in producers[name]]
        adds = stages[name].kind == flow_pb2.STAGE_KIND_MERGE
        volumes[name] = (sum(sources) if adds else max(sources)) if sources else float(max(graph.source_items, 1))
        leaving[name] = volumes[name] * (stages[name].expansion or 1.0)
        if stages[name].HasField("quota"):
            leaving[name] = min(leaving[name], float(stages[name].quota.count))
    return volumes


def one_rank_groups(graph: flow_pb2.WorkflowGraph) -> set[str]:
    """Groups that need one rank: all that a barrier or a quota sees has to come to one place, and of ranks that move in
    step each would wait for an item, of a loop or before a quota, that another has to bring."""
    stages = {s.name: s for s in graph.stages}
    before: dict[str, list[str]] = {name: [] for name in stages}
    for stream in graph.streams:
        before[stream.consumer].append(stream.producer)

    def behind(name: str, through: Callable[[flow_pb2.Stage], bool]) -> set[str]:
        found, pending = set[str](), list(before[name])
        while pending:
            other = pending.pop()
            if other not in found:
                found.add(other)
                pending += before[other] if through(stages[other]) else []
        return found

    in_step = {g.name for g in graph.groups if g.in_step}
    passive = {s.name: behind(s.name, lambda other: other.kind in _PASSIVE and not other.group) for s in graph.stages}
    everything = {s.name: behind(s.name, lambda other: True) for s in graph.stages}
    quotas = [s.name for s in graph.stages if s.HasField("quota")]
    single = set()
    for stage in graph.stages:
        alone = any(stages[b].kind == flow_pb2.STAGE_KIND_BARRIER or b in quotas for b in passive[stage.name])
        awaited = stage.name in everything[stage.name] or any(stage.name in everything[q] for q in quotas)
        if (
            stage.group
            and stage.kind != flow_pb2.STAGE_KIND_PUBLISH
            and (alone or (awaited and stage.group in in_step))
        ):
            single.add(stage.group)
    return single


@dataclass(frozen=True)
class _Link:
    producer: str
    consumer: str
    barrier: bool
    item_bytes: float
    feedback: bool
    rounds: float
    via: tuple[str, ...]


def _check(graph: flow_pb2.WorkflowGraph) -> None:
    names = [s.name for s in graph.stages]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise InputError(f"workflow {graph.name!r} names {twice} more than once, want unique stage names: rename one")
    groups = {g.name for g in graph.groups}
    _check_groups(graph)
    for stage in graph.stages:
        if not stage.kind:
            raise InputError(f"stage {stage.name!r} has no kind, want source, work, map, gather or another: give one")
        if stage.kind == flow_pb2.STAGE_KIND_PUBLISH and stage.to not in groups:
            raise InputError(
                f"stage {stage.name!r} publishes to group {stage.to!r}, want one of {sorted(groups)}: name the receiver"
            )
        if stage.kind not in _PASSIVE and stage.group not in groups:
            raise InputError(
                f"stage {stage.name!r} runs on group {stage.group!r}, want one of {sorted(groups)}: list it"
            )
        for other in stage.after:
            if other not in names:
                raise InputError(f"stage {stage.name!r} comes after {other!r}, want a stage of {names}: name one")
    before = {stage.name: list(stage.after) for stage in graph.stages}
    for stream in graph.streams:
        for end in (stream.producer, stream.consumer):
            if end not in names:
                raise InputError(f"a stream joins {end!r}, want a stage of {names}: add the stage or fix the name")
        if not stream.feedback:
            before[stream.consumer].append(stream.producer)
    _topological(names, before)


def _check_groups(graph: flow_pb2.WorkflowGraph) -> None:
    names = [g.name for g in graph.groups]
    for group in graph.groups:
        if names.count(group.name) > 1:
            raise InputError(f"workflow {graph.name!r} lists group {group.name!r} twice, want it once: rename one")
        least = max(group.min_devices, group.devices_per_rank)
        if 0 < group.max_devices < least:
            raise InputError(
                f"group {group.name!r} takes at most {group.max_devices} devices and at least {least}, want room "
                "between: raise max_devices, or lower min_devices or devices_per_rank"
            )


def _producers(graph: flow_pb2.WorkflowGraph) -> dict[str, list[str]]:
    """The stages that feed each stage; feedback does not count."""
    producers: dict[str, list[str]] = {s.name: [] for s in graph.stages}
    for stream in graph.streams:
        if not stream.feedback:
            producers[stream.consumer].append(stream.producer)
    return producers


def _topological(stages: Iterable[str], producers: Mapping[str, list[str]]) -> list[str]:
    done: list[str] = []
    left = list(stages)
    while left:
        ready = [s for s in left if all(p in done for p in producers[s])]
        if not ready:
            raise InputError(f"stages {left} form a cycle, want a feedback stream in it: mark the one that closes it")
        done += ready
        left = [s for s in left if s not in ready]
    return done


def _links(graph: flow_pb2.WorkflowGraph, worked: set[str]) -> list[_Link]:
    """Every way from one worked stage to the next, through passive stages."""
    kinds = {s.name: s.kind for s in graph.stages}
    outgoing: dict[str, list[flow_pb2.Stream]] = {name: [] for name in kinds}
    for stream in graph.streams:
        outgoing[stream.producer].append(stream)
    links: list[_Link] = []
    for start in sorted(worked):
        seen: set[tuple[str, bool, bool]] = set()
        walk = [_Link(start, start, False, 0.0, False, 0.0, ())]
        while walk:
            here = walk.pop()
            for stream in outgoing[here.consumer]:
                barrier = here.barrier or kinds[stream.consumer] == flow_pb2.STAGE_KIND_BARRIER
                feedback, rounds = here.feedback or stream.feedback, max(here.rounds, stream.rounds)
                size = stream.item_bytes or here.item_bytes
                via = here.via if stream.consumer in worked else (*here.via, stream.consumer)
                link = _Link(start, stream.consumer, barrier, size, feedback, rounds, via)
                if stream.consumer in worked:
                    links.append(link)
                elif (stream.consumer, barrier, feedback) not in seen:
                    seen.add((stream.consumer, barrier, feedback))
                    walk.append(link)
    return links + _after_links(graph, worked)


def _after_links(graph: flow_pb2.WorkflowGraph, worked: set[str]) -> list[_Link]:
    after = {s.name: list(s.after) for s in graph.stages}
    links = []
    for name in sorted(worked):
        pending, seen = list(after[name]), set()
        while pending:
            other = pending.pop()
            if other in worked:
                links.append(_Link(other, name, True, 0.0, False, 0.0, ()))
            elif other not in seen:  # a publish, say: what it waits for is waited for
                seen.add(other)
                pending += after[other]
    return links


def _components(worked: list[str], links: list[_Link]) -> list[list[str]]:
    """Strongly connected components in a topological order, ties by graph order."""
    reach = {s: {s} for s in worked}
    for _ in worked:
        for link in links:
            reach[link.producer] |= reach[link.consumer]
    groups: list[list[str]] = []
    for stage in worked:
        home = next((g for g in groups if g[0] in reach[stage] and stage in reach[g[0]]), None)
        if home is None:
            groups.append([stage])
        else:
            home.append(stage)
    before = {i: {j for j, g in enumerate(groups) if j != i and h[0] in reach[g[0]]} for i, h in enumerate(groups)}
    order: list[int] = []
    while len(order) < len(groups):
        order.append(next(i for i in range(len(groups)) if i not in order and before[i] <= set(order)))
    return [groups[i] for i in order]


def _node(graph: flow_pb2.WorkflowGraph, stages: list[str], links: list[_Link]) -> Node:
    inside = [link for link in links if link.producer in stages and link.consumer in stages]
    rounds = max((link.rounds for link in inside if link.feedback), default=0.0) or 1.0
    group_of = {s.name: s.group for s in graph.stages}
    groups = tuple(dict.fromkeys(group_of[s] for s in stages))
    return Node("+".join(stages), tuple(stages), groups, rounds, bool(inside))


def work_sources(workflow: Workflow) -> dict[str, set[str]]:
    """By stage, the stages with devices that its output comes from: itself, or through passive stages."""
    working = {s for node in workflow.nodes for s in node.stages}
    producers = _producers(workflow.graph)
    found: dict[str, set[str]] = {}
    for name in producers:
        pending, reached, seen = [name], set[str](), set[str]()
        while pending:
            stage = pending.pop()
            if stage in working:
                reached.add(stage)
            elif stage not in seen:
                seen.add(stage)
                pending += producers[stage]
        found[name] = reached
    return found
