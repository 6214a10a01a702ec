"""A function of the user's in processes that can be ended when it hangs.

A pool forks its processes from a template that has imported the function and done nothing else, so that one that ran
out of time is replaced within milliseconds.
"""

import subprocess
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from m2flow.comm import decode, encode
from m2flow.worker._cause import cause_of
from m2flow.worker._python import MODULE, child_environment
from m2flow.worker._tasks import Answer, Task, read_answer, write_task
from m2flow.worker.errors import SessionClosedError
from m2flow.worker.target import resolve_target


@dataclass(frozen=True)
class Outcome:
    """What came of a call: its `value`, or why there is none.

    `kind` is "done", "errors" (the function raised), "timeouts" or "deaths" (its process ended).
    """

    kind: str
    value: Any = None
    error: str = ""


def check_limit(name: str, timeout_s: float | None) -> None:
    """Refuses, by ValueError, seconds within which nothing can be done, and NaN, which never pass."""
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"{name}: got timeout_s={timeout_s}, want more than 0 s: give some")


class TaskPool:
    """A function in `num_processes` processes; `target` names it as "module:qualname".

    Each call has `timeout_s` seconds from the moment that a process takes it up. Arguments and values are payload
    trees. Close it, or use it in a `with`.
    """

    def __init__(self, target: str, *, num_processes: int = 1, timeout_s: float = 10.0) -> None:
        resolve_target(target)
        if num_processes < 1:
            raise ValueError(f"pool of {target}: got {num_processes} processes, want at least 1")
        check_limit(f"pool of {target}", timeout_s)
        self._target = target
        self._timeout_s = timeout_s
        # Apart from the other: who writes waits for the processes, which wait for who reads.
        self._writing = threading.Lock()
        self._mutex = threading.Lock()
        self._waiting: dict[int, Future[Outcome]] = {}
        self._num_submitted = 0
        self._closed = False
        self._template = subprocess.Popen(
            [*MODULE, "tasks", target, str(num_processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            # Ctrl-C, and the signal that ends a worker's group, would leave what the function has started.
            process_group=0,
        )
        threading.Thread(target=self._read, name=f"pool of {target}", daemon=True).start()

    def submit(self, *arguments: Any, timeout_s: float | None = None) -> "Future[Outcome]":
        """Calls the function within the pool's seconds, or `timeout_s` where that is less. Does not wait for it.

        The future cannot be cancelled. Raises ValueError on a `timeout_s` of 0 or less, or that is no number;
        SessionClosedError on a closed pool, or one whose processes have ended; the future does so where they end before
        the call.
        """
        check_limit(f"pool of {self._target}", timeout_s)
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        payload = encode(arguments).to_bytes()
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()
        assert self._template.stdin is not None
        with self._writing:
            with self._mutex:
                if self._closed:
                    raise SessionClosedError(
                        f"pool of {self._target}: it is closed, or its processes have ended: make another"
                    )
                self._num_submitted += 1
                self._waiting[self._num_submitted] = future
            with suppress(BrokenPipeError):  # The template has died: the future hears of it.
                write_task(self._template.stdin, Task(self._num_submitted, limit_s, payload))
        return future

    def close(self) -> None:
        """Ends the processes. Blocks until they have ended."""
        assert self._template.stdin is not None
        with self._writing:
            with self._mutex:
                self._closed = True
            with suppress(BrokenPipeError):
                self._template.stdin.close()
        self._template.wait()

    def __enter__(self) -> "TaskPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._template.stdout is not None
        with self._template.stdout as answers:
            while (answer := read_answer(answers)) is not None:
                outcome = _outcome(answer)
                with self._mutex:
                    future = self._waiting.pop(answer.number)
                future.set_result(outcome)
        with self._mutex:
            self._closed = True
            left = list(self._waiting.values())
            self._waiting.clear()
        for future in left:
            future.set_exception(
                SessionClosedError(f"pool of {self._target}: its processes ended while calls were under way")
            )


def _outcome(answer: Answer) -> Outcome:
    if answer.kind == "done":
        try:
            return Outcome("done", decode(answer.value))
        except Exception as failure:  # Such as a class that only the function's module has registered.
            return Outcome("errors", error=cause_of(failure))
    return Outcome(answer.kind, error=answer.value.decode(errors="replace"))
