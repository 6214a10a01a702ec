"""One clock for all spans: the driver's. How far another machine's is from it is measured by asking for its time.

A reading that lies between the question and the answer may be of the same clock, as all processes of one machine are:
it is left alone. Of any other, the shortest of several exchanges says the difference, to half of what it took.
"""

import time

from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import AttachedGroup

_NUM_EXCHANGES = 8


class Clocks:
    """How far each rank's clock is ahead of the driver's, in nanoseconds."""

    def __init__(self) -> None:
        self._ahead_ns: dict[tuple[str, int], int] = {}

    def measure(self, group: str, runners: AttachedGroup) -> None:
        """Compares the clocks of a group's ranks with this process's. Blocks."""
        runners.attached.wait()  # or the first answer would take as long as their start
        asked_ns = time.monotonic_ns()
        readings = runners.now().result()
        answered_ns = time.monotonic_ns()
        for rank, reading in zip(runners.ranks, readings, strict=True):
            same = asked_ns <= reading <= answered_ns
            self._ahead_ns[group, rank] = 0 if same else _ahead_ns(runners, rank)

    def aligned(self, span: pb.Span) -> pb.Span:
        """The span, with its times by the driver's clock."""
        ahead_ns = self._ahead_ns[span.group, span.rank]
        span.start_ns -= ahead_ns
        span.end_ns -= ahead_ns
        return span


def _ahead_ns(runners: AttachedGroup, rank: int) -> int:
    exchanges: list[tuple[int, int]] = []
    for _ in range(_NUM_EXCHANGES):
        asked_ns = time.monotonic_ns()
        (reading,) = runners.on(rank).now().result()
        took_ns = time.monotonic_ns() - asked_ns
        exchanges.append((took_ns, reading - asked_ns - took_ns // 2))
    return min(exchanges)[1]
