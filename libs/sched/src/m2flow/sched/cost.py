"""How long a stage takes on n devices for x items: measured, interpolated, extrapolated, or estimated.

    t(x, n) = (c0 + c1 x/n + c2 x + c3 log2 n + c4 x/n (t-1) + c5 x/n (p-1) + c6/(t p)) * exp(r(x, n))

with c >= 0 fitted robustly (start-up, work that divides, work that does not, communication), and r the residual at
the measured points, fading with distance, so that the model passes through what was measured and nothing bends far
from it. x counts tokens where every sample has them. n = d t p devices: data parallelism divides the work; t tensor
ranks sum what each token leaves in each layer (a ring moves (t-1)/t of x/(d p): c4); p pipeline ranks wait for the
first and for the last (a bubble of p-1 in a fixed number of micro-batches: c5); and t p devices share one reading of
the weights (c6). Samples of several layouts tell these apart; a layout that none was taken in is extrapolated to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._fit import Array, robust
from m2flow.sched._series import degrees_of, recent, steady, tokens_per_item

Origin = Literal["measured", "interpolated", "extrapolated", "roofline", "assumed"]
_FADE = 0.05  # squared distance, in e-folds, at which a residual has lost half its weight
_NOT_WILD = 3  # repeats that agree in their median: what they say is so, whatever the other measurements lead to expect
_TERMS = 7
_INTERVAL = 3.0  # times the median deviation is two standard deviations, nearly
_STRANGE = 2.0  # e-folds that an e-fold to the next measured layout counts for: the terms of a layout are rough
_RECENT = 8  # ratios of one stage beside the same others that count: the last ones
_FAR = np.log(8.0)  # from 8x outside the samples a roofline, where there is one, says how the curve goes on


@dataclass(frozen=True)
class Estimate:
    """Seconds, the relative half-width of the interval believed in, where they come from, and whether from far away."""

    seconds: float
    relative_error: float
    origin: Origin
    far: bool = False

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
        noise: Relative half-width of the interval that holds nearly every measurement around the curve.
        per_item: x of one item: its tokens where `counts_tokens`, else 1.
        scale: A factor on every answer, for other hardware than was measured on.
        origin: "measured" for a fit; "assumed" or "roofline" for a stage without samples.
        hardware_error: Relative error that `scale` brings with it.
        roof: How the curve goes on from where it is 8x outside the samples; None where hardware or model is unknown.
        away: E-folds to the nearest layout that was measured; 0 where the one asked for was.
    """

    coefficients: Array
    points: Array
    residuals: Array
    noise: float
    per_item: float = 1.0
    counts_tokens: bool = False
    scale: float = 1.0
    origin: Origin = "measured"
    hardware_error: float = 0.0
    roof: "StageCost | None" = None
    away: float = 0.0

    def seconds(self, items: float | Array, devices: Array) -> Array:
        """Seconds for `items` items (one number, or [N]) on each of `devices` [N]; blocks for microseconds."""
        if self.roof is not None:
            near_items, near_devices = self._within_reach(items, devices)
            grown = self.roof.seconds(items, devices) / self.roof.seconds(near_items, near_devices)
            return np.asarray(self._curve(near_items, near_devices) * grown * self.scale)
        return np.asarray(self._curve(items, devices) * self.scale)

    def _curve(self, items: float | Array, devices: Array) -> Array:
        x = self._x(items, devices)
        terms = np.stack([np.ones_like(x), x / devices, x, np.log2(devices)], axis=1)
        fitted = terms @ self.coefficients
        if len(self.points) and (np.abs(self.residuals) > 1e-12).any():
            query = np.stack([np.log(x), np.log(devices)], axis=1)
            square = ((query[:, None, :] - self.points[None, :, :]) ** 2).sum(axis=2)
            weight = 1.0 / (square + 1e-9)
            fitted = fitted * np.exp((weight @ self.residuals) / (weight.sum(axis=1) + 1.0 / _FADE))
        return np.asarray(fitted)

    def estimate(self, items: float, devices: int) -> Estimate:
        """As `seconds`, for one device count, with its error: the scatter, and 15% per factor e outside the samples."""
        seconds = float(self.seconds(items, np.array([float(devices)]))[0])
        error = float(np.hypot(self.noise, self.hardware_error))
        if self.origin != "measured" or not len(self.points):
            return Estimate(seconds, error, self.origin)
        query = np.array([np.log(max(items * self.per_item, 1e-12)), np.log(devices)])
        outside = float(self._outside(query[None, :])[0])
        if self.roof is not None and outside > _FAR:
            return Estimate(seconds, float(np.hypot(error, self.roof.noise)), "roofline", far=True)
        near = float(((self.points - query) ** 2).sum(axis=1).min())
        if outside > 1e-6:
            beyond = max(0.0, outside - float(_FAR))
            return Estimate(seconds, error + 0.15 * outside + 0.3 * beyond, "extrapolated", far=beyond > 0)
        return Estimate(seconds, error + min(0.05, near**0.5 * 0.05), "measured" if near < 1e-6 else "interpolated")

    def items_like(self, sample: sched_pb2.Sample) -> float:
        """The items, as long as they now are, that are as much work as the sample's."""
        return sample.tokens / self.per_item if self.counts_tokens and sample.tokens else sample.items

    def _x(self, items: float | Array, devices: Array) -> Array:
        return np.maximum(np.broadcast_to(items, devices.shape) * self.per_item, 1e-12)

    def _outside(self, query: Array) -> Array:
        """[N] e-folds of [N, 2] questions outside the box of the samples, in x, devices and layout together."""
        return np.asarray(np.abs(query - self._in_box(query)).sum(axis=1)) + self.away

    def _in_box(self, query: Array) -> Array:
        return np.clip(query, self.points.min(axis=0), self.points.max(axis=0))

    def _within_reach(self, items: float | Array, devices: Array) -> tuple[Array, Array]:
        """[N] items and [N] devices of the questions; of those out of the curve's reach, where it ends towards them."""
        query = np.stack([np.log(self._x(items, devices)), np.log(devices)], axis=1)
        box = self._in_box(query)
        distance = np.maximum(np.abs(query - box).sum(axis=1), 1e-12)
        reach = np.clip((_FAR - self.away) / distance, 0.0, 1.0)[:, None]
        x, near_devices = np.exp(box + reach * (query - box)).T
        return x / self.per_item, near_devices


