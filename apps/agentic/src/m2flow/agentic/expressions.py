"""Problems that a small language model cannot do in its head: (a+b)*c, which takes two steps."""

import itertools
from collections.abc import Sequence

from m2flow.agentic.dialogue import Call, Example
from m2flow.apps.tasks import Problem
from m2flow.apps.tasks_split import Split

__all__ = ["ExpressionTask"]

Numbers = tuple[int, int, int]
_SHOWN: tuple[Numbers, ...] = ((3, 4, 5), (6, 2, 7))


class ExpressionTask:
    """Problems such as (3+4)*5, of one-digit numbers; (3+4)*5 and (4+3)*5 are on one side of the split."""

    def __init__(self, seed: int) -> None:
        every = list(itertools.product(range(1, 10), range(1, 10), range(2, 10)))
        self._split = Split("expressions", every, _SHOWN, alike=_unordered, seed=seed)

    @property
    def examples(self) -> tuple[Example, ...]:
        """The worked examples, whose problems are neither trained on nor held out."""
        return tuple(self.worked(*numbers) for numbers in _SHOWN)

    def worked(self, a: int, b: int, c: int) -> Example:
        """(a+b)*c as it is to be worked out."""
        total, product = str(a + b), str((a + b) * c)
        calls = ((Call("calc", f"{a}+{b}"), total), (Call("calc", f"{total}*{c}"), product))
        return Example(f"({a}+{b})*{c}", calls, product)

    def training(self, step: int, count: int) -> Sequence[Problem]:
        """The problems of a step: the same for the same step. None of them is held out."""
        return [_problem(*numbers) for numbers in self._split.training(step, count)]

    def held_out(self, count: int) -> Sequence[Problem]:
        """`count` problems that training never draws, or all there are."""
        return [_problem(*numbers) for numbers in self._split.held_out(count)]


def _problem(a: int, b: int, c: int) -> Problem:
    return Problem(f"({a}+{b})*{c}", str((a + b) * c), data={"numbers": [a, b, c]})


def _unordered(numbers: Numbers) -> tuple[int, ...]:
    a, b, c = numbers
    return (min(a, b), max(a, b), c)
