"""Sums in a form with two worked examples: small enough to be learned on two cores, with an exact verifier.

A part of what is learned is the form: to answer at once, with digits and nothing before them.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2flow.apps.seeding import derived_seed
from m2flow.apps.tasks_problem import Problem

__all__ = ["SUMS", "Difficulty", "SumsTask"]

# One problem in four, by unordered pair, is never trained on.
_HELD_OUT_SHARE = 4


@dataclass(frozen=True)
class Difficulty:
    """Attributes:
    first, second: what the two numbers are drawn from.
    examples: the worked examples that every prompt begins with; their pairs are neither trained on nor held out.
    """

    first: range
    second: range
    examples: tuple[tuple[int, int], ...]


SUMS: Mapping[str, Difficulty] = {
    "one_digit_sums": Difficulty(range(10), range(10), ((2, 3), (4, 1))),
    "two_digit_sums": Difficulty(range(10, 100), range(1, 10), ((12, 3), (41, 7))),
    "two_digit_pairs": Difficulty(range(10, 100), range(10, 100), ((12, 31), (41, 27))),
}
"""Difficulties by task name: one digit plus one; two digits plus one; two digits plus two."""

_LEADING_NUMBER = re.compile(r"\d+")


class SumsTask:
    """`Task`: prompts such as "12+3=15", "41+7=48", "23+4=", a line each."""

    def __init__(self, difficulty: Difficulty, seed: int) -> None:
        self._examples = "".join(f"{a}+{b}={a + b}\n" for a, b in difficulty.examples)
        self._seed = seed
        shown = {frozenset(pair) for pair in difficulty.examples}
        ordered = list(itertools.product(difficulty.first, difficulty.second))
        pairs = sorted({tuple(sorted(pair)) for pair in ordered if frozenset(pair) not in shown})
        shuffled = _generator(seed, "split").permutation(len(pairs))
        held = {frozenset(pairs[index]) for index in shuffled[: len(pairs) // _HELD_OUT_SHARE]}
        order = _generator(seed, "order").permutation(len(ordered))
        usable = [ordered[index] for index in order if frozenset(ordered[index]) not in shown]
        self._held_out = [pair for pair in usable if frozenset(pair) in held]
        self._training = [pair for pair in usable if frozenset(pair) not in held]

    def training(self, step: int, count: int) -> Sequence[Problem]:
        """See `Task`. A step draws without repetition as long as there are enough."""
        chosen = _generator(self._seed, "step", step).choice(
            len(self._training), count, replace=count > len(self._training)
        )
        return [self._problem(*self._training[index]) for index in chosen]

    def held_out(self, count: int) -> Sequence[Problem]:
        """See `Task`."""
        return [self._problem(*pair) for pair in self._held_out[:count]]

    def score(self, completion: str, problem: Mapping[str, Any]) -> float:
        """1 if the completion starts with the answer's digits and no further digit, else 0."""
        found = _LEADING_NUMBER.match(completion)
        return float(found is not None and found[0] == problem["answer"])

    def _problem(self, a: int, b: int) -> Problem:
        return Problem(f"{self._examples}{a}+{b}=", str(a + b))


def _generator(seed: int, *path: str | int) -> np.random.Generator:
    return np.random.default_rng(derived_seed(seed, "sums", *path))
