"""Episodes as the flow carries them: a lane at play, a lane that is over, and the batch of all lanes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m2flow.worker import Group, Item

__all__ = ["batched", "is_playing", "lane_item"]

_LIKE_STEPS = ("actions", "logprobs", "rewards", "mask", "terminated", "truncated", "successes")


def lane_item(step: int, lane: int, num_lanes: int, seeds: Sequence[int]) -> Item:
    """A lane before its episodes begin: one seed an episode."""
    groups = {"rollout": Group(f"rollout {step}", num_lanes)}
    return Item((lane,), step, {"seeds": np.array(seeds, dtype=np.int64)}, groups)


def is_playing(lane: Item) -> bool:
    """Whether an episode of the lane goes on."""
    return bool(lane.fields["is_playing"])


def batched(played: Item) -> Item:
    """The episodes of all lanes as one item: [B, T] fields padded to the longest, `observations` [B, T+1, size]."""
    lanes = [member.fields for member in played.members]
    longest = max(lane["mask"].shape[1] for lane in lanes)
    fields = {name: _stacked([lane[name] for lane in lanes], longest) for name in _LIKE_STEPS}
    observations = _stacked([lane["observations"] for lane in lanes], longest + 1)
    return Item(played.seq, played.iteration, {**fields, "observations": observations})


def _stacked(parts: Sequence[NDArray[Any]], length: int) -> NDArray[Any]:
    """Concatenates [n, t, ...] along n, with zeros after the t of each."""
    padded = []
    for part in parts:
        widths = [(0, 0), (0, length - part.shape[1])] + [(0, 0)] * (part.ndim - 2)
        padded.append(np.pad(part, widths))
    return np.concatenate(padded)
