"""Rewards by a function of the user's, in processes that can be ended when it hangs.

A pool forks its processes from a template that has imported the function and done nothing else, so that one that ran
out of time is replaced within milliseconds. What failed, or took too long, follows the pool's policy: "score" gives it
the failure's score, "skip" says that there is none, "stop" raises.
"""

import subprocess
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

from m2flow.comm import decode, encode
from m2flow.worker._python import MODULE, child_environment
from m2flow.worker._tasks import Answer, Task, read_answer, write_task
from m2flow.worker.errors import RewardFailed, SessionClosedError
from m2flow.worker.target import resolve_target


@dataclass(frozen=True)
class Reward:
    """What an item got: `score`, None where it was skipped; `error` says why there was none of its own."""

    score: float | None
    parts: Mapping[str, float]
    error: str = ""


@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of an item that failed or ran out of time: "score" gives it `failure_score`."""

    on_failure: Literal["score", "skip", "stop"] = "score"
    failure_score: float = 0.0

    def __post_init__(self) -> None:
        if self.on_failure not in ("score", "skip", "stop"):
            raise ValueError(f"reward: got on_failure={self.on_failure!r}, want 'score', 'skip' or 'stop'")

    def failed(self, error: str) -> Reward:
        """The reward of an item that has none of its own. Raises RewardFailed where the policy is to stop."""
        if self.on_failure == "stop":
            raise RewardFailed(f"reward: {error}: want a score, or on_failure='score' or 'skip'")
        return Reward(self.failure_score if self.on_failure == "score" else None, {}, error)


SCORE_ZERO = FailurePolicy()
"""A failure scores 0."""


class Rewarder(Protocol):
    """What gives rewards: a pool of processes here, or a service elsewhere."""

    def score(self, items: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None) -> list[Reward]:
        """The rewards of the items' fields, in order, each within its own time, or `timeout_s` where that is less.

        Blocks until all are there; raises RewardFailed by the policy.
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
        resolve_target(target)
        if num_processes < 1 or timeout_s <= 0:
            raise ValueError(
                f"reward pool: got {num_processes} processes and {timeout_s} s, want at least 1 and more than 0"
            )
        self._timeout_s = timeout_s
        self._policy = policy
        self._mutex = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._template = subprocess.Popen(
            [*MODULE, "tasks", target, str(num_processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        threading.Thread(target=self._read, name="reward pool", daemon=True).start()

    def score(self, items: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None) -> list[Reward]:
        """The rewards of the items' fields, in order, each within the pool's seconds or `timeout_s`, whichever is less.

        Blocks until all are there. Raises RewardFailed where the policy is "stop" and an item failed;
        SessionClosedError on a closed pool.
        """
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        futures = [self._submit(encode((dict(fields),)).to_bytes(), limit_s) for fields in items]
        return [self._reward(future.result()) for future in futures]

    def counts(self) -> dict[str, float]:
        """Since the start, for the metrics: reward/scored, reward/errors, reward/timeouts, reward/deaths."""
        with self._mutex:
            return {f"reward/{name}": float(self._counts[name]) for name in ("scored", "errors", "timeouts", "deaths")}

    def close(self) -> None:
        """Ends the processes. Blocks until they have ended."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
        assert self._template.stdin is not None
        self._template.stdin.close()
        self._template.wait()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, arguments: bytes, timeout_s: float) -> "Future[Answer]":
        future: Future[Answer] = Future()
        assert self._template.stdin is not None
        with self._mutex:
            if self._closed:
                raise SessionClosedError("reward pool: it is closed: make another")
            number = self._counts["submitted"] = self._counts["submitted"] + 1
            self._waiting[number] = future
            write_task(self._template.stdin, Task(number, timeout_s, arguments))
        return future

    def _read(self) -> None:
        assert self._template.stdout is not None
        with self._template.stdout as answers:
            while (answer := read_answer(answers)) is not None:
                with self._mutex:
                    future = self._waiting.pop(answer.number)
                    self._counts[answer.kind] += 1
                future.set_result(answer)
        with self._mutex:
            left = list(self._waiting.values())
            self._waiting.clear()
        for future in left:
            future.set_exception(SessionClosedError("reward pool: its processes ended while items were under way"))

    def _reward(self, answer: Answer) -> Reward:
        if answer.kind == "scored":
            return _parsed(decode(answer.value))
        return self._policy.failed(answer.value.decode(errors="replace"))


def _parsed(value: Any) -> Reward:
    if isinstance(value, dict):
        parts = {name: float(part) for name, part in value.items() if name != "reward"}
        return Reward(float(value["reward"]), parts)
    return Reward(float(value), {})
