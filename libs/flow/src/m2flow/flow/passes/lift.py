"""The graph as a micro flow that nothing has been decided about: every stage, glue too, has an inbox of its own."""

from m2flow.flow._drawing import kind_word
from m2flow.flow.glue import LEFT, SPLIT
from m2flow.flow.graph import GLUE, Graph
from m2flow.flow.microflow import Inbox, MicroFlow, MicroGroup, MicroStage, Op
from m2flow.proto.flow.v1 import flow_pb2 as pb


def lift(graph: Graph) -> MicroFlow:
    """Copies stages and groups of a graph."""
    return MicroFlow(
        name=graph.name,
        source_items=graph.source_items,
        stages=tuple(_stage(graph, graph.stages[name]) for name in graph.order),
        groups=tuple(
            MicroGroup(
                group.name,
                in_step=group.in_step,
                restarts=group.name in graph.specs and graph.specs[group.name].on_death != "stop",
            )
            for group in graph.groups.values()
        ),
    )


def _stage(graph: Graph, stage: pb.Stage) -> MicroStage:
    ports = tuple(dict.fromkeys(stream.producer for stream in graph.inputs(stage.name)))
    gathers = {gather.name for gather in graph.kinds(pb.STAGE_KIND_GATHER)}
    feedback = tuple(stream.producer for stream in graph.inputs(stage.name, feedback=True))
    if stage.kind in GLUE:
        ops: tuple[Op, ...] = (_op(graph, stage, ports),)
        head = stage.name
    elif len(ports) > 1:  # into the head of a loop: as they arrive
        head = f"enter>{stage.name}"
        ops = (Op(head, "enter", ports),)
    else:
        ops, head = (), ports[0] if ports else ""
    return MicroStage(
        name=stage.name,
        kind=kind_word(stage.kind),
        group=stage.group,
        method=stage.method,
        to=stage.to,
        after=tuple(stage.after),
        keeps=any(stage.name in loop and not loop & gathers for loop in graph.cycles),
        inbox=Inbox(ports, head, ops, feedback=feedback, window=stage.order_window, epochs=max(1, stage.epochs)),
    )


def _reason(graph: Graph, stage: pb.Stage) -> str:
    """Why what a filter drops goes on as a tombstone, "" where it leaves none.

    Half of a split in a loop says nothing of what goes on by the other half, and speaks where what it drops leaves a
    loop that it stays in: the head hears that, and counts.
    """
    if not stage.branch:
        return stage.name
    if not {stream.producer for stream in graph.inputs(stage.name)} & graph.in_cycles:
        return SPLIT
    others = graph.other_halves(stage.name)
    return LEFT if any(stage.name in loop and loop.isdisjoint(others) for loop in graph.cycles) else ""


def _op(graph: Graph, stage: pb.Stage, ports: tuple[str, ...]) -> Op:
    quota = stage.HasField("quota")
    return Op(
        name=stage.name,
        kind="first" if quota else kind_word(stage.kind),
        inputs=ports,
        function=stage.method,
        by=stage.by,
        branch=stage.branch,
        looped=stage.name in graph.in_cycles,
        reason=_reason(graph, stage),
        count=stage.quota.count if quota else 0,
        carry_surplus=quota and stage.quota.carry_surplus,
    )
