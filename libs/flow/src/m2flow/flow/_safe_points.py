"""New weights in the middle of a call, where a plan lets samples be stale: interruptible rollouts.

Whoever brings weights leaves what loads them; the stage runs it on its own thread, between two of its steps, where it
calls `context.safe_point`, and goes on with what it has in hand; at the latest when the call ends. Which tokens were
made with which version is for the engine to write down.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager


class SafePoints:
    """Shared by the stage loops and receptions of one rank."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._open = 0
        self._offers: list[tuple[Callable[[], None], Future[None]]] = []

    @contextmanager
    def during(self) -> Iterator[None]:
        """A call that may come to safe points; its end is the last."""
        with self._mutex:
            self._open += 1
        try:
            yield
        finally:
            with self._mutex:
                self._open -= 1
            self.reach()

    def offer(self, load: Callable[[], None]) -> bool:
        """Has `load` run at the next safe point. Blocks until it has; False, at once, where no call comes to one.

        Raises what `load` raises.
        """
        done: Future[None] = Future()
        with self._mutex:
            if not self._open:
                return False
            self._offers.append((load, done))
        done.result()
        return True

    def reach(self) -> None:
        """A safe point: runs what was offered."""
        with self._mutex:
            offers, self._offers = self._offers, []
        for load, done in offers:
            try:
                load()
            except BaseException as failure:
                done.set_exception(failure)
            else:
                done.set_result(None)
