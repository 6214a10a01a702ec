"""Whether a Chrome trace is one that Perfetto shows whole: its schema, its slices' nesting, its arrows' ends.

The rules are those of the Trace Event Format: complete events ("X") have a start and a duration in microseconds, and on
one track they nest or are apart; an arrow is a start ("s") and a finish ("f") with one id, in this order in time, each
inside a slice of its track.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["trace_problems"]

Event = Mapping[str, object]
Track = tuple[object, object]
Slices = Mapping[Track, Sequence[tuple[float, float, str]]]
_TOLERANCE_US = 1e-3


def trace_problems(trace: Mapping[str, object]) -> list[str]:
    """Returns everything that is wrong with the trace, a line each; empty when nothing is."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        return [f"trace: got keys {sorted(trace)}, want traceEvents with a list"]
    if malformed := [problem for event in events for problem in _schema(event)]:
        return malformed
    slices: dict[Track, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return [*_nesting(slices), *_arrows(events, slices)]


def _schema(event: object) -> Iterator[str]:
    if not isinstance(event, dict) or event.get("ph") not in ("X", "M", "s", "t", "f", "C", "i"):
        yield f"{event!r}: got no known phase, want X, M, s, t, f, C or i"
        return
    numbers = {"X": ("ts", "dur", "pid", "tid"), "M": ("pid",)}.get(event["ph"], ("ts", "pid", "tid"))
    for key in numbers:
        value = event.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{event!r}: {key} is {value!r}, want a number"
        elif key == "dur" and value < 0:
            yield f"{event!r}: lasts {value} us, want at least 0"
    if not isinstance(event.get("name"), str):
        yield f"{event!r}: has no name"
    if event["ph"] in ("s", "t", "f") and "id" not in event:
        yield f"{event!r}: an arrow without id"


def _nesting(slices: Slices) -> Iterator[str]:
    for track, spans in slices.items():
        open_spans: list[tuple[float, float, str]] = []
        for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_spans and open_spans[-1][1] <= start + _TOLERANCE_US:
                open_spans.pop()
            if open_spans and end > open_spans[-1][1] + _TOLERANCE_US:
                outer = open_spans[-1]
                yield f"track {track}: {name} [{start}, {end}] cuts {outer[2]} [{outer[0]}, {outer[1]}]"
            open_spans.append((start, end, name))


def _arrows(events: Sequence[Event], slices: Slices) -> Iterator[str]:
    ends: dict[tuple[object, ...], dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            arrow = ends[event.get("cat"), event["id"], event["name"]]
            if event["ph"] in arrow:
                yield f"arrow {event['id']}: has two ends of phase {event['ph']}"
            arrow[str(event["ph"])] = event
    for key, pair in ends.items():
        if set(pair) != {"s", "f"}:
            yield f"arrow {key}: got only {sorted(pair)}, want a start and a finish"
            continue
        if float(str(pair["f"]["ts"])) < float(str(pair["s"]["ts"])):
            yield f"arrow {key}: ends before it starts"
        for event in pair.values():
            at = float(str(event["ts"]))
            around = slices.get((event["pid"], event["tid"]), [])
            if not any(start - _TOLERANCE_US <= at <= end + _TOLERANCE_US for start, end, _ in around):
                yield f"arrow {key}: its {event['ph']} at {at} is in no slice of its track"
