"""Sums in a form with two worked examples: small enough to be learned on two cores, with an exact verifier.

A part of what is learned is the form: to answer at once, with digits and nothing before them.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.apps.tasks_problem import Problem
from m2flow.apps.tasks_split import Split

__all__ = ["SUMS", "Difficulty", "SumsTask"]


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
        ordered = list(itertools.product(difficulty.first, difficulty.second))
        self._split = Split("sums", ordered, difficulty.examples, alike=_unordered, seed=seed)

    def training(self, step: int, count: int) -> Sequence[Problem]:
        """See `Task`. A step draws without repetition as long as there are enough."""
        return [self._problem(*pair) for pair in self._split.training(step, count)]

    def held_out(self, count: int) -> Sequence[Problem]:
        """See `Task`."""
        return [self._problem(*pair) for pair in self._split.held_out(count)]

    def score(self, completion: str, problem: Mapping[str, Any]) -> float:
        """1 if the completion starts with the answer's digits and no further digit, else 0."""
        found = _LEADING_NUMBER.match(completion)
        return float(found is not None and found[0] == problem["answer"])

    def _problem(self, a: int, b: int) -> Problem:
        return Problem(f"{self._examples}{a}+{b}=", str(a + b))


def _unordered(pair: tuple[int, int]) -> tuple[int, ...]:
    return tuple(sorted(pair))
