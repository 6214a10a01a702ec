"""The handle of a call on a group: results per rank, seconds per rank, and waiting that names who is late."""

import asyncio
import statistics
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from m2flow.comm import decode
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker.errors import CallCancelled, CallTimeout

Reduce = Literal["mean", "max", "min", "sum"]

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "sum": sum,
}


class CallHandle:
    """A call under way. It holds no thread; every wait can be interrupted."""

    def __init__(self, name: str, ranks: tuple[int, ...], cancel: Callable[[], None]) -> None:
        self.name = name
        self.ranks = ranks
        self._cancel = cancel
        self._results: dict[int, pb.CallResult] = {}
        self._values: list[Any] | None = None
        self._future: Future[None] = Future()
        self._mutex = threading.Lock()
        self._ended = False

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until every rank has answered.

        Raises CallTimeout, naming the ranks that are missing, when that takes longer; WorkerFailed with the run's first
        cause when a rank failed; CallCancelled when the call was given up.
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError as late:
            if self._future.done():
                raise
            missing = [rank for rank in self.ranks if rank not in self._results]
            raise CallTimeout(f"{self.name}: waited {timeout_s} s for ranks {missing} of {len(self.ranks)}") from late

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """The values in rank order. Blocks and raises as `wait` does."""
        self.wait(timeout_s)
        if self._values is None:
            # Here, not where answers are heard: that thread serves everybody.
            self._values = [decode(self._results[rank].value) for rank in self.ranks]
        return self._values

    def done(self) -> bool:
        """Whether it has ended, well or badly. Does not block."""
        return self._future.done()

    def seconds(self, reduce: Reduce = "max") -> float:
        """The seconds that the ranks spent in the method, reduced over ranks. Blocks and raises as `wait` does."""
        self.wait()
        return _REDUCTIONS[reduce]([self._results[rank].seconds for rank in self.ranks])

    def timers(self, reduce: Reduce = "max") -> dict[str, float]:
        """Each timer of `WorkerContext.timer` in seconds, reduced over the ranks that had it. Blocks as `wait` does."""
        self.wait()
        by_rank = [self._results[rank].timers for rank in self.ranks]
        names = dict.fromkeys(name for timers in by_rank for name in timers)
        return {name: _REDUCTIONS[reduce]([timers[name] for timers in by_rank if name in timers]) for name in names}

    def cancel(self) -> None:
        """Gives the call up: ranks that have not begun will not, and `result` raises CallCancelled. Does not block."""
        if not self._future.done():
            self._cancel()
            self.fail(CallCancelled(f"{self.name}: cancelled"))

    def add_done_callback(self, callback: Callable[["CallHandle"], None]) -> None:
        """Calls back when it has ended, on the thread that ended it, or at once if it has."""
        self._future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, list[Any]]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._future.add_done_callback(partial(_wake_soon, loop, ended))
        yield from ended.__await__()
        return self.result()

    def answer(self, result: pb.CallResult) -> bool:
        """A rank's answer, from the session; whether it was the last."""
        with self._mutex:
            self._results[result.rank] = result
            if self._ended or len(self._results) < len(self.ranks):
                return False
            self._ended = True
        self._future.set_result(None)
        return True

    def fail(self, failure: BaseException) -> None:
        """The end without all answers, from the session; the first end counts."""
        with self._mutex:
            if self._ended:
                return
            self._ended = True
        self._future.set_exception(failure)


def _wake_soon(loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[None]", _: "Future[None]") -> None:
    loop.call_soon_threadsafe(_wake, ended)


def _wake(ended: "asyncio.Future[None]") -> None:
    if not ended.done():
        ended.set_result(None)
