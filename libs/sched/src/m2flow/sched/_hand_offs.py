"""What passes between two stages while nobody works: messages and the lock, read from the spans of a run."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2

_Spans = Sequence[flow_pb2.Span]
Moments = Mapping[str, Sequence[int]]
LATELY = 3  # iterations whose hand-offs count: one alone may be off by a millisecond a hand-off
_MOVES = (flow_pb2.SPAN_KIND_ONLOAD, flow_pb2.SPAN_KIND_OFFLOAD)


def hand_offs(timeline: flow_pb2.Timeline, graph: flow_pb2.WorkflowGraph) -> list[sched_pb2.HandOff]:
    """The seconds of each stage from when a chunk's items were out, and its devices free, until it was at work.

    Of a rank's calls the mean counts, since they add up, of the ranks the slowest, of the iterations the median. What
    comes from the source is out when the iteration begins; what is published, when the sender's last work is over.
    """
    senders = {s.name: s.group for s in graph.stages if s.kind == flow_pb2.STAGE_KIND_PUBLISH}
    by_iteration: dict[int, list[flow_pb2.Span]] = defaultdict(list)
    for span in timeline.spans:
        by_iteration[span.iteration].append(span)
    found: dict[str, list[float]] = defaultdict(list)
    for spans in by_iteration.values():
        for stage, ranks in _gaps(spans, senders).items():
            found[stage].append(max(map(mean, ranks.values())))
    return [sched_pb2.HandOff(stage=stage, seconds=median(values)) for stage, values in sorted(found.items())]


def lately(found: Iterable[sched_pb2.HandOff]) -> dict[str, float]:
    """Seconds by stage: the median of the last three iterations that were measured."""
    by_stage: dict[str, list[float]] = defaultdict(list)
    for one in found:
        by_stage[one.stage].append(one.seconds)
    return {stage: median(seconds[-LATELY:]) for stage, seconds in by_stage.items()}


def _gaps(spans: _Spans, senders: Mapping[str, str]) -> dict[str, dict[int, list[float]]]:
    """By stage and rank, the seconds before each of its calls."""
    begin, out, devices = min(s.start_ns for s in spans), moments(spans), _devices(spans)
    busy = sorted((s for s in spans if s.kind == flow_pb2.SPAN_KIND_BUSY), key=lambda s: s.start_ns)
    gaps: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for span in busy:
        if span.stage in senders:
            if span.group != senders[span.stage]:
                continue
            work = [s.end_ns for s in busy if s.group == span.group and s.stage not in senders]
            ready = max((end for end in work if end <= span.start_ns), default=begin)
        elif span.inputs:
            made = [last_before(out[name], span.start_ns, begin) for name in span.inputs if name in out]
            ready = max(made, default=begin)
        else:
            continue
        idle = min((devices[d].idle_ns(ready, span.start_ns) for d in span.device_ids), default=0)
        gaps[span.stage][span.rank].append(idle / 1e9)
    return gaps


def moments(spans: _Spans) -> Moments:
    """When each item came out, each time that it did: in a loop it does so in every round."""
    out: dict[str, list[int]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.start_ns):
        after = span.output_after_ns if len(span.output_after_ns) == len(span.outputs) else ()
        for place, name in enumerate(span.outputs):
            out[name].append(span.start_ns + after[place] if after else span.end_ns)
    return out


def last_before(moments: Sequence[int], until: int, otherwise: int) -> int:
    """The last of ascending moments that is no later than `until`."""
    at = bisect_right(moments, until)
    return moments[at - 1] if at else otherwise


class _Device:
    """What occupied a device, by end: its work, and the workers that came and went."""

    def __init__(self) -> None:
        self.work: list[flow_pb2.Span] = []
        self.moves: list[flow_pb2.Span] = []

    def idle_ns(self, ready: int, until: int) -> int:
        """Nanoseconds from `ready`, or the end of its last work, to `until`, but for those of moves."""
        at = bisect_right(self.work, until, key=_end)
        ready = max(ready, self.work[at - 1].end_ns) if at else ready
        moves = self.moves[bisect_right(self.moves, ready, key=_end) : bisect_right(self.moves, until, key=_end)]
        return max(0, until - ready - sum(m.end_ns - max(m.start_ns, ready) for m in moves))


def _devices(spans: _Spans) -> dict[int, _Device]:
    found: dict[int, _Device] = defaultdict(_Device)
    for span in sorted(spans, key=_end):
        for device in span.device_ids:
            if span.kind == flow_pb2.SPAN_KIND_BUSY:
                found[device].work.append(span)
            elif span.kind in _MOVES:
                found[device].moves.append(span)
    return found


def _end(span: flow_pb2.Span) -> int:
    return span.end_ns
