"""From a macro flow, an ordinary function, to its graph.

The function is called with a `Flow` and a proxy for each worker group; what it says about streams is written down, and
nothing runs. It is called twice: a program that says something else the second time depends on a clock, on chance or
on state that it changes, and is refused.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from m2flow.flow._importable import target_of
from m2flow.flow._rules import check_program
from m2flow.flow.errors import TraceError
from m2flow.flow.graph import Graph
from m2flow.flow.spec import Spec
from m2flow.flow.stream import Loop, Stream, location, refuse
from m2flow.proto.flow.v1 import flow_pb2 as pb

Program = Callable[..., Stream | Mapping[str, Stream] | tuple[Stream, ...] | None]


def trace(
    program: Program,
    groups: Mapping[str, Spec],
    *,
    source_items: int,
    name: str = "",
    expansions: Mapping[str, float] | None = None,
) -> Graph:
    """Traces `program(flow, **proxies)` and returns its graph. Does not block, starts nothing.

    `groups` has the specification of each group under the program's argument names; one that the program does not use
    is not in the graph. `source_items` counts the items of one iteration at the source. `expansions` says how many
    items a stage gives for one that it takes, where that is not one: {"rollout.generate": 8}. It sizes plans and
    changes no result.

    Raises TraceError, with the program's line, on what cannot be traced and on a program that is not deterministic.
    """
    name = name or getattr(program, "__name__", "flow")
    if source_items < 1:
        raise TraceError(f"trace {name}: got source_items={source_items}, want at least 1")
    first, second = (_trace_once(program, groups, source_items, name, dict(expansions or {})) for _ in range(2))
    if first != second:
        raise TraceError(_difference(first, second))
    graph = Graph(first, {group.name: groups[group.name] for group in first.groups})
    check_program(graph)
    return graph


class StageProxy:
    """A worker group inside a macro flow: its stages are methods that take streams and return a stream."""

    def __init__(self, flow: "Flow", spec: Spec, name: str) -> None:
        self._flow = flow
        self._spec = spec
        self._name = name

    def __repr__(self) -> str:
        return f"<group {self._name}>"

    def __getattr__(self, method: str) -> Callable[..., Stream]:
        if method.startswith("__"):
            raise AttributeError(method)
        stages = tuple(self._spec.stages)
        if method not in stages:
            near = difflib.get_close_matches(method, stages, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its stages are {', '.join(stages) or 'none'}"
            raise AttributeError(f"{location()}: group {self._name} has no stage {method!r}: {hint}")

        def call(*streams: Stream) -> Stream:
            return self._flow._work(self._name, method, streams)

        return call


class Flow:
    """What a macro flow says: where items enter, how they meet, and what happens between iterations."""

    def __init__(self, message: pb.WorkflowGraph, expansions: dict[str, float]) -> None:
        self._graph = message
        self._expansions = expansions
        self._used: set[str] = set()
        self._stacks: dict[str, tuple[float, ...]] = {}
        self._loops: list[Loop] = []
        self._ordered: set[str] = set()

    def source(self, name: str) -> Stream:
        """The stream of the items that the driver is given for an iteration. A program has one."""
        if any(stage.kind == pb.STAGE_KIND_SOURCE for stage in self._graph.stages):
            refuse(f"source {name!r} is the second source", "draw all items from one source and split them")
        return self._stage(name, pb.STAGE_KIND_SOURCE, ())

    def map(self, function: Callable[..., Any], stream: Stream) -> Stream:
        """`function(item) -> item` on each item; it runs where its stream is consumed. Tombstones pass by."""
        target = target_of(function, "map")
        return self._stage(f"map:{_short(target)}", pb.STAGE_KIND_MAP, (stream,), method=target)

    def filter(self, predicate: Callable[..., Any], stream: Stream) -> Stream:
        """The items for which `predicate(item)` is true; the others go on as tombstones, so that gathers complete."""
        target = target_of(predicate, "filter")
        return self._stage(f"filter:{_short(target)}", pb.STAGE_KIND_FILTER, (stream,), method=target)

    def split(self, predicate: Callable[..., Any], stream: Stream) -> tuple[Stream, Stream]:
        """Two streams: the items for which `predicate(item)` is true, and the rest."""
        target = target_of(predicate, "split")
        name = f"split:{_short(target)}"
        keep = self._stage(f"{name}:yes", pb.STAGE_KIND_FILTER, (stream,), method=target, branch="yes")
        rest = self._stage(f"{name}:no", pb.STAGE_KIND_FILTER, (stream,), method=target, branch="no")
        return keep, rest

    def first(
        self, count: int, stream: Stream, *, where: Callable[..., Any] | None = None, carry_surplus: bool = False
    ) -> Stream:
        """The first `count` items by source order (for which `where(item)` is true), never the first to arrive.

        The source feeds on until they are there; what is over is carried to the next iteration, or dropped.
        """
        if count < 1:
            refuse(f"first got count={count}", "take at least one item")
        target = "" if where is None else target_of(where, "first")
        quota = pb.Quota(count=count, carry_surplus=carry_surplus)
        name = f"first:{_short(target)}" if target else "first"
        return self._stage(name, pb.STAGE_KIND_FILTER, (stream,), method=target, quota=quota)

    def gather(self, stream: Stream, *, by: str) -> Stream:
        """One item for each whole group, its members in source order; released as soon as the group is complete."""
        if not by:
            refuse("gather got an empty `by`", "name the groups that items carry, such as by='prompt'")
        return self._stage(f"gather:{by}", pb.STAGE_KIND_GATHER, (stream,), by=by)

    def barrier(self, stream: Stream, function: Callable[..., Any] | None = None) -> Stream:
        """Holds all items of the iteration until the last is there, then releases them in source order.

        `function(list of items) -> list of items` sees them all at once: whitening over a batch is one.
        """
        target = "" if function is None else target_of(function, "barrier")
        name = f"barrier:{_short(target)}" if target else "barrier"
        return self._stage(name, pb.STAGE_KIND_BARRIER, (stream,), method=target)

    def merge(self, *streams: Stream) -> Stream:
        """Several streams in one, as items arrive: the halves of a split, or different items."""
        return self._stage("merge", pb.STAGE_KIND_MERGE, streams)

    def join(self, *streams: Stream) -> Stream:
        """The same items by several ways, as one stream: an item goes on once it came by each, its fields united."""
        return self._stage("join", pb.STAGE_KIND_JOIN, streams)

    def ordered(self, stream: Stream, *, window: int = 1) -> Stream:
        """The same stream for a consumer that sees it by source order, in windows of `window` items.

        1 is strict; a trainer whose optimiser steps once in m items needs no more than windows of m, in which items
        come as they are ready. Groups that move in step get strict order unless told.
        """
        if window < 1:
            refuse(f"ordered got window={window}", "give a number of items, 1 for strict order")
        return Stream(_checked(stream, "ordered").producer, window=window, epochs=stream.epochs)

    def epochs(self, stream: Stream, count: int) -> Stream:
        """The same stream for a consumer that passes over an iteration's items `count` times."""
        if count < 1:
            refuse(f"epochs got count={count}", "give at least 1")
        return Stream(_checked(stream, "epochs").producer, window=stream.window, epochs=count)

    def loop(self, stream: Stream, *, rounds: float = 0.0) -> Loop:
        """The head of a feedback loop that `stream` enters; `feed` what goes round again to it.

        An iteration of it ends when no item is left inside. Items keep to one rank of each group on their rounds, and
        come as they are ready: a stage takes those that are there.
        `rounds` tells planners how often an item goes round in the mean, 0 where that is not known; no result depends
        on it.
        """
        loop = Loop(_checked(stream, "loop").producer, rounds)
        self._loops.append(loop)
        return loop

    def publish(self, source: StageProxy, *, to: StageProxy) -> None:
        """Sends `source`'s weights to `to` once its stages have ended the iteration; a stage of its own."""
        for proxy in (source, to):
            if not isinstance(proxy, StageProxy):
                refuse(f"publish got a {type(proxy).__name__}", "give it two groups: flow.publish(actor, to=rollout)")
        work = [stage for stage in self._graph.stages if stage.kind == pb.STAGE_KIND_WORK]
        after = [stage.name for stage in work if stage.group == source._name]
        if not after:
            refuse(f"publish of {source._name} comes before any of its stages", "publish after the stage that trains")
        name = f"publish:{source._name}->{to._name}"
        self._stage(name, pb.STAGE_KIND_PUBLISH, (), group=source._name, to=to._name, after=after)

    def _work(self, group: str, method: str, streams: tuple[Stream, ...]) -> Stream:
        name = f"{group}.{method}"
        for stream in streams:
            _checked(stream, name)
        if not streams:
            refuse(f"{name} got no stream", "give it the stream of the items that it works on")
        stream = streams[0] if len(streams) == 1 else self._stage(f"join:{name}", pb.STAGE_KIND_JOIN, streams)
        in_step = next(g.in_step for g in self._graph.groups if g.name == group)
        windows = [s.window for s in streams if s.window is not None]
        window = max(windows) if windows else int(in_step)
        epochs = max(s.epochs for s in streams)
        made = self._stage(
            name, pb.STAGE_KIND_WORK, (stream,), group=group, method=method, order_window=window, epochs=epochs
        )
        if windows:
            self._ordered.add(made.producer)
        return made

    def _stage(self, name: str, kind: pb.StageKind, streams: tuple[Stream, ...], **fields: Any) -> Stream:
        for stream in streams:
            _checked(stream, name)
        if not streams and kind in (pb.STAGE_KIND_MERGE, pb.STAGE_KIND_JOIN):
            refuse(f"{name} got no stream", "give it at least one")
        name = self._unique(name)
        # A gather undoes the last expansion on the way to it.
        stack = self._stacks.get(streams[0].producer, ()) if streams else ()
        expansion = 1.0 / stack[-1] if kind == pb.STAGE_KIND_GATHER and stack else 1.0
        expansion = self._expansions.get(name, expansion)
        if kind == pb.STAGE_KIND_GATHER:
            stack = stack[:-1]
        elif expansion != 1.0:
            stack = (*stack, expansion)
        self._stacks[name] = stack
        self._graph.stages.append(pb.Stage(name=name, kind=kind, expansion=expansion, location=location(), **fields))
        for stream in streams:
            self._graph.streams.append(pb.Stream(producer=stream.producer, consumer=name))
            if isinstance(stream, Loop):
                stream.heads.append(name)
        return Stream(name)

    def _unique(self, name: str) -> str:
        unique, number = name, 1
        while unique in self._used:
            number += 1
            unique = f"{name}#{number}"
        self._used.add(unique)
        return unique

    def _finish(self, returned: object) -> None:
        if returned is None:
            streams: tuple[object, ...] = ()
        elif isinstance(returned, Mapping):
            streams = tuple(returned.values())
        else:
            streams = returned if isinstance(returned, tuple) else (returned,)
        for stream in streams:
            if not isinstance(stream, Stream):
                refuse(f"the program returned a {type(stream).__name__}", "return the streams of its results, or None")
        if not any(stage.kind == pb.STAGE_KIND_SOURCE for stage in self._graph.stages):
            refuse("the program has no source", "start from flow.source")
        self._stage("sink", pb.STAGE_KIND_SINK, tuple(s for s in streams if isinstance(s, Stream)))
        self._graph.stages[-1].location = ""
        for loop in self._loops:
            if not loop.heads:
                refuse(
                    f"no stage takes the loop of {loop.producer}", "give the loop itself to the stage it begins with"
                )
            if not loop.returns:
                refuse(
                    f"the loop at {loop.heads[0]} is never fed", "feed it the items that go round again: loop.feed(...)"
                )
            for head in loop.heads:
                for stream in loop.returns:
                    self._graph.streams.append(
                        pb.Stream(producer=stream.producer, consumer=head, feedback=True, rounds=loop.rounds)
                    )
        in_cycles = Graph(self._graph).in_cycles
        for stage in self._graph.stages:
            if stage.name in in_cycles and stage.name not in self._ordered:  # in step; inside a loop there is no order
                stage.order_window = 0
        named = {name for stage in self._graph.stages for name in (stage.group, stage.to)}
        used = [group for group in self._graph.groups if group.name in named]
        del self._graph.groups[:]
        self._graph.groups.extend(used)


