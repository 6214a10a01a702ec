"""The reward worker: each completion's text, judged by the task that set the problem or by the user's function."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from m2flow.apps.tasks import Option, make_task
from m2flow.worker import Item, Worker, stage
from m2flow.worker.reward import FailurePolicy, Reward, RewardPool

__all__ = ["RewardConfig", "RewardWorker"]


@dataclass(frozen=True)
class RewardConfig:
    """Attributes:
    task, task_options, seed: what `make_task` takes.
    function: judges in place of the task, in `num_processes` processes, within `timeout_s` seconds; see `RewardPool`.
      It is given `prompt`, `completion`, `answer` and `data` of a sample.
    on_failure: what becomes of a sample whose function fails: "score" 0, "skip" it, or "stop" the run.
    """

    task: str
    task_options: Mapping[str, Option]
    seed: int
    function: str = ""
    num_processes: int = 1
    timeout_s: float = 10.0
    on_failure: Literal["score", "skip", "stop"] = "score"


_MOST_SAID = 20


class RewardWorker(Worker):
    """Takes samples and gives them a `reward`. Its config is a `RewardConfig` as a dict."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"

    def setup(self) -> None:
        """Makes the task, or starts the function's processes."""
        config = RewardConfig(**self.config)
        self._said: set[str] = set()
        self._pool = _pool(config) if config.function else None
        self._task = None if config.function else make_task(config.task, config.task_options, config.seed)

    @stage
    def score(self, items: list[Item]) -> Iterable[Item]:
        """Each sample with `reward`, float, and its `reward_parts`, counted; a tombstone where it is skipped."""
        rewards = self._rewards([_asked(item.fields, item.fields["completion"]) for item in items])
        return [_rewarded(item, reward) for item, reward in zip(items, rewards, strict=True)]

    def judge(self, completions: list[str], problems: list[dict[str, Any]]) -> list[float]:
        """The rewards of completions outside the flow, in order; 0 for what is skipped."""
        asked = [_asked(fields, text) for text, fields in zip(completions, problems, strict=True)]
        return [reward.score or 0.0 for reward in self._rewards(asked)]

    def close(self) -> None:
        """Ends the function's processes."""
        if self._pool:
            self._pool.close()

    def _rewards(self, asked: list[dict[str, Any]]) -> list[Reward]:
        if self._task:
            return [Reward(self._task.score(fields["completion"], fields), {}) for fields in asked]
        assert self._pool
        rewards = self._pool.score(asked)
        for error in dict.fromkeys(reward.error for reward in rewards if reward.error):
            self._say(error)
        return rewards

    def _say(self, error: str) -> None:
        """Prints an error once, and no more than so many of them."""
        if error not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(error)
            print(f"the reward function failed: {error}", flush=True)


def _pool(config: RewardConfig) -> RewardPool:
    policy = FailurePolicy(config.on_failure)
    return RewardPool(config.function, num_processes=config.num_processes, timeout_s=config.timeout_s, policy=policy)


def _asked(fields: Mapping[str, Any], completion: str) -> dict[str, Any]:
    """What a judge reads of a sample."""
    return {
        "prompt": fields["prompt"],
        "completion": completion,
        "answer": fields["answer"],
        "data": fields.get("data", {}),
    }


def _rewarded(item: Item, reward: Reward) -> Item:
    if reward.score is None:
        return item.as_tombstone(reward.count)
    return item.with_fields(reward=reward.score, reward_parts=dict(reward.parts), counts={reward.count: 1})
