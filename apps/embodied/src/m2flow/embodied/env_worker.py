"""The environment worker: vector environments in a process of their own, a lane of episodes in each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from m2flow.embodied.film import webp
from m2flow.worker import Item, Worker, stage
from m2flow.worker.engines.env import Floats, Step
from m2flow.worker.engines.env.gymnasium import GymnasiumEnv, GymnasiumEnvConfig

__all__ = ["EnvWorker", "EnvWorkerConfig"]


@dataclass(frozen=True)
class EnvWorkerConfig:
    """Attributes:
    id, goal_scale: the task, as `GymnasiumEnvConfig` takes them.
    episodes_per_lane: environments of a lane.
    pixels: side of a film's picture.
    """

    id: str
    goal_scale: float
    episodes_per_lane: int
    pixels: int = 160


class EnvWorker(Worker):
    """Its config is an `EnvWorkerConfig` as a dict. The episodes that die with it are dropped, and counted."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "drop"

    def setup(self) -> None:
        """Makes nothing yet: environments are made for the first lanes, and kept for those after."""
        self._config = EnvWorkerConfig(**self.config)
        self._lanes: dict[str, _Lane] = {}
        self._idle: list[GymnasiumEnv] = []
        self._show: _Show | None = None

    @stage
    def reset(self, items: list[Item]) -> Iterator[Item]:
        """Begins the episodes of each lane by its `seeds`; gives `observations`, float32 [n, size]."""
        for item in items:
            env = self._idle.pop() if self._idle else self._made(self._config.episodes_per_lane)
            lane = self._lanes[item.id] = _Lane(env, [env.reset(item.fields["seeds"])])
            yield item.with_fields(observations=lane.observations[0], place=0)

    @stage
    def step(self, items: list[Item]) -> list[Item]:
        """Takes the `actions` [n, size] of each lane; gives its next observations, or all that it played.

        That is, of n episodes and T steps: `observations` [n, T+1, size]; `actions` [n, T, size]; `logprobs`, `rewards`
        (float32), `mask`, `terminated`, `truncated`, `successes` (bool) [n, T]. `mask` is where an episode was on.
        """
        return [self._stepped(item) for item in items]

    def begin(self, seeds: list[list[int]], filmed: bool) -> Floats:
        """Begins episodes to be watched, by this rank's entry of `seeds`; with `filmed` one, in pictures."""
        own = seeds[self.context.rank]
        if filmed:
            self._show = _Show(self._made(1, self._config.pixels), frames=[])
        else:
            env = self._idle.pop() if self._idle else self._made(self._config.episodes_per_lane)
            self._show = _Show(env)
        return self._show.begin(own)

    def advance(self, actions: Floats) -> dict[str, Any] | None:
        """Takes actions in what is watched; returns `observations` and whether anything `is_playing`.

        None, as of the two below, where the process that began has died, and this one knows nothing of it.
        """
        return self._show.advance(actions) if self._show else None

    def verdict(self) -> dict[str, list[float]] | None:
        """What came of the episodes that were watched: `returns`, `success_once`, `success_at_end`, an entry each."""
        show, self._show = self._show, None
        if show is None:
            return None
        self._idle.append(show.env)
        return show.verdict()

    def film(self) -> bytes | None:
        """The pictures of what was watched, as an animated WebP."""
        show, self._show = self._show, None
        if show is None:
            return None
        assert show.frames is not None, "film comes after a filmed begin"
        show.env.close()
        return webp(show.frames)

    def _stepped(self, item: Item) -> Item:
        lane = self._lanes[item.id]
        lane.advance(item.fields["actions"], item.fields["logprobs"])
        if lane.env.playing.any():
            fields = {"observations": lane.observations[-1], "place": len(lane.steps), "is_playing": True}
            return replace(item, fields=fields)
        self._idle.append(self._lanes.pop(item.id).env)
        return replace(item, fields={**lane.played(), "is_playing": False})

    def _made(self, num_envs: int, pixels: int = 0) -> GymnasiumEnv:
        config = self._config
        return GymnasiumEnv(GymnasiumEnvConfig(config.id, num_envs, config.goal_scale, pixels))


@dataclass
class _Lane:
    """Episodes under way, and all that was seen and done in them."""

    env: GymnasiumEnv
    observations: list[Floats]
    actions: list[Floats] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)
    mask: list[NDArray[np.bool_]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def advance(self, actions: Floats, logprobs: Floats) -> None:
        self.actions.append(actions)
        self.logprobs.append(logprobs)
        self.mask.append(self.env.playing)
        self.steps.append(self.env.step(actions))
        self.observations.append(self.steps[-1].observations)

    def played(self) -> Mapping[str, NDArray[Any]]:
        by_step = ("rewards", "terminated", "truncated", "successes")
        return {
            "observations": np.stack(self.observations, axis=1),
            "actions": np.stack(self.actions, axis=1),
            "logprobs": np.stack(self.logprobs, axis=1),
            "mask": np.stack(self.mask, axis=1),
            **{name: np.stack([getattr(step, name) for step in self.steps], axis=1) for name in by_step},
        }


@dataclass
class _Show:
    """Episodes that are watched, not learned from."""

    env: GymnasiumEnv
    frames: list[NDArray[np.uint8]] | None = None

    def begin(self, seeds: Sequence[int]) -> Floats:
        observations = self.env.reset(seeds)
        self._returns = np.zeros(self.env.num_envs)
        self._once = self._at_end = np.zeros(self.env.num_envs, dtype=np.bool_)
        self._shoot()
        return observations

    def advance(self, actions: Floats) -> dict[str, Any]:
        step = self.env.step(actions)
        self._returns += step.rewards
        self._once, self._at_end = self._once | step.successes, step.successes
        self._shoot()
        return {"observations": step.observations, "is_playing": bool(self.env.playing.any())}

    def verdict(self) -> dict[str, list[float]]:
        found = {"returns": self._returns, "success_once": self._once, "success_at_end": self._at_end}
        return {name: [float(value) for value in values] for name, values in found.items()}

    def _shoot(self) -> None:
        if self.frames is not None:
            self.frames.append(self.env.render())
