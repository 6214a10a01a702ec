"""What the items of an iteration did in a loop, read from the spans of a run: how often each went round, how long each
took, and whether a stage lets them join a call that goes on.

A call that items join is as long as the loop has work. What counts is one item's way through it: from when it came out
of the stage before until it came out of this one, and how many were on that way at once. A call of that many items at
once takes that long.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median

import numpy as np

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._curve import AT_ONCE
from m2flow.sched._hand_offs import Moments, last_before
from m2flow.sched._loop import longest_of

_Spans = Sequence[flow_pb2.Span]


@dataclass(frozen=True)
class _Visit:
    """One item's way through a stage: nanoseconds of when it came, at the earliest when its call began, and left."""

    place: str
    came: int
    left: int

    @property
    def ns(self) -> int:
        return self.left - self.came


def loop_stage(
    stage: str, spans: _Spans, moments: Moments, devices: int, in_flight: int = 0
) -> tuple[sched_pb2.LoopItems, list[sched_pb2.Sample]]:
    """The items of one iteration of a stage in a loop, and what its calls cost.

    A sample is of all calls of one size, of a rank: their mean, of a mean choice of items where these differ. Where
    items join calls there is one, of as many items as were in a call at once, the mean over its time.

    Args:
        moments: When each item came out of each stage; see `_hand_offs`.
        in_flight: Of the head of a loop, how many items of a rank are in it at once; 0: any number.
    """
    calls = [_admitted(_visits(span, moments), span, in_flight) for span in spans]
    taken: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        for visit in call:
            taken[visit.place].append(visit.ns)
    places = sorted(taken, key=_order)
    pulls = any(visit.came > span.start_ns for call, span in zip(calls, spans, strict=True) for visit in call)
    items = sched_pb2.LoopItems(stage=stage, passes=[len(taken[place]) for place in places], pulls=pulls)
    half = [median(visit.ns for visit in call) / max(s.end_ns - s.start_ns, 1) for call, s in _several(calls, spans)]
    items.one_by_one = min(half, default=1.0) < AT_ONCE
    if pulls or any([v.place for v in call] != sorted((v.place for v in call), key=_order) for call in calls):
        times = np.array([np.mean(taken[place]) for place in places])
        items.relative.extend(times / max(times.mean(), 1.0))
    found = sched_pb2.Sample(stage=stage, devices=devices, peak_bytes=max(span.peak_bytes for span in spans))
    num_ranks = len({span.rank for span in spans})
    if pulls:
        seconds = float(np.mean([visit.ns for call in calls for visit in call])) / 1e9
        length_s = sum(span.end_ns - span.start_ns for span in spans) / 1e9
        at_once = seconds * sum(map(len, calls)) / length_s
        return items, [_sample(found, at_once * num_ranks, spans, seconds)]
    relative = dict(zip(places, items.relative, strict=False))
    longest = cache(partial(longest_of, items.relative))
    by_size: dict[int, list[float]] = defaultdict(list)
    for span, call in zip(spans, calls, strict=True):
        if span.items and span.end_ns > span.start_ns:
            usual = longest(len(call)) / max(relative[v.place] for v in call) if relative and call else 1.0
            by_size[span.items].append((span.end_ns - span.start_ns) * usual / 1e9)
    return items, [_sample(found, n * num_ranks, spans, float(np.mean(times))) for n, times in sorted(by_size.items())]


def _several(calls: Iterable[list[_Visit]], spans: _Spans) -> Iterator[tuple[list[_Visit], flow_pb2.Span]]:
    """The calls of several items: one item says nothing of when the others come."""
    return ((call, span) for call, span in zip(calls, spans, strict=True) if len(call) > 1)


def _visits(span: flow_pb2.Span, moments: Moments) -> list[_Visit]:
    """The items of a call, as they came out; none where it does not say when they did."""
    if len(span.output_after_ns) != len(span.outputs):
        return []
    sources: dict[str, set[str]] = defaultdict(set)
    for name in span.inputs:
        sources[_place(name)].add(name)
    found = []
    for name, after in zip(span.outputs, span.output_after_ns, strict=True):
        left = span.start_ns + after
        came = [last_before(moments.get(source, ()), left, span.start_ns) for source in sources[_place(name)]]
        found.append(_Visit(_place(name), max([span.start_ns, *came]), left))
    return found


def _admitted(call: list[_Visit], span: flow_pb2.Span, in_flight: int) -> list[_Visit]:
    """The visits, the first ones of items that waited at the head of the loop from when others had left it."""
    if not in_flight:
        return call
    entered = list(dict.fromkeys(map(_place, span.inputs)))
    over = sorted({visit.place: visit.left for visit in call}.values())
    opened = dict(zip(entered[in_flight:], over, strict=False))
    found = []
    for visit in call:
        found.append(replace(visit, came=max(visit.came, min(opened.pop(visit.place, 0), visit.left))))
    return found


def _sample(found: sched_pb2.Sample, items: float, spans: _Spans, seconds: float) -> sched_pb2.Sample:
    """`found`, of a call of the whole group that has so many items, each with as many tokens as these have."""
    sample = sched_pb2.Sample(items=items, seconds=seconds)
    sample.tokens = items * sum(span.tokens for span in spans) / max(sum(span.items for span in spans), 1)
    sample.MergeFrom(found)
    return sample


def _place(name: str) -> str:
    return name.rpartition("|")[2]


def _order(place: str) -> list[int]:
    return [int(number) for number in place.rpartition(":")[2].split(".")]
