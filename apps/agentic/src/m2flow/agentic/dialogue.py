"""How a conversation reads: a line a turn, so that a turn ends where its line does.

    Q: (3+4)*5        the problem
    calc(3+4)         the model calls a tool
    7                 the tool's result
    calc(7*5)
    35
    A: 35             the model answers, which ends the conversation

The text before a conversation is worked examples of the same form, an empty line after each.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "Call",
    "Example",
    "answer_of",
    "call_of",
    "error_words",
    "preamble",
    "question_line",
    "result_line",
    "spoken_lines",
]

# A tool's result is read by the model: what went wrong is said in few words.
_MAX_ERROR_CHARACTERS = 60
_CALL = re.compile(r"([a-z]\w*)\((.*)\)")
_ANSWER = re.compile(r"A: ?(-?\d+)")


@dataclass(frozen=True)
class Call:
    """What the model asks for: a tool by its name, and the text between the brackets."""

    tool: str
    argument: str

    def __str__(self) -> str:
        return f"{self.tool}({self.argument})"


@dataclass(frozen=True)
class Example:
    """A conversation that went well: the calls with their results, and the answer."""

    question: str
    calls: tuple[tuple[Call, str], ...]
    answer: str


def preamble(examples: Iterable[Example]) -> str:
    """The text that every conversation begins with."""
    return "".join(_example(example) for example in examples)


def question_line(question: str) -> str:
    """The line that puts the problem."""
    return f"Q: {question}\n"


def result_line(result: str) -> str:
    """The line that a tool's result is fed back as: its line breaks become spaces."""
    return f"{' '.join(result.split())}\n"


def error_words(reason: str) -> str:
    """What the model reads in place of a result: one short line, whatever went wrong."""
    line = " ".join(reason.split())
    return f"error: {line[:_MAX_ERROR_CHARACTERS]}"


def call_of(turn: str) -> Call | None:
    """The call that a turn is, if it is one and nothing else."""
    found = _CALL.fullmatch(turn.strip())
    return Call(found[1], found[2]) if found else None


def answer_of(turn: str) -> str | None:
    """The answer that a turn gives, if it gives one and nothing else."""
    found = _ANSWER.fullmatch(turn.strip())
    return found[1] if found else None


def spoken_lines(example: Example) -> list[tuple[str, bool]]:
    """What follows the question in a worked example, a line each, and whether the model says it."""
    calls = [line for call, result in example.calls for line in ((f"{call}\n", True), (result_line(result), False))]
    return [*calls, (f"A: {example.answer}\n", True)]


def _example(example: Example) -> str:
    return question_line(example.question) + "".join(line for line, _ in spoken_lines(example)) + "\n"
