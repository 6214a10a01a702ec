"""Robust fits of a few non-negative terms to a handful of measurements.

`t = sum_k c_k phi_k` with `c_k >= 0`, least squares on relative errors: a stage's seconds span decades, and the
small ones matter as much. With so few terms every subset is tried, which is exact and needs no solver.
"""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_OUTLIER = 0.25  # a cell further off the curve than this, and than 6 typical deviations, is a wild sample


def nonnegative(features: Array, values: Array, weights: Array) -> Array:
    """Returns the coefficients [K] >= 0 that minimise `sum_i w_i (features_i . c / values_i - 1)^2`.

    Args:
        features: [N, K].
        values: [N], positive.
        weights: [N].
    """
    scaled = features / values[:, None] * np.sqrt(weights)[:, None]
    target = np.sqrt(weights)
    gram, moment = scaled.T @ scaled, scaled.T @ target
    best, best_loss = np.zeros(features.shape[1]), float(target @ target)
    for size in range(1, features.shape[1] + 1):
        for terms in combinations(range(features.shape[1]), size):
            chosen = list(terms)
            block = gram[np.ix_(chosen, chosen)]
            ridge = 1e-12 * np.trace(block) + 1e-300
            solution = np.linalg.solve(block + ridge * np.eye(size), moment[chosen])
            if (solution < 0).any():
                continue
            loss = float(target @ target - 2 * solution @ moment[chosen] + solution @ block @ solution)
            if loss < best_loss - 1e-9 * max(best_loss, 1e-9):
                best, best_loss = np.zeros(features.shape[1]), loss
                best[chosen] = solution
    return best


def robust(
    features: Array, values: Array, repeated: NDArray[np.bool_] | None = None
) -> tuple[Array, NDArray[np.bool_]]:
    """Returns coefficients [K] and which of the N measurements were kept.

    Starts from the subset fit that has the smallest median error (so that one wild measurement cannot choose the
    curve), drops what is far off it, and fits the rest. What was `repeated` [N] is not wild, however far off it is.
    """
    count, terms = features.shape
    keep = np.ones(count, dtype=bool)
    ones = np.ones(count)
    coefficients = nonnegative(features, values, ones)
    if count < 4 or _spread(features, values, coefficients).max() < 0.05:
        return coefficients, keep
    candidates = [coefficients]
    for left_out in range(count) if count <= 24 else range(0, count, count // 24):
        weights = ones.copy()
        weights[left_out] = 0.0
        candidates.append(nonnegative(features, values, weights))
    errors = [np.sort(_spread(features, values, c))[: max(terms, (3 * count) // 4)].sum() for c in candidates]
    coefficients = candidates[int(np.argmin(errors))]
    off = _spread(features, values, coefficients)
    keep = off <= max(_OUTLIER, 6 * float(np.median(off)))
    if repeated is not None:
        keep |= repeated
    return nonnegative(features[keep], values[keep], np.ones(int(keep.sum()))), keep


def _spread(features: Array, values: Array, coefficients: Array) -> Array:
    return np.abs(np.log(np.maximum(features @ coefficients, 1e-300) / values))
