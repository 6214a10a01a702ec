"""What happened in a run, for people: a Perfetto trace, and where every second of each device went.

A device second has one cause. Where several ranks of a device say different things, the first of these holds:

    waiting for output     a stage has a result and its consumer's inbox is full
    busy                   a stage runs
    switching              a worker is loaded or unloaded
    waiting for the lock   work is there, and others hold devices that it needs too
    waiting for input      a stage has nothing to work on yet
    waiting for weights    the next weights are not there yet
    bubble                 every stage of the device is done, or has not begun, while the iteration goes on elsewhere
    unattributed           none of these: the runtime's own work between two spans
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from m2flow.proto.flow.v1 import flow_pb2 as pb

CAUSES = (
    "busy",
    "waiting for input",
    "waiting for the lock",
    "waiting for weights",
    "waiting for output",
    "switching",
    "bubble",
    "unattributed",
)
_CAUSE_OF = {
    pb.SPAN_KIND_WAIT_OUTPUT: "waiting for output",
    pb.SPAN_KIND_BUSY: "busy",
    pb.SPAN_KIND_ONLOAD: "switching",
    pb.SPAN_KIND_OFFLOAD: "switching",
    pb.SPAN_KIND_WAIT_LOCK: "waiting for the lock",
    pb.SPAN_KIND_WAIT_INPUT: "waiting for input",
    pb.SPAN_KIND_WAIT_WEIGHTS: "waiting for weights",
}
# In the order of the list above: of two spans at one moment the earlier in here says what the device does.
_PRECEDENCE = {kind: place for place, kind in enumerate(_CAUSE_OF)}


@dataclass(frozen=True)
class DeviceAccount:
    """Where the time of one device went: seconds by cause, which add up to `seconds`."""

    device_id: int
    seconds: float
    causes: Mapping[str, float] = field(default_factory=dict)

    @property
    def unattributed(self) -> float:
        """The part of the time, 0 to 1, that has no cause."""
        return self.causes["unattributed"] / self.seconds if self.seconds else 0.0


def account(
    timeline: pb.Timeline, start_ns: int, end_ns: int, device_ids: Iterable[int] | None = None
) -> list[DeviceAccount]:
    """Accounts for the time from `start_ns` to `end_ns` on each device (all that have spans, unless told)."""
    spans: dict[int, list[pb.Span]] = {}
    for span in timeline.spans:
        if span.end_ns > start_ns and span.start_ns < end_ns:
            for number in span.device_ids:
                spans.setdefault(number, []).append(span)
    wanted = sorted(spans) if device_ids is None else sorted(device_ids)
    return [_account_device(number, spans.get(number, []), start_ns, end_ns) for number in wanted]


def _account_device(number: int, spans: list[pb.Span], start_ns: int, end_ns: int) -> DeviceAccount:
    causes = dict.fromkeys(CAUSES, 0)
    # Sweep over the moments at which something begins or ends; in between, the first by precedence holds.
    changes = sorted(
        [(max(span.start_ns, start_ns), 1, _PRECEDENCE[span.kind]) for span in spans]
        + [(min(span.end_ns, end_ns), -1, _PRECEDENCE[span.kind]) for span in spans]
    )
    kinds = list(_CAUSE_OF)
    active = [0] * len(kinds)
    first = min((span.start_ns for span in spans), default=end_ns)
    last = max((span.end_ns for span in spans), default=start_ns)
    causes["bubble"] += max(0, min(first, end_ns) - start_ns) + max(0, end_ns - max(last, start_ns))
    for (at, step, place), (following, _, _) in pairwise(changes):
        active[place] += step
        if following > at:
            holding = next((kind for kind, count in zip(kinds, active, strict=True) if count), None)
            causes["unattributed" if holding is None else _CAUSE_OF[holding]] += following - at
    if not spans:
        causes["bubble"] = end_ns - start_ns
    return DeviceAccount(number, (end_ns - start_ns) / 1e9, {cause: ns / 1e9 for cause, ns in causes.items()})


def account_table(accounts: Sequence[DeviceAccount]) -> str:
    """A line per device and one for all: seconds, and the part of each cause in per cent."""
    short = [cause.replace("waiting for the ", "").replace("waiting for ", "") for cause in CAUSES]
    lines = ["device  seconds  " + "  ".join(f"{word:>12}" for word in short)]
    for line in accounts:
        parts = [line.causes[cause] / line.seconds if line.seconds else 0.0 for cause in CAUSES]
        lines.append(f"{line.device_id:>6}  {line.seconds:7.3f}  " + "  ".join(f"{part:12.1%}" for part in parts))
    total = sum(line.seconds for line in accounts)
    parts = [sum(line.causes[cause] for line in accounts) / total if total else 0.0 for cause in CAUSES]
    lines.append(f"   all  {total:7.3f}  " + "  ".join(f"{part:12.1%}" for part in parts))
    return "\n".join(lines) + "\n"


def chrome_trace(timelines: Iterable[pb.Timeline]) -> dict[str, Any]:
    """Spans as a Chrome trace, which Perfetto opens: a process per group, a thread per rank and stage, and an arrow
    for each item from the span that made it to the one that took it."""
    events: list[dict[str, Any]] = []
    groups: dict[str, int] = {}
    threads: dict[tuple[str, int, str], int] = {}
    made: dict[str, tuple[int, int, float]] = {}
    arrows = count(1)
    # In order of time: in a loop an item is made again and again, and whoever takes it takes the latest.
    for span in sorted((span for timeline in timelines for span in timeline.spans), key=lambda span: span.start_ns):
        if span.group not in groups:
            groups[span.group] = len(groups) + 1
            events.append(_name("process_name", span.group, groups[span.group], 0))
        process = groups[span.group]
        key = (span.group, span.rank, span.stage)
        if key not in threads:
            threads[key] = len(threads) + 1
            events.append(_name("thread_name", f"rank {span.rank}: {span.stage}", process, threads[key]))
        thread = threads[key]
        events.append(_event(span, process, thread))
        for item in span.inputs:
            if item in made:
                begin = {"ph": "s", "pid": made[item][0], "tid": made[item][1]}
                end = {"ph": "f", "bp": "e", "pid": process, "tid": thread, "ts": span.start_ns / 1e3}
                flow = {"cat": "item", "name": item, "id": next(arrows)}
                # An item that was sent on before its maker's span ended starts where it was taken at the latest.
                events += [begin | flow | {"ts": min(made[item][2], span.start_ns / 1e3)}, end | flow]
        made |= dict.fromkeys(span.outputs, (process, thread, span.end_ns / 1e3))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(timelines: Iterable[pb.Timeline], path: Path) -> None:
    """Writes `chrome_trace` as JSON."""
    path.write_text(json.dumps(chrome_trace(timelines)))


def _event(span: pb.Span, process: int, thread: int) -> dict[str, Any]:
    word = pb.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower()
    return {
        "ph": "X",
        "name": span.stage if span.kind == pb.SPAN_KIND_BUSY else word,
        "cat": word,
        "pid": process,
        "tid": thread,
        "ts": span.start_ns / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": {"iteration": span.iteration, "items": span.items, "tokens": span.tokens},
    }


def _name(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