def fit_stage(
    samples: Sequence[sched_pb2.Sample],
    *,
    layout: tuple[int, int] = (1, 1),
    lengths: Sequence[sched_pb2.Sample] | None = None,
) -> StageCost:
    """Fits one stage's samples taken alone; there must be one or more with items, devices and seconds over 0.

    Args:
        samples: In the order in which they were taken. The latest 8 of each question count (`_series`). One without a
            layout was taken in the layout asked for.
        layout: Tensor- and pipeline-parallel degrees of the questions; `devices` are data x tensor x pipeline.
        lengths: All samples of the stage, those beside others too: the last three of them tell how many tokens an item
            has, so that a drift in lengths moves the prediction soon. None: `samples`.
    """
    used = recent(steady(samples))
    counts_tokens = all(s.tokens > 0 for s in used)
    x = np.array([s.tokens if counts_tokens else s.items for s in used])
    degrees = np.array([degrees_of(s, layout) for s in used], dtype=float)
    asked = np.stack([x, np.array([float(s.devices) for s in used]), degrees[:, 0], degrees[:, 1]], axis=1)
    asked, t, repeats, scatter = _cells(asked, np.array([s.seconds for s in used]))
    features, terms = _features(asked), _identifiable(asked)
    coefficients = np.zeros(_TERMS)
    coefficients[terms], keep = robust(features[:, terms], t, repeats >= _NOT_WILD)
    residuals = np.log(t / np.maximum(features @ coefficients, 1e-300))
    typical = float(np.median(np.abs(residuals[keep]))) if keep.sum() > 1 else 0.05
    apart = np.abs(np.log(asked[:, 2:] / np.array(layout, dtype=float))).sum(axis=1)
    own = keep & (apart == 0.0)
    points, per_item = np.log(asked[:, :2]), 1.0
    if counts_tokens:
        per_item = tokens_per_item(samples if lengths is None else lengths) or tokens_per_item(used)
    return StageCost(
        _in_layout(coefficients, layout),
        points[own] if own.any() else points[keep],
        residuals[own] if own.any() else np.zeros(int(keep.sum())),
        max(scatter, _INTERVAL * typical, 0.01),
        per_item,
        counts_tokens,
        away=0.0 if own.any() else _STRANGE * float(apart[keep].min()),
    )


