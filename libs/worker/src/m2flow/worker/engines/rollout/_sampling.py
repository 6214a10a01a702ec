"""Drawing tokens so that a draw depends on a sample's seed and position, and on nothing else.

The Gumbel-max rule draws from softmax(x) by argmax(x + g), g independent Gumbel noise. Here g is a pure function of
(seed, position, token), so a small change of the logits, such as another batch's rounding, almost never changes a
draw. Noise for 49,152 tokens per draw would cost more than the model at small batches. So the tokens far below the
best one enter as a single candidate, whose weight is the sum of theirs: the greatest of several Gumbels is a Gumbel,
hence the law is exact. Only when that candidate wins, one of its tokens is drawn.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TAIL = np.uint64(1 << 40)  # noise indices beyond every token id
_PICK = np.uint64((1 << 40) + 1)

# Tokens this much (in nats) below the best one are drawn through the tail candidate.
_WINDOW = 12.0


def uniforms(seeds: NDArray[np.uint64], position: int, indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1), float64 [num_seeds, num_indices]: SplitMix64 of (seed, position, index)."""
    with np.errstate(over="ignore"):
        keys = _mix(_mix(seeds) + _GOLDEN * np.uint64(position + 1))
        bits = _mix(keys[:, None] + _GOLDEN * (indices + np.uint64(1))[None, :])
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def draw(logprobs: NDArray[np.float32], seeds: NDArray[np.uint64], position: int) -> NDArray[np.int64]:
    """Draw one token per seed from one distribution.

    Args:
      logprobs: float32 [V], log of the probabilities (minus infinity allowed); need not be normalised.
      seeds: uint64 [S], one per sample.
      position: index of the token in its completion, from 0.
    Returns: int64 [S] token ids.
    """
    near = np.flatnonzero(logprobs > logprobs.max() - _WINDOW)
    scores = np.empty(len(near) + 1)
    scores[:-1] = logprobs[near]
    tail = np.exp(logprobs, dtype=np.float64)
    tail[near] = 0.0
    mass = float(tail.sum())
    scores[-1] = math.log(mass) if mass > 0 else -math.inf
    noise = uniforms(seeds, position, np.append(near.astype(np.uint64), _TAIL))
    winners = np.argmax(scores - np.log(-np.log(noise)), axis=1)
    tokens: NDArray[np.int64] = np.append(near, 0)[winners]
    for sample in np.flatnonzero(winners == len(near)):
        target = mass * uniforms(seeds[sample : sample + 1], position, np.array([_PICK]))[0, 0]
        # The last token with any mass, should rounding put the target at the very end.
        last = int(np.flatnonzero(tail)[-1])
        tokens[sample] = min(int(np.searchsorted(np.cumsum(tail), target, side="right")), last)
    return tokens


def keep_nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Set to minus infinity what is outside the likeliest tokens of each row of [R, V] that together reach `top_p`."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    return logprobs.scatter(-1, order, ordered.masked_fill(before >= top_p, float("-inf")))
