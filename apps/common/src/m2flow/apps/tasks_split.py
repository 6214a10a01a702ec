"""All problems of a kind, parted by the seed: some are never trained on, and neither are those that are alike."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from m2flow.apps.seeding import derived_seed

__all__ = ["Split"]

# One problem in four, counted by what is alike, is never trained on.
_HELD_OUT_SHARE = 4

P = TypeVar("P")


class Split(Generic[P]):
    """The problems of a kind: `shown` are examples, neither trained on nor held out; the rest are parted.

    `alike(problem)` is the same for problems that give each other's answers away, such as a sum and the sum with its
    numbers changed over: they stay on one side. Everything depends on `name`, the order of
    `problems` and `seed`.
    """

    def __init__(
        self, name: str, problems: Sequence[P], shown: Sequence[P], *, alike: Callable[[P], tuple[int, ...]], seed: int
    ) -> None:
        self._name = name
        self._seed = seed
        known = {alike(problem) for problem in shown}
        kinds = sorted({key for problem in problems if (key := alike(problem)) not in known})
        shuffled = self._generator("split").permutation(len(kinds))
        held = {kinds[index] for index in shuffled[: len(kinds) // _HELD_OUT_SHARE]}
        order = self._generator("order").permutation(len(problems))
        usable = [problems[index] for index in order if alike(problems[index]) not in known]
        self._held_out = [problem for problem in usable if alike(problem) in held]
        self._training = [problem for problem in usable if alike(problem) not in held]

    def training(self, step: int, count: int) -> list[P]:
        """The problems of a step, the same for the same step; without repetition as long as there are enough."""
        chosen = self._generator("step", step).choice(len(self._training), count, replace=count > len(self._training))
        return [self._training[index] for index in chosen]

    def held_out(self, count: int) -> list[P]:
        """`count` problems that training never draws, or all there are."""
        return self._held_out[:count]

    def _generator(self, *path: str | int) -> np.random.Generator:
        return np.random.default_rng(derived_seed(self._seed, self._name, *path))
