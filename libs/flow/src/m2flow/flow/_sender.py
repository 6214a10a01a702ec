"""Sends a generator's items while it goes on: a stage that yields is not kept waiting for each item's answer.

Items that gather while a message is under way go with the next one, and items that come together go together: a
consumer that takes what has arrived would else begin with the first of them alone. What a stage gives as a list is one
message, which the stage's own thread puts when the stage has returned: nothing is to be done meanwhile.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future

from m2flow.worker import Item

# Items that come within so many seconds after one go in its message.
_TOGETHER_S = 0.001


class Sender:
    """Takes the items of one call of a stage, in order."""

    def __init__(self, executor: Executor, put: Callable[[list[Item], float | None], None]) -> None:
        """`put` sends a message and may block, for so many seconds at most; then it may be called again for it.

        A generator's messages go out on `executor`, one at a time.
        """
        self._executor = executor
        self._put = put
        self._mutex = threading.Lock()
        self._waiting: list[Item] = []
        self._busy = False
        self._under_way: Future[None] | None = None
        self._all_here = threading.Event()
        self._whole: list[Item] = []

    def keep(self, items: list[Item]) -> None:
        """Takes items that `finish` is to put, all together."""
        self._whole = items

    def send(self, items: Iterable[Item]) -> list[Item]:
        """Takes items as they come and returns them all, some of them still on their way. Raises what `put` raised."""
        taken = []
        for item in items:
            taken.append(item)
            with self._mutex:
                self._waiting.append(item)
                busy, self._busy = self._busy, True
            if not busy:
                self._under_way = self._executor.submit(self._send_waiting)
            elif self._under_way is not None and self._under_way.done():
                self._under_way.result()
        self._all_here.set()
        return taken

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits until everything has been put. Blocks; raises what `put` raised, TimeoutError after `timeout_s`."""
        if self._under_way is not None:
            self._under_way.result(timeout_s)
        if self._whole:
            self._put(self._whole, timeout_s)
            self._whole = []

    def _send_waiting(self) -> None:
        self._all_here.wait(_TOGETHER_S)
        while True:
            with self._mutex:
                batch, self._waiting = self._waiting, []
                if not batch:
                    self._busy = False
                    return
            self._put(batch, None)
