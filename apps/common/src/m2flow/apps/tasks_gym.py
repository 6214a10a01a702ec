"""reasoning-gym's generators by name, with their own verifiers."""

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.apps.seeding import derived_seed
from m2flow.apps.tasks_problem import Problem

__all__ = ["PREFIX", "GymTask", "gym_problems"]

PREFIX = "gym/"
"""Task names begin with it: gym/chain_sum."""

# Problems generated for one that is used: what is held out is passed over.
_SPARE = 4
_NUM_HELD_OUT = 200
_INSTRUCTION = "\nReply with just the answer."


def gym_problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with a generator's name or settings; empty when it makes problems."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return [f"task: {PREFIX}{name} needs the package reasoning-gym: pip install 'm2flow-reasoning[gym]'"]
    try:
        _dataset(name, options, seed=0, size=1)
    except Exception as error:  # a generator refuses its settings in its own ways
        return [f"task: reasoning-gym refuses {name!r} with {dict(options)} ({error}): see its list of generators"]
    return []


class GymTask:
    """`Task` over one reasoning-gym generator. Prompts are chat messages; the whole reply is the answer."""

    def __init__(self, name: str, options: Mapping[str, Any], seed: int) -> None:
        """`options` are the generator's own settings."""
        self._name = name
        self._options = options
        self._seed = seed
        self._judge = _dataset(name, options, seed=0, size=1)
        made = self._problems(_NUM_HELD_OUT, "held out")
        self._held_out = list({problem.prompt: problem for problem in made}.values())

    def training(self, step: int, count: int) -> Sequence[Problem]:
        """See `Task`. Raises ValueError where the generator has hardly any problem that is not held out."""
        reserved = {problem.prompt for problem in self._held_out}
        fresh = [p for p in self._problems(_SPARE * count, "step", step) if p.prompt not in reserved]
        if len(fresh) < count:
            raise ValueError(
                f"task {PREFIX}{self._name}: {len(fresh)} of {_SPARE * count} problems are not held out, want "
                f"{count}: choose settings that make more distinct problems"
            )
        return fresh[:count]

    def held_out(self, count: int) -> Sequence[Problem]:
        """See `Task`."""
        return self._held_out[:count]

    def score(self, completion: str, problem: Mapping[str, Any]) -> float:
        """The generator's own score of the reply, spaces around it removed."""
        entry = {
            "question": problem["data"]["question"],
            "answer": problem["answer"],
            "metadata": json.loads(problem["data"]["metadata"]),
        }
        return float(self._judge.score_answer(completion.strip(), entry))

    def _problems(self, count: int, *path: str | int) -> list[Problem]:
        seed = derived_seed(self._seed, "gym", *path) % 2**31
        dataset = _dataset(self._name, self._options, seed=seed, size=count)
        return [_problem(dataset[index]) for index in range(count)]


def _dataset(name: str, options: Mapping[str, Any], *, seed: int, size: int) -> Any:
    return importlib.import_module("reasoning_gym").create_dataset(name, seed=seed, size=size, **options)


def _problem(entry: Mapping[str, Any]) -> Problem:
    data = {"question": entry["question"], "metadata": json.dumps(entry["metadata"], default=str)}
    return Problem(entry["question"] + _INSTRUCTION, str(entry["answer"]), chat=True, data=data)
