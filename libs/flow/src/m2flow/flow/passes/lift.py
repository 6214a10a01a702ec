"""The graph as a micro flow that nothing has been decided about: every stage, glue too, has an inbox of its own."""

from m2flow.flow._drawing import kind_word
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
    feedback = tuple(stream.producer for stream in graph.inputs(stage.name, feedback=True))
    if stage.kind in GLUE:
        ops: tuple[Op, ...] = (_op(stage, ports, _is_silent(graph, stage)),)
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
        inbox=Inbox(ports, head, ops, feedback=feedback, window=stage.order_window, epochs=max(1, stage.epochs)),
    )


def _is_silent(graph: Graph, stage: pb.Stage) -> bool:
    """Whether half of a split in a loop says nothing of what it drops, because that goes on by the other half.

    It speaks where what it drops leaves the loop that it stays in: the head hears the tombstone, and counts.
    """
    if not stage.branch:
        return False
    above = {stream.producer for stream in graph.inputs(stage.name)}
    split, _, half = stage.name.rpartition(":")
    other = f"{split}:{'no' if stage.branch == 'yes' else 'yes'}{half.removeprefix(stage.branch)}"
    leaves = any(stage.name in cycle and other not in cycle for cycle in graph.cycles)
    return bool(above & graph.in_cycles) and not leaves


def _op(stage: pb.Stage, ports: tuple[str, ...], silent: bool) -> Op:
    quota = stage.HasField("quota")
    return Op(
        name=stage.name,
        kind="first" if quota else kind_word(stage.kind),
        inputs=ports,
        function=stage.method,
        by=stage.by,
        branch=stage.branch,
        silent=silent,
        count=stage.quota.count if quota else 0,
        carry_surplus=quota and stage.quota.carry_surplus,
    )
