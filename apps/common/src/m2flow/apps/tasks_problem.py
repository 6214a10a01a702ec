"""One problem, as every task makes them, and as it enters the flow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m2flow.worker import Item

__all__ = ["Problem", "problem_items"]


@dataclass(frozen=True)
class Problem:
    """Attributes:
    prompt: what the model reads.
    answer: the right answer, for people and for simple verifiers.
    chat: whether the prompt is a user's message, to be put into the model's chat template.
    data: what else the verifier needs, a payload tree.
    """

    prompt: str
    answer: str
    chat: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The same as item fields, from which the verifier works."""
        return {"prompt": self.prompt, "answer": self.answer, "chat": self.chat, "data": dict(self.data)}


def problem_items(problems: Sequence[Problem], step: int) -> list[Item]:
    """The problems of a step as its source items, in order."""
    return [Item((place,), step, problem.fields()) for place, problem in enumerate(problems)]
