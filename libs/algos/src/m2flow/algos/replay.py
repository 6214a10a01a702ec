"""Replay of whole trajectories, uniform by step or by priority.

A trajectory is a dict of tensors [T, ...] of one length. What is sampled are windows of consecutive steps of one
trajectory, [B, L, ...], with a mask: a window that runs over its trajectory's end is padded with zeros outside the
mask, so that every step can be a window's first. Nothing crosses from one trajectory into the next. Memory is bounded
in steps; the oldest trajectories go first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from m2flow.algos import _check
from m2flow.algos.errors import SettingError, ShapeError

Trajectory = dict[str, Tensor]


class ReplayState(TypedDict):
    """What a replay holds: trajectories by id in order of age, the next id, priorities by id where there are any."""

    trajectories: dict[int, Trajectory]
    next_id: int
    priorities: dict[int, float]


@dataclass(frozen=True)
class Windows:
    """A sample: B windows of L steps.

    Fields: fields, each [B, L, ...]; mask [B, L], bool; trajectory_ids [B], int64, as `add` returned them; weights [B],
    float32, by which a loss is multiplied to undo the sampling's preference (1 where it has none).
    """

    fields: Trajectory
    mask: Tensor
    trajectory_ids: Tensor
    weights: Tensor


class UniformReplay:
    """Trajectories sampled so that every stored step is as likely as any other to be a window's first.

    Source: Lin 1992 (experience replay); windows from any step, as Hausknecht and Stone 2015 (arXiv 1507.06527).

    Args:
        capacity: steps to keep, 1 or more. A trajectory that is longer by itself is refused.
    """

    def __init__(self, capacity: int) -> None:
        """Start empty."""
        _check.at_least("replay", "capacity", capacity, 1)
        self.capacity = capacity
        self._trajectories: dict[int, Trajectory] = {}
        self._num_steps = 0
        self._next_id = 0

    def __len__(self) -> int:
        """Return the number of steps held."""
        return self._num_steps

    def add(self, trajectory: Mapping[str, Tensor]) -> int:
        """Keep a trajectory (its tensors, not copies of them) and return its id; the oldest make room.

        Raises: ShapeError where lengths differ, are 0 or over the capacity, or fields differ from those held.
        """
        lengths = {name: _check.tensor("add", name, x).shape[0] if x.ndim else 0 for name, x in trajectory.items()}
        length = min(lengths.values(), default=0)
        if not 1 <= length <= self.capacity or len(set(lengths.values())) != 1:
            raise ShapeError(
                f"add: lengths are {lengths}, want one for all, from 1 to the capacity of {self.capacity}: cut the "
                "trajectory, or raise the capacity"
            )
        held = next(iter(self._trajectories.values()), None)
        if held is not None and _layout(held) != _layout(trajectory):
            raise ShapeError(
                f"add: fields are {_layout(trajectory)}, want those held, {_layout(held)}: give every trajectory the "
                "same"
            )
        while self._num_steps + length > self.capacity:
            oldest = next(iter(self._trajectories))
            self._num_steps -= _length(self._trajectories.pop(oldest))
        self._trajectories[self._next_id] = dict(trajectory)
        self._num_steps += length
        self._next_id += 1
        return self._next_id - 1

    def sample(self, *, batch_size: int, num_steps: int, generator: torch.Generator) -> Windows:
        """Return B windows of L = num_steps steps, drawn with return.

        Args:
            batch_size: B, 1 or more. num_steps: L, 1 or more.
            generator: of the CPU: the only source of chance, so that a seed repeats a run.

        Raises: SettingError where the replay is empty or a number is out of range.
        """
        _check.at_least("sample", "batch_size", batch_size, 1)
        _check.at_least("sample", "num_steps", num_steps, 1)
        if not self._trajectories:
            raise SettingError("sample: the replay is empty, want one trajectory at least: add some first")
        ids = torch.tensor(list(self._trajectories))
        shares = self._shares()
        edges = shares.cumsum(0)
        draws = torch.rand(batch_size, generator=generator, dtype=torch.float64) * edges[-1]
        # A draw that rounds up to the last edge would fall beyond the last trajectory.
        chosen = torch.searchsorted(edges, draws, right=True).clamp_max(len(ids) - 1)
        picked = [self._trajectories[int(ids[c])] for c in chosen]
        lengths = torch.tensor([_length(t) for t in picked])
        starts = (torch.rand(batch_size, generator=generator, dtype=torch.float64) * lengths).long()
        fields = {
            name: torch.stack([_window(t[name], int(s), num_steps) for t, s in zip(picked, starts, strict=True)])
            for name in picked[0]
        }
        mask = torch.arange(num_steps) < (lengths - starts)[:, None]
        device = next(iter(fields.values())).device
        weights = self._weights(shares / edges[-1])[chosen].float()
        return Windows(fields, mask.to(device), ids[chosen], weights.to(device))

    def state_dict(self) -> ReplayState:
        """Return what `load_state_dict` needs to go on from here (the tensors themselves, not copies)."""
        return {"trajectories": dict(self._trajectories), "next_id": self._next_id, "priorities": {}}

    def load_state_dict(self, state: ReplayState) -> None:
        """Hold what `state` holds, and nothing else. Raises: SettingError where it is over the capacity."""
        num_steps = sum(map(_length, state["trajectories"].values()))
        if num_steps > self.capacity:
            raise SettingError(
                f"load_state_dict: got {num_steps} steps, want {self.capacity} or fewer: make the replay as large "
                "as it was"
            )
        self._trajectories = dict(state["trajectories"])
        self._num_steps, self._next_id = num_steps, state["next_id"]

    def _shares(self) -> Tensor:
        """Return each trajectory's share of the draws, not normalised, float64."""
        return torch.tensor([_length(t) for t in self._trajectories.values()], dtype=torch.float64)

    def _weights(self, chances: Tensor) -> Tensor:
        """Return each trajectory's weight in a loss, given its chance of being drawn."""
        return torch.ones_like(chances)


