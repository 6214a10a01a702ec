"""A timeline as a picture (SVG) and as a Perfetto trace (JSON)."""

import json
from collections.abc import Iterable
from html import escape

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.sched._words import ranges

_COLOURS = (
    "#4878a8",
    "#e08a3c",
    "#5a9e5a",
    "#b65555",
    "#8a6fb0",
    "#8b6b5c",
    "#c77fae",
    "#7f7f7f",
    "#a9a23c",
    "#3fa3ad",
)
_MOVING = "#c8c8c8"
_WIDTH, _LEFT, _ROW, _TOP = 1000, 190, 26, 46
_MOST = 20_000  # rectangles in a picture: neighbours of one stage are joined beyond it


def svg(timeline: flow_pb2.Timeline, *, title: str = "") -> str:
    """A row a set of devices, a colour a stage, grey for onload and offload; widths are seconds."""
    spans = _joined(timeline.spans)
    end_ns = max((s.end_ns for s in spans), default=1)
    rows = list(dict.fromkeys((s.group, tuple(s.device_ids)) for s in spans))
    stages = list(dict.fromkeys(s.stage for s in spans))
    colour = {stage: _COLOURS[i % len(_COLOURS)] for i, stage in enumerate(stages)}
    height = _TOP + _ROW * len(rows) + 46
    scale = (_WIDTH - _LEFT - 20) / end_ns
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>',
    ]
    for i, stage in enumerate(stages):
        x = _LEFT + 150.0 * i
        parts.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{colour[stage]}"/>')
        parts.append(f'<text x="{x + 14}" y="33">{escape(stage)}</text>')
    for i, (group, ids) in enumerate(rows):
        label = f"{group} on {ranges(ids)}" if ids else group
        parts.append(f'<text x="8" y="{_TOP + _ROW * i + 17}">{escape(label[:28])}</text>')
    for span in spans:
        y = _TOP + _ROW * rows.index((span.group, tuple(span.device_ids))) + 3
        fill = colour[span.stage] if span.kind == flow_pb2.SPAN_KIND_BUSY else _MOVING
        x, width = _LEFT + span.start_ns * scale, max((span.end_ns - span.start_ns) * scale, 0.3)
        seconds = (span.end_ns - span.start_ns) / 1e9
        what = f"{span.stage} {flow_pb2.SpanKind.Name(span.kind)[10:].lower()} {seconds:.4g} s, {span.items} items"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 6}" fill="{fill}" stroke="white" '
            f'stroke-width="0.4"><title>{escape(what)}</title></rect>'
        )
    base = _TOP + _ROW * len(rows) + 14
    for tick in range(6):
        x = _LEFT + (_WIDTH - _LEFT - 20) * tick / 5
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{base - 8}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 6}" text-anchor="middle">{end_ns / 1e9 * tick / 5:.4g} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def perfetto(timeline: flow_pb2.Timeline) -> str:
    """Trace events for https://ui.perfetto.dev: a process a group, a thread a rank, microseconds."""
    groups = list(dict.fromkeys(s.group for s in timeline.spans))
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": i + 1, "args": {"name": group}} for i, group in enumerate(groups)
    ]
    for span in timeline.spans:
        kind = flow_pb2.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower()
        events.append(
            {
                "ph": "X",
                "name": span.stage if span.kind == flow_pb2.SPAN_KIND_BUSY else f"{span.stage} {kind}",
                "cat": kind,
                "pid": groups.index(span.group) + 1,
                "tid": span.rank,
                "ts": span.start_ns / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": {"iteration": span.iteration, "items": span.items, "devices": ranges(span.device_ids)},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _joined(spans: Iterable[flow_pb2.Span]) -> list[flow_pb2.Span]:
    """Spans as they are, or, of a very long timeline, runs of touching spans of one stage as one."""
    found = list(spans)
    if len(found) <= _MOST:
        return found
    open_spans: dict[tuple[str, int], flow_pb2.Span] = {}
    joined: list[flow_pb2.Span] = []
    for span in sorted(found, key=lambda s: s.start_ns):
        before = open_spans.get((span.stage, span.kind))
        if before is not None and span.start_ns - before.end_ns < 1000:
            before.end_ns, before.items = max(span.end_ns, before.end_ns), before.items + span.items
        else:
            copy = flow_pb2.Span()
            copy.CopyFrom(span)
            joined.append(copy)
            open_spans[span.stage, span.kind] = copy
    return joined
