"""Fuse: glue moves into the inbox of whoever consumes it.

    before   reward.score -> [gather] -> [map] -> actor.train         three channels, two of them between functions
    after    reward.score -> actor.train (gather | map)               one channel; glue runs at its consumer

Glue that several stages consume is run by each of them: it is pure, and cheaper than a process and a copy. The first of
them counts what is lost in it. A filter in front of all other glue goes on to whoever produces for it: what it drops is
not sent.
"""

from dataclasses import replace

from m2flow.flow.graph import GLUE, Graph
from m2flow.flow.microflow import Inbox, MicroFlow, MicroStage
from m2flow.proto.flow.v1 import flow_pb2 as pb


def fuse(flow: MicroFlow, graph: Graph, plan: pb.ExecutionPlan) -> MicroFlow:
    """Returns the flow without glue stages: their operations are in their consumers' inboxes, in order."""
    glue = {stage.name: stage for stage in flow.stages if graph.stages[stage.name].kind in GLUE}
    kept: list[MicroStage] = []
    counted: set[str] = set()
    for stage in (stage for stage in flow.stages if stage.name not in glue):
        inbox = _sifted(_absorb(stage.inbox, glue))
        ops = tuple(replace(op, counts=op.name not in counted) for op in inbox.ops)
        counted |= {op.name for op in ops}
        kept.append(replace(stage, inbox=replace(inbox, ops=ops)))
    return replace(flow, stages=tuple(kept))


def _absorb(inbox: Inbox, glue: dict[str, MicroStage]) -> Inbox:
    absorbed: dict[str, MicroStage] = {}
    far: list[str] = []
    feedback: list[str] = []

    def visit(port: str, back: bool) -> None:
        if port not in glue:
            far.append(port)
            if back:
                feedback.append(port)
        elif port not in absorbed:
            absorbed[port] = glue[port]
            for deeper in glue[port].inbox.ports:
                visit(deeper, back or deeper in glue[port].inbox.feedback)

    for port in inbox.ports:
        visit(port, port in inbox.feedback)
    ops = tuple(op for name, stage in glue.items() if name in absorbed for op in stage.inbox.ops)
    return replace(
        inbox,
        ports=tuple(dict.fromkeys(far)),
        feedback=tuple(dict.fromkeys(feedback)),
        ops=(*ops, *inbox.ops),
    )


def _sifted(inbox: Inbox) -> Inbox:
    """The inbox without the filters that its producers can run: each alone takes all that one of them gives."""
    fed = [port for op in inbox.ops for port in op.inputs]
    sieves = {
        op.name: op
        for op in inbox.ops
        if op.kind == "filter" and op.inputs[0] in inbox.ports and fed.count(op.inputs[0]) == 1
    }

    def source(name: str) -> str:
        return sieves[name].inputs[0] if name in sieves else name

    ops = tuple(
        replace(op, inputs=tuple(source(name) for name in op.inputs)) for op in inbox.ops if op.name not in sieves
    )
    return replace(inbox, ops=ops, head=source(inbox.head), sieves=tuple(sieves.values()))
