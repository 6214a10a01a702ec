"""What an iteration gave: items, spans, counts."""

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Item


@dataclass(frozen=True)
class IterationResult:
    """One iteration, over.

    `outputs` are the living items at the sink in source order; `timeline` the spans of every rank, on one clock that
    counts from the run's start, in which the iteration lasted from `start_ns` to `end_ns`; `tombstones` counts what
    was dropped on the way, by reason.
    """

    iteration: int
    outputs: list[Item]
    timeline: pb.Timeline
    tombstones: Mapping[str, int]
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """How long it took, from the first item in to the last weights loaded."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds by stage under the names of the run's metrics, and the count of each sort of tombstone."""
        found = {"timing_s/step": self.seconds}
        for span in self.timeline.spans:
            if span.kind == pb.SPAN_KIND_BUSY:
                name = f"timing_s/{span.stage}"
                found[name] = found.get(name, 0.0) + (span.end_ns - span.start_ns) / 1e9
        return found | {f"tombstones/{reason}": float(count) for reason, count in self.tombstones.items()}
