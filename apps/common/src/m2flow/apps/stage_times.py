"""Seconds per stage, from the spans of one iteration."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from m2flow.proto.flow.v1 import flow_pb2

__all__ = ["stage_seconds"]


def stage_seconds(spans: Iterable[flow_pb2.Span], order: Sequence[str]) -> dict[str, float]:
    """Returns the busy seconds of each stage that ran, those of its busiest rank; stages come in the given order."""
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.kind == flow_pb2.SPAN_KIND_BUSY:
            seconds[span.stage][span.rank] += (span.end_ns - span.start_ns) / 1e9
    return {stage: max(seconds[stage].values()) for stage in order if stage in seconds}
