"""Spans: what a rank did and waited for, written down as it happens.

A span costs two readings of the monotonic clock, which is one clock for all processes of a machine, and one append.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Item

# Waits that are shorter are the price of asking; they are left to the row of what is not accounted for.
_SHORTEST_NS = 20_000


class Recorder:
    """The spans of one rank, by iteration. Thread-safe: each stage of the rank has a thread."""

    def __init__(self, group: str, rank: int, device_ids: Iterable[int], epoch_ns: int) -> None:
        """`epoch_ns` is when the run began, on this machine's monotonic clock."""
        self._group = group
        self._rank = rank
        self._devices = tuple(device_ids)
        self._epoch_ns = epoch_ns
        self._mutex = threading.Lock()
        self._spans: dict[int, list[pb.Span]] = {}

    @contextmanager
    def span(self, kind: pb.SpanKind, stage: str, iteration: int, shortest_ns: int = _SHORTEST_NS) -> Iterator[pb.Span]:
        """Records a block of time, a wait only from `shortest_ns` on; the block may add items, tokens and ids."""
        span = pb.Span(
            stage=stage,
            group=self._group,
            rank=self._rank,
            kind=kind,
            iteration=iteration,
            start_ns=time.monotonic_ns() - self._epoch_ns,
            device_ids=self._devices,
        )
        try:
            yield span
        finally:
            span.end_ns = time.monotonic_ns() - self._epoch_ns
            if kind == pb.SPAN_KIND_BUSY or span.end_ns - span.start_ns >= shortest_ns:
                with self._mutex:
                    self._spans.setdefault(iteration, []).append(span)

    def noting(self, span: pb.Span, items: Iterable[Item]) -> Iterator[Item]:
        """Passes items on, and writes into their span when each came."""
        start_ns = span.start_ns + self._epoch_ns
        for item in items:
            span.output_after_ns.append(time.monotonic_ns() - start_ns)
            yield item

    def take(self, iteration: int) -> list[pb.Span]:
        """The spans of an iteration, which are then forgotten."""
        with self._mutex:
            return self._spans.pop(iteration, [])


def num_tokens(inputs: Sequence[Item], outputs: Sequence[Item]) -> int:
    """Tokens that a call worked on: as its outputs say under `worked_tokens`, else what they or its inputs hold.

    1 where they say 0: a span of 0 tokens is one that nobody counted.
    """
    said = [count for item in outputs if isinstance(count := item.fields.get("worked_tokens"), int)]
    if said and len(said) == len(outputs):
        return max(1, sum(said))
    return max(_num_held(inputs), _num_held(outputs))


def _num_held(items: Iterable[Item]) -> int:
    """Tokens that items hold as completions, their members' included; 0 where they hold none."""
    total = 0
    for item in items:
        completion = item.fields.get("completion_ids")
        total += len(completion) if completion is not None else 0
        total += _num_held(item.members)
    return total
