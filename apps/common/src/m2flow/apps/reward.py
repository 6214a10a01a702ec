"""The reward worker: each completion's text, judged by the task that set the problem."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from m2flow.apps.tasks import Option, make_task
from m2flow.worker import Item, Worker, stage

__all__ = ["RewardConfig", "RewardWorker"]


@dataclass(frozen=True)
class RewardConfig:
    """Attributes: task, task_options, seed: what `make_task` takes."""

    task: str
    task_options: Mapping[str, Option]
    seed: int


class RewardWorker(Worker):
    """Takes samples and gives them a `reward`. Its config is a `RewardConfig` as a dict."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"

    def setup(self) -> None:
        """Makes the task."""
        config = RewardConfig(**self.config)
        self._task = make_task(config.task, config.task_options, config.seed)

    @stage
    def score(self, items: list[Item]) -> Iterable[Item]:
        """Each sample with `reward`, float, from its `completion` and its problem's fields."""
        return [item.with_fields(reward=self._task.score(item.fields["completion"], item.fields)) for item in items]

    def judge(self, completions: list[str], problems: list[dict[str, Any]]) -> list[float]:
        """The rewards of completions outside the flow, in order."""
        return [self._task.score(text, fields) for text, fields in zip(completions, problems, strict=True)]