def assumed_stage(seconds_per_item: float) -> StageCost:
    """A stage that nothing is known of: its work divides perfectly; right within a factor of ten or so."""
    empty = np.zeros((0, 2))
    return StageCost(np.array([0.0, seconds_per_item, 0.0, 0.0]), empty, np.zeros(0), 9.0, origin="assumed")


def fit_corun(
    samples: Sequence[sched_pb2.Sample], alone: Mapping[str, StageCost]
) -> dict[tuple[str, frozenset[str]], float]:
    """How much longer a stage takes beside others, by (stage, the others): the median of the last 8, never under 1."""
    ratios: dict[tuple[str, frozenset[str]], list[float]] = {}
    for sample in samples:
        if sample.beside and sample.stage in alone:
            curve = alone[sample.stage]
            expected = curve.seconds(curve.items_like(sample), np.array([float(sample.devices)]))[0]
            key = sample.stage, frozenset(sample.beside)
            ratios.setdefault(key, []).append(sample.seconds / expected)
    return {key: max(1.0, float(np.median(r[-_RECENT:]))) for key, r in ratios.items()}


def slowdown(factors: Mapping[tuple[str, frozenset[str]], float], stage: str, beside: frozenset[str]) -> float:
    """The factor for these neighbours: as measured together, else the product over the neighbours measured."""
    if (stage, beside) in factors:
        return factors[stage, beside]
    product = 1.0
    for other in beside:
        product *= factors.get((stage, frozenset({other})), 1.0)
    return product


def _features(asked: Array) -> Array:
    """[N, 7] terms of [N, 4] questions: x, devices, tensor and pipeline degree; see the module."""
    x, n, tensor, pipeline = asked.T
    share = x / n
    terms = np.ones_like(x), share, x, np.log2(n), share * (tensor - 1), share * (pipeline - 1), 1 / (tensor * pipeline)
    return np.stack(terms, axis=1)


def _in_layout(coefficients: Array, layout: tuple[int, int]) -> Array:
    """[4] coefficients of 1, x/n, x, log2 n for questions in one layout."""
    tensor, pipeline = layout
    start, work, serial, talk, tensor_talk, bubble, reading = coefficients
    work = work + tensor_talk * (tensor - 1) + bubble * (pipeline - 1)
    return np.array([start + reading / (tensor * pipeline), work, serial, talk])


def _identifiable(asked: Array) -> list[int]:
    """The terms that these questions can tell apart; alone, one says only how much work there is."""
    count, num_x, num_n, num_tensor, num_pipeline = len(asked), *(len(np.unique(c)) for c in asked.T)
    terms = [1]
    if num_x > 1 and (num_n == 1 or count > 2):
        terms.append(0)
    if num_n > 1:
        terms.append(2)
    if num_n > 3 and count > 4:
        terms.append(3)
    terms += [term for term, number in ((4, num_tensor), (5, num_pipeline)) if number > 1]
    if num_x > 1 and len(np.unique(asked[:, 2] * asked[:, 3])) > 1:
        terms.append(6)
    return terms


def _cells(asked: Array, t: Array) -> tuple[Array, Array, Array, float]:
    """Repeats of one question (x within 2%) become their median, with how many there are; and the median deviation."""
    keys = np.concatenate([np.round(np.log(asked[:, :1]) / 0.02), asked[:, 1:]], axis=1)
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    members = [np.flatnonzero(inverse == i) for i in range(int(inverse.max()) + 1)]
    per_x = t / asked[:, 0]
    medians = np.array([np.median(per_x[m]) for m in members])
    deviations = np.concatenate(
        [np.abs(np.log(per_x[m] / medians[i])) for i, m in enumerate(members) if len(m) > 2] or [[]]
    )
    cells = np.array([[np.median(asked[m, 0]), *asked[m[0], 1:]] for m in members])
    repeats = np.array([float(len(m)) for m in members])
    return cells, medians * cells[:, 0], repeats, float(np.median(deviations)) if len(deviations) else 0.0