class PrioritizedReplay(UniformReplay):
    """Trajectories drawn with a chance proportional to priority ** alpha, a step within one as likely as any other.

    A new trajectory gets the highest priority held (1 at first), so that it is soon seen. Weights are
    (chance / uniform chance) ** -beta, scaled so that the largest is 1; uniform means by length.
    Source: Schaul et al. 2015 (arXiv 1511.05952), section 3.4, with trajectories for transitions.

    Args:
        capacity: steps to keep.
        alpha: 0 or more; 0 draws every trajectory alike. beta: in [0, 1]; 1 undoes the preference in full.
    """

    def __init__(self, capacity: int, *, alpha: float = 0.6, beta: float = 0.4) -> None:
        """Start empty."""
        super().__init__(capacity)
        _check.at_least("replay", "alpha", alpha, 0.0)
        _check.within("replay", "beta", beta, 0.0, 1.0)
        self.alpha, self.beta = alpha, beta
        self._priorities: dict[int, float] = {}

    def add(self, trajectory: Mapping[str, Tensor]) -> int:
        """Keep a trajectory at the highest priority held, and return its id. Raises: as `UniformReplay.add`."""
        highest = max(self._priorities.values(), default=1.0)
        added = super().add(trajectory)
        self._priorities = {i: p for i, p in self._priorities.items() if i in self._trajectories}
        self._priorities[added] = highest
        return added

    def update(self, trajectory_ids: Tensor, priorities: Tensor) -> None:
        """Set the priorities of trajectories; those that are gone are passed over.

        Args:
            trajectory_ids: [B], integer: from `Windows`.
            priorities: [B], floating, over 0, such as a mean absolute TD error.

        Raises: DtypeError, ShapeError; SettingError for a priority that is not finite and over 0.
        """
        _check.floating("update", "priorities", priorities)
        _check.integer("update", "trajectory_ids", trajectory_ids)
        _check.rows("update", trajectory_ids=trajectory_ids, priorities=priorities)
        given = dict(zip(trajectory_ids.tolist(), priorities.tolist(), strict=True))
        for priority in given.values():
            if not 0.0 < priority < float("inf"):
                raise SettingError(f"update: priority is {priority}, want a finite one over 0: add a small constant")
        self._priorities.update({i: priority for i, priority in given.items() if i in self._priorities})

    def state_dict(self) -> ReplayState:
        """Return what `load_state_dict` needs to go on from here, priorities included."""
        return {**super().state_dict(), "priorities": dict(self._priorities)}

    def load_state_dict(self, state: ReplayState) -> None:
        """Hold what `state` holds, and nothing else.

        Raises: SettingError where it is over the capacity, or has not a priority for each trajectory.
        """
        if state["priorities"].keys() != state["trajectories"].keys():
            raise SettingError(
                f"load_state_dict: got {len(state['priorities'])} priorities for {len(state['trajectories'])} "
                "trajectories, want one each: load the state of a PrioritizedReplay"
            )
        super().load_state_dict(state)
        self._priorities = dict(state["priorities"])

    def _shares(self) -> Tensor:
        return torch.tensor([self._priorities[i] for i in self._trajectories], dtype=torch.float64) ** self.alpha

    def _weights(self, chances: Tensor) -> Tensor:
        lengths = super()._shares()
        weights = (chances / (lengths / lengths.sum())) ** -self.beta
        return weights / weights.max()


def _length(trajectory: Mapping[str, Tensor]) -> int:
    """Return the trajectory's number of steps."""
    return int(next(iter(trajectory.values())).shape[0])


def _layout(trajectory: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return each field's shape beyond time, and dtype, by name."""
    return {name: (tuple(x.shape[1:]), x.dtype) for name, x in sorted(trajectory.items())}


def _window(x: Tensor, start: int, num_steps: int) -> Tensor:
    """Return `num_steps` steps of `x` from `start`, zeros beyond its end."""
    part = x[start : start + num_steps]
    if len(part) == num_steps:
        return part
    return torch.cat([part, part.new_zeros(num_steps - len(part), *part.shape[1:])])
