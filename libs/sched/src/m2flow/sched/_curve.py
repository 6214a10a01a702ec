"""Completion curves: when the j-th chunk of a stage that emits as it finishes is out."""

import numpy as np

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._table import Floats
from m2flow.sched.errors import InputError


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
