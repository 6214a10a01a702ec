"""One problem, as every task makes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Problem"]


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
