"""A lane of a rank: a queue of jobs, and the one thread that runs them and reports what came of each.

Jobs for many lanes are queued first; then the lanes that sleep are woken in a chain, each by the one before it as soon
as that one runs. Threads that are all woken at once queue for the interpreter's lock and are switched to and fro: for
64 lanes that takes twice the CPU.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import length_hint
from typing import Any, Protocol

from m2flow.comm import encode
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._cause import failure_of
from m2flow.worker.context import WorkerContext


class Reporter(Protocol):
    """Where answers go. Thread-safe."""

    def hold(self, response: pb.SessionResponse) -> None:
        """Takes an answer, which is sent with the next `send`. Does not block."""

    def send(self) -> None:
        """Sends what is held. Blocks while what carries it is full."""


@dataclass(slots=True)
class Job:
    """A call on one rank; `phase` is what the rank is in while it runs."""

    call_id: int
    phase: str
    run: Callable[[], Any]


class Lane:
    """`guard` is held while a job runs; `group` is the key of the rank's group."""

    def __init__(
        self, group: str, context: WorkerContext, guard: AbstractContextManager[Any], reporter: Reporter
    ) -> None:
        self.phase = "idle"
        self._group = group
        self._context = context
        self._guard = guard
        self._reporter = reporter
        self._mutex = threading.Lock()
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._ending = False
        self._sleeps = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._next: Iterator[Lane] = iter(())

    def submit(self, job: Job) -> bool:
        """Queues a job; whether the lane sleeps, and whoever submits has to wake it."""
        with self._mutex:
            self._jobs[job.call_id] = job
            return self._roused()

    def cancel(self, call_id: int) -> None:
        """Drops a job that has not begun."""
        with self._mutex:
            self._jobs.pop(call_id, None)

    def stop(self) -> None:
        """Ends the lane after the jobs that it has."""
        with self._mutex:
            self._ending = True
            sleeps = self._roused()
        if sleeps:
            self._gate.release()

    def run(self) -> None:
        """Runs jobs until `stop`. Blocks."""
        while True:
            with self._mutex:
                job = self._jobs.popitem(last=False)[1] if self._jobs else None
                if job is None and self._ending:
                    return
                self._sleeps = job is None
            if job is None:
                self._gate.acquire()
                wake(self._next)
                self._send()
                continue
            self.phase = job.phase
            self._reporter.hold(self._answer(job))
            self.phase = "idle"
            self._send()

    def wake_before(self, lanes: "Iterator[Lane]") -> None:
        """Wakes this lane, which then wakes the others; for the one that `submit` told to."""
        self._next = lanes
        self._gate.release()

    def _send(self) -> None:
        """Sends, with its own, what the others of its chain have answered: after the last of them has been woken."""
        if not length_hint(self._next):
            self._reporter.send()

    def _roused(self) -> bool:
        slept, self._sleeps = self._sleeps, False
        return slept

    def _answer(self, job: Job) -> pb.SessionResponse:
        context = self._context
        context.take_timers()
        start = time.perf_counter()
        try:
            with self._guard:
                value = job.run()
            seconds = time.perf_counter() - start
            encoded = encode(value).to_bytes()
        except BaseException as failure:
            return failure_of(
                failure, self._group, context.rank, job.phase, attempt=context.attempt, call_id=job.call_id
            )
        response = pb.SessionResponse(id=job.call_id)
        result = response.results.results.add(value=encoded, seconds=seconds, call_id=job.call_id, rank=context.rank)
        if timers := context.take_timers():
            result.timers.update(timers)
        return response


def wake(lanes: Iterator[Lane]) -> None:
    """Wakes lanes that sleep, in a chain. Does not block."""
    if (first := next(lanes, None)) is not None:
        first.wake_before(lanes)
