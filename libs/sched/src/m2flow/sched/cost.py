"""How long a stage takes on n devices for x items: measured, interpolated, extrapolated, or estimated.

    t(x, n) = (c0 + c1 x/n + c2 x + c3 log2 n) * exp(r(x, n))

with c >= 0 fitted robustly (start-up, work that divides, work that does not, communication), and r the residual at
the measured points, fading with distance, so that the model passes through what was measured and nothing bends far
from it. x counts tokens where every sample has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._fit import Array, robust

Origin = Literal["measured", "interpolated", "extrapolated", "roofline", "assumed"]
_FADE = 0.05  # squared distance, in e-folds, at which a residual has lost half its weight
_NOT_WILD = 3  # repeats that agree in their median: what they say is so, whatever the other measurements lead to expect
_RECENT = 8  # repeats of one measurement that count: the last ones
_FAR = np.log(8.0)  # beyond 8x outside the samples a roofline is better than the curve, where there is one


@dataclass(frozen=True)
class Estimate:
    """Seconds, the relative half-width of the interval believed in, and where they come from."""

    seconds: float
    relative_error: float
    origin: Origin

    @property
    def low_s(self) -> float:
        return self.seconds / (1 + self.relative_error)

    @property
    def high_s(self) -> float:
        return self.seconds * (1 + self.relative_error)


@dataclass(frozen=True)
class StageCost:
    """The fitted curve of one stage, run alone.

    Args:
        coefficients: [4], see the module.
        points: [P, 2], the logarithms of (x, n) of the kept measurements.
        residuals: [P], log(measured / fitted) there.
        noise: Typical relative scatter of one measurement around the curve.
        per_item: x of one item: its tokens, or 1.
        scale: A factor on every answer: what-if, or other hardware.
        origin: "measured" for a fit; "assumed" or "roofline" for a stage without samples.
        hardware_error: Relative error that `scale` brings with it.
        roof: What answers questions further than 8x outside the samples; None where the hardware or model is unknown.
    """

    coefficients: Array
    points: Array
    residuals: Array
    noise: float
    per_item: float = 1.0
    scale: float = 1.0
    origin: Origin = "measured"
    hardware_error: float = 0.0
    roof: "StageCost | None" = None

    def seconds(self, items: float | Array, devices: Array) -> Array:
        """Seconds for `items` items (one number, or [N]) on each of `devices` [N]; blocks for microseconds."""
        x = np.maximum(np.broadcast_to(items, devices.shape) * self.per_item, 1e-12)
        fitted = _features(x, devices) @ self.coefficients
        if len(self.points) and (np.abs(self.residuals) > 1e-12).any():
            query = np.stack([np.log(x), np.log(devices)], axis=1)
            square = ((query[:, None, :] - self.points[None, :, :]) ** 2).sum(axis=2)
            weight = 1.0 / (square + 1e-9)
            fitted = fitted * np.exp((weight @ self.residuals) / (weight.sum(axis=1) + 1.0 / _FADE))
        if self.roof is not None:
            far = self._outside(x, devices) > _FAR
            if far.any():
                fitted = np.where(far, self.roof.seconds(items, devices) / self.scale, fitted)
        return np.asarray(fitted * self.scale)

    def estimate(self, items: float, devices: int) -> Estimate:
        """As `seconds`, for one device count, with its error: the scatter, and 15% per factor e outside the samples."""
        seconds = float(self.seconds(items, np.array([float(devices)]))[0])
        error = float(np.hypot(self.noise, self.hardware_error))
        if self.origin != "measured" or not len(self.points):
            return Estimate(seconds, error, self.origin)
        query = np.array([np.log(max(items * self.per_item, 1e-12)), np.log(devices)])
        outside = float(self._outside(np.exp(query[:1]), np.array([float(devices)]))[0])
        if self.roof is not None and outside > _FAR:
            return Estimate(seconds, self.roof.noise, "roofline")
        near = float(((self.points - query) ** 2).sum(axis=1).min())
        if outside > 1e-6:
            return Estimate(seconds, error + 0.15 * outside + 0.3 * max(0.0, outside - float(_FAR)), "extrapolated")
        return Estimate(seconds, error + min(0.05, near**0.5 * 0.05), "measured" if near < 1e-6 else "interpolated")

    def _outside(self, x: Array, devices: Array) -> Array:
        """E-folds outside the box of the samples, in x and in devices together; [N]."""
        query = np.stack([np.log(x), np.log(devices)], axis=1)
        low, high = self.points.min(axis=0), self.points.max(axis=0)
        return np.asarray(np.maximum(np.maximum(low - query, query - high), 0.0).sum(axis=1))


def fit_stage(samples: Sequence[sched_pb2.Sample]) -> StageCost:
    """Fits one stage's samples taken alone; there must be one or more with items, devices and seconds over 0.

    The last samples weigh: of each device count and number of items the latest 8 are used, and the last eighth tells
    how many tokens an item has, so that a drift in lengths moves the prediction at once.
    """
    latest: dict[tuple[int, int], list[sched_pb2.Sample]] = {}
    for sample in samples:
        latest.setdefault((sample.devices, round(np.log(sample.items) / 0.02)), []).append(sample)
    used = [s for same in latest.values() for s in same[-_RECENT:]]
    counts_tokens = all(s.tokens > 0 for s in used)
    x = np.array([s.tokens if counts_tokens else s.items for s in used])
    n = np.array([float(s.devices) for s in used])
    t = np.array([s.seconds for s in used])
    last = samples[-max(1, len(samples) // 8) :]
    per_item = float(np.median([s.tokens / s.items for s in last])) if counts_tokens else 1.0
    x, n, t, repeats, scatter = _cells(x, n, t)
    terms = _identifiable(x, n)
    coefficients = np.zeros(4)
    coefficients[terms], keep = robust(_features(x, n)[:, terms], t, repeats >= _NOT_WILD)
    residuals = np.log(t / np.maximum(_features(x, n) @ coefficients, 1e-300))[keep]
    points = np.stack([np.log(x), np.log(n)], axis=1)[keep]
    typical = float(np.median(np.abs(residuals))) if len(residuals) > 1 else 0.05
    return StageCost(coefficients, points, residuals, max(scatter, 0.5 * typical, 0.01), per_item)


def assumed_stage(seconds_per_item: float) -> StageCost:
    """A stage that nothing is known of: its work divides perfectly; right within a factor of ten or so."""
    empty = np.zeros((0, 2))
    return StageCost(np.array([0.0, seconds_per_item, 0.0, 0.0]), empty, np.zeros(0), 9.0, origin="assumed")


def fit_corun(
    samples: Sequence[sched_pb2.Sample], alone: Mapping[str, StageCost]
) -> dict[tuple[str, frozenset[str]], float]:
    """How many times longer a stage takes beside others, by (stage, the others); medians, never under 1."""
    ratios: dict[tuple[str, frozenset[str]], list[float]] = {}
    for sample in samples:
        if sample.beside and sample.stage in alone:
            expected = alone[sample.stage].seconds(sample.items, np.array([float(sample.devices)]))[0]
            key = sample.stage, frozenset(sample.beside)
            ratios.setdefault(key, []).append(sample.seconds / expected)
    return {key: max(1.0, float(np.median(r))) for key, r in ratios.items()}


def slowdown(factors: Mapping[tuple[str, frozenset[str]], float], stage: str, beside: frozenset[str]) -> float:
    """The factor for these neighbours: as measured together, else the product over the neighbours measured."""
    if (stage, beside) in factors:
        return factors[stage, beside]
    product = 1.0
    for other in beside:
        product *= factors.get((stage, frozenset({other})), 1.0)
    return product


def _features(x: Array, n: Array) -> Array:
    columns = np.empty((len(x), 4))
    columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3] = 1.0, x / n, x, np.log2(n)
    return columns


def _identifiable(x: Array, n: Array) -> list[int]:
    """The terms that these points can tell apart; alone, one point says only how much work there is."""
    several_x, several_n = len(np.unique(x)) > 1, len(np.unique(n)) > 1
    terms = [1]
    if several_x:
        terms = [0, 1]
    if several_n and len(x) > 2:
        terms = [0, 1, 2] if several_x else [1, 2]
        if len(np.unique(n)) > 3 and len(x) > 4:
            terms = [*terms, 3]
    elif several_n:
        terms = [1, 2]
    return terms


def _cells(x: Array, n: Array, t: Array) -> tuple[Array, Array, Array, Array, float]:
    """Repeats of one question (x within 2%) become their median, with how many there are; and the median deviation."""
    keys = np.stack([np.round(np.log(x) / 0.02), n], axis=1)
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    members = [np.flatnonzero(inverse == i) for i in range(int(inverse.max()) + 1)]
    per_x = t / x
    medians = np.array([np.median(per_x[m]) for m in members])
    deviations = np.concatenate(
        [np.abs(np.log(per_x[m] / medians[i])) for i, m in enumerate(members) if len(m) > 2] or [[]]
    )
    cx = np.array([np.median(x[m]) for m in members])
    cn = np.array([n[m[0]] for m in members])
    repeats = np.array([float(len(m)) for m in members])
    return cx, cn, medians * cx, repeats, float(np.median(deviations)) if len(deviations) else 0.0
