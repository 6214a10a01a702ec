"""What a program may not say, found in its graph: each item is to be known by its place, in every stream.

A stage gives what it takes once, halves of a split have no item in common, and a loop lets each item out once. So a
place comes once by a stream, unless the program says otherwise; then only the program's result can take it.
"""

from collections.abc import Iterator
from itertools import combinations

from m2flow.flow.errors import TraceError
from m2flow.flow.graph import GLUE, Graph
from m2flow.proto.flow.v1 import flow_pb2 as pb

_PASSES = frozenset({pb.STAGE_KIND_MAP, pb.STAGE_KIND_FILTER, pb.STAGE_KIND_SINK})


def check_program(graph: Graph) -> None:
    """Raises TraceError on a program that could not be run: each reason, with its line of the program."""
    for rule in (_feeds, _heads, _waits, _repeats, _merges, _quotas):
        # Later rules read what earlier ones have checked.
        if found := [f"{stage.location}: {stage.name} {problem}" for stage, problem in rule(graph)]:
            raise TraceError("\n".join(found))


_Found = Iterator[tuple[pb.Stage, str]]


def _feeds(graph: Graph) -> _Found:
    for stream, loop in zip((s for s in graph.streams if s.feedback), graph.cycles, strict=True):
        head = graph.stages[stream.consumer]
        if stream.producer not in loop:
            yield (
                head,
                f"begins a loop that {stream.producer} is fed to, and does not come of: feed what goes round",
            )
        if all(graph.stages[name].kind != pb.STAGE_KIND_FILTER for name in loop):
            yield head, "begins a loop that nothing leaves: split what goes round from what is done"


def _heads(graph: Graph) -> _Found:
    for stage in graph.stages.values():
        before = [*graph.glue_before(stage.name), stage]
        heads = [one.name for one in before if graph.inputs(one.name, feedback=True)]
        if stage.group and len(heads) > 1:
            yield stage, f"begins several loops ({', '.join(heads)}): feed one of them from all places"
    # In front of the first stage of a loop each half would count what enters the other.
    heads = [s.consumer for s in graph.streams if s.feedback and graph.stages[s.consumer].kind in GLUE]
    in_front = set(heads)
    for stage in (graph.stages[name] for name in graph.order if graph.stages[name].kind in GLUE):
        if not in_front.isdisjoint(s.producer for s in graph.inputs(stage.name, feedback=False)):
            in_front.add(stage.name)
        if stage.name in in_front and stage.branch:
            yield stage, "splits a loop where it begins: split what the loop's first stage gives"


def _waits(graph: Graph) -> _Found:
    """Inside a loop nothing may wait for the end of an iteration, which waits for it."""
    for stage in (stage for stage in graph.stages.values() if stage.name in graph.in_cycles):
        asks = {
            "order": stage.order_window > 0,
            "several epochs": stage.epochs > 1,
            "all items at once": stage.kind == pb.STAGE_KIND_BARRIER,
            "the first of all items": stage.HasField("quota"),
        }
        for what in (what for what, asked in asks.items() if asked):
            yield (
                stage,
                f"is inside a loop and asks for {what}, which the loop's end alone could give: ask for it where the "
                "loop is left",
            )


def _repeats(graph: Graph) -> _Found:
    """What gives a place several times: a stage of several epochs, and what leaves a loop in every round."""
    why: dict[str, str] = {}
    for name in graph.order:
        stage = graph.stages[name]
        for before in (stream.producer for stream in graph.inputs(name, feedback=False)):
            inside = {name} | graph.other_halves(name)
            if any(before in loop and loop.isdisjoint(inside) for loop in graph.cycles):
                why[name] = f"takes {before} out of a loop in every round, not by half of the split that ends it"
            elif before in why:
                why[name] = why[before]
        if name in why and (stage.kind not in _PASSES or stage.HasField("quota")):
            yield (
                stage,
                f"takes items more than once: it {why.pop(name)}; only functions on each item, such as "
                "flow.map(log, ...), and the program's result can take those",
            )
        if stage.epochs > 1:
            why[name] = f"comes behind {name}, which passes over its items {stage.epochs} times"


def _merges(graph: Graph) -> _Found:
    """Streams that no split keeps apart: of each it is known which halves its items came by, on each of its ways."""
    ways: dict[str, list[frozenset[str]]] = {}

    def are_apart(one: str, other: str) -> bool:
        return all(any(b & graph.other_halves(half) for half in a) for a in ways[one] for b in ways[other])

    for name in graph.order:
        stage = graph.stages[name]
        before = [stream.producer for stream in graph.inputs(name, feedback=False)]
        ways[name] = ways[before[0]] if before and not stage.HasField("quota") else [frozenset()]
        if stage.branch:
            ways[name] = [way | {name} for way in ways[name]]
        if stage.kind == pb.STAGE_KIND_MERGE:
            for one, other in combinations(before, 2):
                if not are_apart(one, other):
                    yield (
                        stage,
                        f"takes {one} and {other}, which may hold the same item: merge halves of a split, and join the "
                        "same item that comes by several ways",
                    )
            ways[name] = [way for one in before for way in ways[one]]


def _quotas(graph: Graph) -> _Found:
    quotas = {name for name, stage in graph.stages.items() if stage.HasField("quota")}
    for name in quotas:
        for other in quotas & graph.ancestors(name):
            yield graph.stages[name], f"takes what {other} gives, which never feeds on for it: put both tests into one"
