"""Rewards by a function of the user's, in processes that can be ended when it hangs.

What failed, or took too long, follows the pool's policy: "score" gives it the failure's score, "skip" says that there
is none, "stop" raises.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

from m2flow.worker._tasks import KINDS
from m2flow.worker.errors import RewardFailed
from m2flow.worker.pool import Outcome, TaskPool


@dataclass(frozen=True)
class Reward:
    """What an item got: `score`, None where it was skipped; `error` says why there was none of its own.

    `count` is the name that it is counted by: reward/scored, or for a failure reward/errors, /timeouts or /deaths.
    """

    score: float | None
    parts: Mapping[str, float]
    error: str = ""
    count: str = "reward/scored"


@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of an item that failed or ran out of time: "score" gives it `failure_score`."""

    on_failure: Literal["score", "skip", "stop"] = "score"
    failure_score: float = 0.0

    def __post_init__(self) -> None:
        if self.on_failure not in ("score", "skip", "stop"):
            raise ValueError(f"reward: got on_failure={self.on_failure!r}, want 'score', 'skip' or 'stop'")

    def failed(self, error: str, count: str = "reward/errors") -> Reward:
        """The reward of an item that has none of its own. Raises RewardFailed where the policy is to stop."""
        if self.on_failure == "stop":
            raise RewardFailed(f"reward: {error}: want a score, or on_failure='score' or 'skip'")
        return Reward(self.failure_score if self.on_failure == "score" else None, {}, error, count)


SCORE_ZERO = FailurePolicy()
"""A failure scores 0."""


class Rewarder(Protocol):
    """What gives rewards: a pool of processes here, or a service elsewhere."""

    def score(self, items: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None) -> list[Reward]:
        """The rewards of the items' fields, in order, each within its own time, or `timeout_s` where that is less.

        Blocks until all are there; raises RewardFailed by the policy, ValueError on a `timeout_s` that is not above 0.
        """

    def counts(self) -> dict[str, float]:
        """Since the start, for the metrics: reward/scored, reward/errors, reward/timeouts, reward/deaths."""

    def close(self) -> None:
        """Frees what it holds. Blocks shortly."""


class RewardPool:
    """A function `(fields) -> float | {"reward": float, part: float ...}` in `num_processes` processes.

    `target` names it as "module:qualname". Each item has `timeout_s` seconds. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        target: str,
        *,
        num_processes: int = 1,
        timeout_s: float = 10.0,
        policy: FailurePolicy = SCORE_ZERO,
    ) -> None:
        self._pool = TaskPool(target, num_processes=num_processes, timeout_s=timeout_s)
        self._policy = policy
        self._mutex = threading.Lock()
        self._counts: Counter[str] = Counter()

    def score(self, items: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None) -> list[Reward]:
        """The rewards of the items' fields, in order, each within the pool's seconds or `timeout_s`, whichever is less.

        Blocks until all are there. Raises RewardFailed where the policy is "stop" and an item failed; ValueError on a
        `timeout_s` that is not above 0; SessionClosedError on a closed pool.
        """
        futures = [self._pool.submit(dict(fields), timeout_s=timeout_s) for fields in items]
        return [self._reward(future.result()) for future in futures]

    def counts(self) -> dict[str, float]:
        """Since the start, for the metrics: reward/scored, reward/errors, reward/timeouts, reward/deaths."""
        with self._mutex:
            return {_count(kind): float(self._counts[_count(kind)]) for kind in KINDS}

    def close(self) -> None:
        """Ends the processes. Blocks until they have ended."""
        self._pool.close()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reward(self, outcome: Outcome) -> Reward:
        reward, kind, error = None, outcome.kind, outcome.error
        if kind == "done":
            try:
                reward = _parsed(outcome.value)
            except (OverflowError, TypeError, ValueError) as failure:
                kind = "errors"
                error = (
                    f"got {_shown(outcome.value)}, want a finite number, or numbers by name with a 'reward': {failure}"
                )
        with self._mutex:
            self._counts[_count(kind)] += 1
        return reward or self._policy.failed(error, _count(kind))


def _count(kind: str) -> str:
    return f"reward/{'scored' if kind == 'done' else kind}"


def _parsed(value: Any) -> Reward:
    if not isinstance(value, dict):
        return Reward(_finite(value), {})
    if "reward" not in value:
        raise ValueError("it has no 'reward'")
    numbers = {str(name): _finite(number) for name, number in value.items()}
    return Reward(numbers.pop("reward"), numbers)


def _finite(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r:.20} is a text")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("it is not finite")
    return number


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception as failure:  # An integer of very many digits, or a class of the user's.
        return f"a {type(value).__name__} ({failure})"
