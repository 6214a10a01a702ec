"""A graph for people: as lines of text, and as a Mermaid flowchart."""

from collections.abc import Sequence
from typing import NamedTuple

from m2flow.proto.flow.v1 import flow_pb2 as pb

_SHAPES = {
    pb.STAGE_KIND_SOURCE: ("([", "])"),
    pb.STAGE_KIND_SINK: ("([", "])"),
    pb.STAGE_KIND_WORK: ("[", "]"),
    pb.STAGE_KIND_PUBLISH: ("[/", "/]"),
}
_GLUE_SHAPE = ("{{", "}}")


class Row(NamedTuple):
    """A stage, the streams into it, and its items in and out of an iteration."""

    stage: pb.Stage
    inputs: Sequence[pb.Stream]
    volume: int
    volume_out: int


def kind_word(kind: pb.StageKind) -> str:
    """The word of a stage kind: "gather"."""
    return pb.StageKind.Name(kind).removeprefix("STAGE_KIND_").lower()


def text(title: str, rows: Sequence[Row]) -> str:
    """A line per stage: name, kind, inputs, items in and out, and what is special about it."""
    lines = [title]
    width = max(len(row.stage.name) for row in rows)
    for row in rows:
        taken = ", ".join(s.producer + (" (feedback)" if s.feedback else "") for s in row.inputs) or "-"
        counts = f"{row.volume} -> {row.volume_out}"
        lines.append(
            f"  {row.stage.name:<{width}}  {kind_word(row.stage.kind):<8} <- {taken}  [{counts}]{_notes(row.stage)}"
        )
    return "\n".join(lines) + "\n"


def mermaid(rows: Sequence[Row]) -> str:
    """A Mermaid flowchart: boxes are work, hexagons are glue, feedback and publications are dotted."""
    ids = {row.stage.name: f"s{number}" for number, row in enumerate(rows)}
    lines = ["flowchart LR"]
    for row in rows:
        left, right = _SHAPES.get(row.stage.kind, _GLUE_SHAPE)
        lines.append(f'    {ids[row.stage.name]}{left}"{row.stage.name}"{right}')
    for row in rows:
        for stream in row.inputs:
            arrow = "-. feedback .->" if stream.feedback else "-->"
            lines.append(f"    {ids[stream.producer]} {arrow} {ids[stream.consumer]}")
        lines += [f"    {ids[before]} -. then .-> {ids[row.stage.name]}" for before in row.stage.after]
        if row.stage.kind == pb.STAGE_KIND_PUBLISH:
            receivers = [other.stage.name for other in rows if other.stage.group == row.stage.to]
            lines += [f"    {ids[row.stage.name]} -. weights .-> {ids[name]}" for name in receivers[:1]]
    return "\n".join(lines) + "\n"


def _notes(stage: pb.Stage) -> str:
    notes = []
    if stage.by:
        notes.append(f"by {stage.by}")
    if stage.to:
        notes.append(f"to {stage.to}")
    if stage.branch:
        notes.append(f"keeps {stage.branch}")
    if stage.HasField("quota"):
        notes.append(f"first {stage.quota.count}, surplus {'carried' if stage.quota.carry_surplus else 'dropped'}")
    if stage.order_window:
        notes.append("in source order" if stage.order_window == 1 else f"in windows of {stage.order_window}")
    if stage.epochs > 1:
        notes.append(f"{stage.epochs} epochs")
    if stage.after:
        notes.append(f"after {', '.join(stage.after)}")
    if stage.location:
        notes.append(f"at {stage.location}")
    return "  " + "; ".join(notes) if notes else ""
