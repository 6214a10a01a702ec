"""Problems of the user's own, from a file of JSON lines."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m2flow.apps.tasks_problem import Problem
from m2flow.apps.tasks_split import Split
from m2flow.comm import PayloadError, encode

__all__ = ["PREFIX", "FileTask", "file_problems"]

PREFIX = "file/"
"""Task names begin with it: file/sums.jsonl, or file//data/sums.jsonl for a path from the root."""


def file_problems(path: str) -> list[str]:
    """Returns what is wrong with a file of problems, with the line; empty when a task can be made of it."""
    try:
        _split(_read(path), seed=0)
    except ValueError as error:
        return [f"task: {error}"]
    return []


class FileTask:
    """`Task` over a file with an object a line: `prompt` and `answer`, and `chat` where the prompt is a message.

    What else a line has is the judge's `data`. A part of the prompts, chosen by the seed, is held out.
    """

    def __init__(self, path: str, seed: int) -> None:
        """Reads the file. Raises ValueError with the line that is wrong."""
        self._split = _split(_read(path), seed)

    def training(self, step: int, count: int) -> Sequence[Problem]:
        """See `Task`. A step draws without repetition as long as there are enough."""
        return self._split.training(step, count)

    def held_out(self, count: int) -> Sequence[Problem]:
        """See `Task`."""
        return self._split.held_out(count)

    def score(self, completion: str, problem: Mapping[str, Any]) -> float:
        """1 if the completion is the answer, spaces around either removed, else 0."""
        return float(completion.strip() == problem["answer"].strip())


def _split(problems: Sequence[Problem], seed: int) -> Split[Problem]:
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(p.prompt for p in problems))}
    return Split("file", problems, (), alike=lambda problem: (numbers[problem.prompt],), seed=seed)


def _read(path: str) -> list[Problem]:
    try:
        file = Path(path).expanduser()
        if file.exists() and not file.is_file():  # It is read more than once.
            raise ValueError("it is no regular file")
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"got {path}, want a file of JSON lines: {error}") from error
    problems = [_problem(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if len({problem.prompt for problem in problems}) < _FEWEST:
        raise ValueError(f"{path}: got {len(problems)} problems, want at least {_FEWEST} with prompts of their own")
    return problems


# One in four is held out.
_FEWEST = 4


def _problem(place: str, line: str) -> Problem:
    try:
        entry = json.loads(line)
        encode(entry)
    except (PayloadError, RecursionError, ValueError) as error:
        raise ValueError(f"{place}: got {line[:40]!r}, want a JSON object: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
        raise ValueError(f"{place}: got {line[:40]!r}, want an object with a text under 'prompt'")
    prompt, answer, chat = entry.pop("prompt"), entry.pop("answer", ""), entry.pop("chat", False)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not isinstance(chat, bool):
        raise ValueError(
            f"{place}: got answer {answer!r} and chat {chat!r}, want a text or a number, and true or false"
        )
    return Problem(prompt, str(answer), chat, entry)