def _trace_once(
    program: Program, groups: Mapping[str, Spec], source_items: int, name: str, expansions: dict[str, float]
) -> pb.WorkflowGraph:
    message = pb.WorkflowGraph(name=name, source_items=source_items)
    for group, spec in groups.items():
        message.groups.append(group_message(group, spec))
    flow = Flow(message, expansions)
    flow._finish(program(flow, **{group: StageProxy(flow, spec, group) for group, spec in groups.items()}))
    for stage in expansions:
        if stage not in flow._used:
            near = difflib.get_close_matches(stage, flow._used, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TraceError(f"trace {name}: expansions names {stage!r}, want one of its stages{hint}")
    return message


def group_message(name: str, spec: Spec) -> pb.WorkerGroup:
    """What a planner needs to know of a group."""
    return pb.WorkerGroup(
        name=name,
        device_kind=spec.device_kind,
        devices_per_rank=spec.devices_per_rank or 0,
        min_devices=spec.devices_per_rank or 1,
        can_offload=spec.can_offload,
        in_step=spec.in_step,
    )


def _checked(stream: object, use: str) -> Stream:
    if not isinstance(stream, Stream):
        refuse(f"{use} got a {type(stream).__name__}", "give it a stream; settings belong to the group's config")
    return stream


def _short(target: str) -> str:
    return target.rpartition(":")[2].rpartition(".")[2]


def _difference(first: pb.WorkflowGraph, second: pb.WorkflowGraph) -> str:
    remedy = "a program must say the same each time: take clocks, chance and changing state out of it"
    for one, other in zip(first.stages, second.stages, strict=False):
        if one != other:
            return f"{other.location}: traced twice, {one.name} at {one.location} became {other.name}: {remedy}"
    if len(first.stages) != len(second.stages):
        longer = max(first, second, key=lambda message: len(message.stages))
        stage = longer.stages[min(len(first.stages), len(second.stages))]
        return f"{stage.location}: traced twice, {stage.name} is there only once: {remedy}"
    return f"{first.name}: traced twice, its streams differ: {remedy}"
