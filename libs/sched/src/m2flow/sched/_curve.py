"""Completion curves: when the j-th chunk of a stage that emits as it finishes is out."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._table import Floats
from m2flow.sched.errors import InputError

KNOTS = 128  # of a measured curve
AT_ONCE = 0.95  # a stage whose first half of the items comes no sooner than this gives them all at its end


def completion_curve(stage: str, spans: Sequence[flow_pb2.Span], devices: int) -> sched_pb2.CompletionCurve | None:
    """The curve of one iteration of a stage over all its ranks.

    None where a span has no times of its items, where a rank had several calls (the curve is of whole iterations), or
    where all items come at the end.
    """
    if not all(s.output_after_ns for s in spans) or len({s.rank for s in spans}) < len(spans):
        return None
    start, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    out = np.sort(np.concatenate([np.array(s.output_after_ns) + (s.start_ns - start) for s in spans]))
    whole = np.sort(np.concatenate([np.array(_whole(s)) + (s.start_ns - start) for s in spans]))
    done = np.unique(np.ceil(np.linspace(0, 1, KNOTS + 1)[1:] * len(out))) / len(out)
    moments = out[np.ceil(done * len(out) - 1e-9).astype(int) - 1]
    times = np.minimum(moments / max(end - start, 1), 1.0)
    if np.interp(0.5, done, times) >= AT_ONCE:
        return None
    curve = sched_pb2.CompletionCurve(stage=stage, time_fraction=times, item_fraction=done, devices=devices)
    if len(whole) < len(out):
        curve.group_fraction.extend(np.searchsorted(whole, moments, side="right") / len(whole))
    return curve


def _whole(span: flow_pb2.Span) -> list[int]:
    """When all that came of each input was out; of each output alone, where the span does not say what it came of."""
    if not span.inputs or len(span.outputs) != len(span.output_after_ns):
        return list(span.output_after_ns)
    depth = len(_seq(span.inputs[0]))
    last: dict[tuple[str, ...], int] = {}
    for name, after in zip(span.outputs, span.output_after_ns, strict=True):
        place = _seq(name)[:depth]
        last[place] = max(after, last.get(place, 0))
    return list(last.values())


def _seq(name: str) -> tuple[str, ...]:
    return tuple(name.rpartition(":")[2].split("."))


def items_for_groups(curve: sched_pb2.CompletionCurve) -> Callable[[float], float]:
    """The fraction of the items that has to be out, in the order of the curve, for a fraction of whole groups.

    Raises:
        InputError: the curve has not as many group fractions as of items, or they fall or leave [0, 1].
    """
    groups, items = np.array([0.0, *curve.group_fraction]), np.array([0.0, *curve.item_fraction])
    if len(groups) != len(items) or (np.diff(groups) < 0).any() or groups[-1] > 1:
        raise InputError(
            f"completion curve of {curve.stage!r} has {len(groups) - 1} group fractions for {len(items) - 1} item "
            "fractions, want as many, rising within [0, 1]: give one for each, or none"
        )
    return cache(lambda fraction: float(np.interp(fraction - 1e-9, groups, items)))


def nearest(
    curves: Iterable[sched_pb2.CompletionCurve], stage: str, devices: float
) -> sched_pb2.CompletionCurve | None:
    """The stage's curve that was measured on the number of devices that is nearest; None where it has none."""
    own = [c for c in curves if c.stage == stage]
    measured = [c for c in own if c.devices] or own
    return min(measured, key=lambda c: abs(np.log(max(c.devices, 1) / devices)), default=None)


def chunk_fractions(curve: sched_pb2.CompletionCurve, chunks: int) -> Floats:
    """[K] fractions of the stage's time after which chunk 1..K is out; the last is 1.

    Raises:
        InputError: the curve's two lists differ in length, are empty, fall, or leave [0, 1].
    """
    return time_at(curve, np.arange(1, chunks + 1) / chunks)


def time_at(curve: sched_pb2.CompletionCurve, items: Floats) -> Floats:
    """The fraction of the time at which each fraction of the items [N] is out."""
    times, done = np.array(curve.time_fraction), np.array(curve.item_fraction)
    good = len(times) == len(done) > 0 and (np.diff(times) >= 0).all() and (np.diff(done) >= 0).all()
    if not good or times.min() < 0 or times.max() > 1 or done.min() < 0 or done.max() > 1:
        raise InputError(
            f"completion curve of {curve.stage!r} has {len(times)} times and {len(done)} item fractions, want two "
            "rising lists of one length within [0, 1]: write it as pairs (time, items out)"
        )
    times, done = np.r_[0.0, times, 1.0], np.r_[0.0, done, 1.0]
    keep = np.r_[True, np.diff(done) > 0]  # where it stands still, items come out at the end of the pause
    first = np.flatnonzero(keep)
    last = np.r_[first[1:] - 1, len(done) - 1]
    knots_done = np.concatenate([[done[f], done[f]] for f in first])
    knots_time = np.concatenate([[times[f], times[b]] for f, b in zip(first, last, strict=True)])
    return np.asarray(np.interp(items - 1e-12, knots_done, knots_time))
