"""What is learned: problems that are generated, answers that are verified, and a part that is never trained on."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from m2flow.apps import tasks_file, tasks_gym
from m2flow.apps.tasks_file import FileTask, file_problems
from m2flow.apps.tasks_gym import GymTask, gym_problems
from m2flow.apps.tasks_problem import Problem
from m2flow.apps.tasks_sums import SUMS, SumsTask

__all__ = ["Option", "Problem", "Task", "make_task", "task_problems"]

Option = bool | int | float | str


class Task(Protocol):
    """A source of problems and the judge of answers. Everything in it is a function of name, options and seed."""

    def training(self, step: int, count: int) -> Sequence[Problem]:
        """The problems of a step, `count` of them: the same for the same step. None of them is held out."""

    def held_out(self, count: int) -> Sequence[Problem]:
        """`count` problems that training never draws, or all there are."""

    def score(self, completion: str, problem: Mapping[str, Any]) -> float:
        """The reward, in [0, 1] unless the task says otherwise, of a completion's text for a problem's fields."""


def task_problems(name: str, options: Mapping[str, Option]) -> list[str]:
    """Returns what is wrong with a task's name or options; empty when `make_task` takes them."""
    if name.startswith(tasks_gym.PREFIX):
        return gym_problems(name.removeprefix(tasks_gym.PREFIX), options)
    is_file = name.startswith(tasks_file.PREFIX)
    if not is_file and name not in SUMS:
        near = difflib.get_close_matches(name, SUMS, n=1)
        others = (
            f"or {tasks_gym.PREFIX}chain_sum, say, of reasoning-gym, or {tasks_file.PREFIX}PATH of your own problems"
        )
        hint = f"did you mean {near[0]!r}?" if near else others
        return [f"task: got {name!r}, want one of {', '.join(SUMS)}: {hint}"]
    if options:
        return [f"task_options: got {', '.join(options)}, want none for {name}: it has no settings"]
    return file_problems(name.removeprefix(tasks_file.PREFIX)) if is_file else []


def make_task(name: str, options: Mapping[str, Option], seed: int) -> Task:
    """Returns the task. Raises ValueError with the words of `task_problems` when there is none."""
    if problems := task_problems(name, options):
        raise ValueError("; ".join(problems))
    if name.startswith(tasks_gym.PREFIX):
        return GymTask(name.removeprefix(tasks_gym.PREFIX), options, seed)
    if name.startswith(tasks_file.PREFIX):
        return FileTask(name.removeprefix(tasks_file.PREFIX), seed)
    return SumsTask(SUMS[name], seed)
