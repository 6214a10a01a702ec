"""The samples of one stage as a series: which still count, and how long its items have become.

A jump is a change of a stage's time that its items and tokens do not explain (another clock speed, a busier host):
three measurements of one question that all lie a quarter or more off the three before them. What was measured before
a jump is multiplied by it, so that questions which have not been asked since are answered as if they had been.
"""

import math
from collections.abc import Sequence
from statistics import median

from m2flow.proto.sched.v1 import sched_pb2

_RECENT = 8  # repeats of one measurement that count: the last ones
_AGREE = 3  # measurements on either side of a jump
_JUMP = 1.25
_LATELY = 3  # samples that say how long items are now: with more, a drift is followed late
_ALIKE = 0.02  # relative difference up to which two amounts are one question
Question = tuple[int, int, int, int]


def question(sample: sched_pb2.Sample, amount: float) -> Question:
    """What a sample answers: devices, layout, and an amount of work, to within 2%."""
    layout = sample.layout
    return sample.devices, layout.tensor, layout.pipeline, round(math.log(amount) / _ALIKE)


def recent(samples: Sequence[sched_pb2.Sample]) -> list[sched_pb2.Sample]:
    """The last 8 samples of each question; their order is not kept."""
    latest: dict[Question, list[sched_pb2.Sample]] = {}
    for sample in samples:
        latest.setdefault(question(sample, sample.items), []).append(sample)
    return [sample for same in latest.values() for sample in same[-_RECENT:]]


def degrees_of(sample: sched_pb2.Sample, layout: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """A sample's tensor- and pipeline-parallel degrees; those of `layout` where it does not say."""
    return (sample.layout.tensor, sample.layout.pipeline) if sample.HasField("layout") else layout


def layout_for(samples: Sequence[sched_pb2.Sample], devices_per_rank: int) -> tuple[int, int]:
    """Tensor and pipeline degrees of a rank of so many devices: as last measured, else all tensor-parallel."""
    width = max(devices_per_rank, 1)
    known = [degrees_of(s) for s in samples if s.HasField("layout")]
    return next((d for d in reversed(known) if d[0] * d[1] == width), (width, 1))


def tokens_per_item(samples: Sequence[sched_pb2.Sample]) -> float:
    """Of the last three samples, the median; 0 where one of them has no tokens."""
    last = samples[-_LATELY:]
    return median(s.tokens / s.items for s in last) if all(s.tokens > 0 for s in last) else 0.0


def steady(samples: Sequence[sched_pb2.Sample]) -> list[sched_pb2.Sample]:
    """The samples, in order, with the jumps taken out of those that were taken before them."""
    asked: dict[Question, list[int]] = {}
    for i, sample in enumerate(samples):
        asked.setdefault(question(sample, sample.tokens or sample.items), []).append(i)
    jumps = max((_jumps(samples, same) for same in asked.values()), key=lambda j: j[-1][0] if j else -1, default=[])
    if not jumps:
        return list(samples)
    found = []
    for i, sample in enumerate(samples):
        changed = sched_pb2.Sample()
        changed.CopyFrom(sample)
        changed.seconds *= math.prod(ratio for at, ratio in jumps if at > i)
        found.append(changed)
    return found


def _jumps(samples: Sequence[sched_pb2.Sample], same: list[int]) -> list[tuple[int, float]]:
    """Where the answers to one question jump: the index of the first sample after it, and the ratio."""
    seconds = [samples[i].seconds for i in same]
    jumps, at = [], _AGREE
    while at + _AGREE <= len(seconds):
        before, after = seconds[at - _AGREE : at], seconds[at : at + _AGREE]
        if min(after) > _JUMP * max(before) or _JUMP * max(after) < min(before):
            jumps.append((same[at], median(after) / median(before)))
            at += _AGREE
        else:
            at += 1
    return jumps
