"""The traced program: stages, the streams between them, and how many items each of them sees.

A `Graph` wraps the `WorkflowGraph` message, which is what planners read, and keeps beside it what only a runtime needs:
the specification of each worker group.
"""

from collections.abc import Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from math import ceil

from google.protobuf import json_format

from m2flow.flow._drawing import Row, mermaid, text
from m2flow.flow.errors import GraphError
from m2flow.flow.spec import Spec
from m2flow.proto.flow.v1 import flow_pb2 as pb

# Stages that flow runs itself, inside the process of whoever consumes their stream.
GLUE = frozenset(
    {
        pb.STAGE_KIND_MAP,
        pb.STAGE_KIND_FILTER,
        pb.STAGE_KIND_GATHER,
        pb.STAGE_KIND_BARRIER,
        pb.STAGE_KIND_MERGE,
        pb.STAGE_KIND_JOIN,
    }
)


class Graph:
    """One program as stages and streams; immutable. Build it with `trace`, or from a message."""

    def __init__(self, message: pb.WorkflowGraph, specs: Mapping[str, Spec] | None = None) -> None:
        """Checks the message. Raises GraphError on a name twice, an unknown end of a stream, or a bare cycle.

        Without specifications it can be planned and drawn, and not run.
        """
        self._message = pb.WorkflowGraph()
        self._message.CopyFrom(message)
        self.specs: Mapping[str, Spec] = dict(specs or {})
        self.name = message.name
        self.source_items = message.source_items
        self.stages = {stage.name: stage for stage in self._message.stages}
        self.streams = tuple(self._message.streams)
        self.groups = {group.name: group for group in self._message.groups}
        self._check()

    def to_proto(self) -> pb.WorkflowGraph:
        """A copy of the message."""
        copy = pb.WorkflowGraph()
        copy.CopyFrom(self._message)
        return copy

    def to_json(self) -> str:
        """The message as proto JSON."""
        return json_format.MessageToJson(self._message, preserving_proto_field_name=True)

    def to_text(self) -> str:
        """A line per stage, in order: what it is, what it takes, and how many items it sees."""
        return text(f"{self.name}: {self.source_items} items an iteration", self._rows())

    def to_mermaid(self) -> str:
        """A Mermaid flowchart."""
        return mermaid(self._rows())

    def inputs(self, stage: str, *, feedback: bool | None = None) -> list[pb.Stream]:
        """The streams into a stage, in the program's order; `feedback` chooses one sort."""
        return [s for s in self.streams if s.consumer == stage and feedback in (None, s.feedback)]

    def stages_of(self, group: str) -> list[pb.Stage]:
        """The stages that a group runs, in order; a publish belongs to the group whose weights it sends."""
        return [self.stages[name] for name in self.order if self.stages[name].group == group]

    def kinds(self, *kinds: pb.StageKind) -> list[pb.Stage]:
        """The stages of some kinds, in order."""
        return [self.stages[name] for name in self.order if self.stages[name].kind in kinds]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The stages, producers before consumers; feedback streams do not count.

        What comes after a stage in a loop comes after all of that loop.
        """
        before: dict[str, list[str]] = {name: list(stage.after) for name, stage in self.stages.items()}
        for stream in self.streams:
            if not stream.feedback:
                before[stream.consumer].append(stream.producer)
        for loop in self.cycles:
            for name, after in before.items():
                if name not in loop and not loop.isdisjoint(after):
                    after += loop
        try:
            return tuple(TopologicalSorter(before).static_order())
        except CycleError as error:
            cycle = " -> ".join(error.args[1])
            raise GraphError(f"graph {self.name}: {cycle} is a cycle; want one of its streams to be feedback") from None

    @cached_property
    def _volumes(self) -> dict[str, tuple[float, float]]:
        volumes: dict[str, tuple[float, float]] = {}
        for name in self.order:
            stage = self.stages[name]
            fed = [volumes[s.producer][1] for s in self.inputs(name, feedback=False)]
            if stage.kind == pb.STAGE_KIND_SOURCE:
                fed = [float(self.source_items)]
            # A join unites the items that its streams share; everything else sees the sum of its streams.
            entering = (max(fed, default=0.0)) if stage.kind == pb.STAGE_KIND_JOIN else sum(fed)
            leaving = entering * stage.expansion
            if stage.HasField("quota"):
                leaving = min(leaving, float(stage.quota.count))
            volumes[name] = (entering, leaving)
        return volumes

    def volume(self, stage: str) -> int:
        """Items into a stage in one iteration, at least 1: rounds of a feedback loop count once."""
        return max(1, ceil(self._volumes[self._known(stage)][0] - 1e-9))

    def volume_out(self, stage: str) -> int:
        """Items out of a stage in one iteration, at least 1."""
        return max(1, ceil(self._volumes[self._known(stage)][1] - 1e-9))

    def workers_before(self, stage: str) -> set[str]:
        """The work stages (and sources) whose items reach a stage through glue alone: the far ends of its inbox."""
        return {name for name in self._behind_glue(stage) if self.stages[name].kind not in GLUE}

    def ancestors(self, stage: str, *, feedback: bool | None = None) -> set[str]:
        """Every stage that must have run for this one to see its items, `after` included; `feedback` as in `inputs`."""
        found: set[str] = set()
        frontier = [stage]
        while frontier:
            name = frontier.pop()
            for before in [*(s.producer for s in self.inputs(name, feedback=feedback)), *self.stages[name].after]:
                if before not in found:
                    found.add(before)
                    frontier.append(before)
        return found

    def glue_before(self, stage: str) -> tuple[pb.Stage, ...]:
        """The glue between a stage and its far producers, in order."""
        behind = self._behind_glue(stage)
        return tuple(self.stages[n] for n in self.order if n in behind and self.stages[n].kind in GLUE)

    def into(self, stage: str) -> set[tuple[str, str]]:
        """Every edge between a stage and its far producers: the streams on the way, and the short cut past the glue."""
        between = {stage} | {name for name in self._behind_glue(stage) if self.stages[name].kind in GLUE}
        found = {(stream.producer, name) for name in between for stream in self.inputs(name)}
        return found | {(far, stage) for far in self.workers_before(stage)}

    @cached_property
    def cycles(self) -> tuple[frozenset[str], ...]:
        """The stages of each feedback stream's loop: what lies on a way from its head back to it, by any stream.

        Streams that go back to one head have one loop; that of an outer head holds all of an inner one.
        """
        return tuple(self._loop(stream.consumer) for stream in self.streams if stream.feedback)

    def _loop(self, head: str) -> frozenset[str]:
        found = {head}
        frontier = [stream.producer for stream in self.inputs(head, feedback=True)]
        while frontier:
            name = frontier.pop()
            if name not in found and head in self.ancestors(name, feedback=False):
                found.add(name)
                frontier += [stream.producer for stream in self.inputs(name)]
        return frozenset(found)

    def other_halves(self, stage: str) -> set[str]:
        """The stages that hold the items of a stream that this one, half of a split of it, does not.

        There are several where a program splits a stream twice by one test, and none for what is no half.
        """
        one, inputs = self.stages[stage], self._producers(stage)
        others = (other for other in self.stages.values() if other.branch not in ("", one.branch))
        alike = {other.name for other in others if other.method == one.method}
        return {name for name in alike if one.branch and self._producers(name) == inputs}

    @cached_property
    def in_cycles(self) -> frozenset[str]:
        """The stages that items pass again and again: those of all loops."""
        return frozenset().union(*self.cycles)

    @cached_property
    def before_quotas(self) -> frozenset[str]:
        """The stages that a quota draws on: how many items they see is known at the end only."""
        quotas = [name for name, stage in self.stages.items() if stage.HasField("quota")]
        return frozenset().union(*(self.ancestors(name) for name in quotas))

    def _behind_glue(self, stage: str) -> set[str]:
        found: set[str] = set()
        frontier = [stream.producer for stream in self.inputs(stage)]
        while frontier:
            name = frontier.pop()
            if name not in found:
                found.add(name)
                frontier += [s.producer for s in self.inputs(name)] if self.stages[name].kind in GLUE else []
        return found

    def _producers(self, stage: str) -> list[str]:
        return [stream.producer for stream in self.inputs(stage, feedback=False)]

    def _rows(self) -> list[Row]:
        return [Row(self.stages[n], self.inputs(n), self.volume(n), self.volume_out(n)) for n in self.order]

    def _known(self, stage: str) -> str:
        if stage not in self.stages:
            raise GraphError(f"graph {self.name}: got stage {stage!r}, want one of {', '.join(self.stages)}")
        return stage

    def _check(self) -> None:
        if len(self.stages) != len(self._message.stages):
            raise GraphError(f"graph {self.name}: two stages have one name, want a name each")
        for stream in self.streams:
            self._known(stream.producer)
            self._known(stream.consumer)
        for stage in self.stages.values():
            for name in stage.after:
                self._known(name)
            for group in filter(None, (stage.group, stage.to)):
                if group not in self.groups:
                    raise GraphError(f"graph {self.name}: {stage.name} names group {group!r}, want one of its groups")
        assert self.order, "a traced graph has a source and a sink"
