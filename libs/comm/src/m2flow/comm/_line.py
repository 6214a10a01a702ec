"""Those on one event loop who wait until there is room on the way to a peer, in the order they came.

What would keep the loop runs on a thread of its own, not on the loop's: those are the program's, which may need one to
make room.
"""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from m2flow.comm._connection import Connection
from m2flow.comm._deadline import Deadline

if TYPE_CHECKING:
    import asyncio

# How many of a line may copy, or wait for shared memory, beside each other.
_MAX_THREADS = 4
# How often the first of them looks; the others only wait for it.
_LOOK_S = 0.005


class Line:
    """A line; whoever has left it asks before anything else runs on the loop, so that nobody comes between."""

    def __init__(self) -> None:
        # Futures lead to their loop, which is not to be kept: none stays here that nobody awaits.
        self._turns: deque[asyncio.Future[None]] = deque()
        self._for_threads: deque[asyncio.Future[None]] = deque()
        self._num_threads = 0

    async def room(self, connection: Connection, deadline: Deadline) -> bool:
        """Waits for one's turn and for room; says whether both came in time. Cancelled, it lets the next one look."""
        if not self._turns and connection.has_room():
            return True
        # Whoever awaits has imported it.
        asyncio = sys.modules["asyncio"]
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            if self._turns[0] is not turn:
                await asyncio.wait([turn], timeout=deadline.left_s)
            while self._turns[0] is turn and not connection.has_room():
                left_s = deadline.left_s
                if left_s == 0:
                    return False
                await asyncio.sleep(_LOOK_S if left_s is None else min(left_s, _LOOK_S))
            return self._turns[0] is turn
        finally:
            was_first = self._turns[0] is turn
            self._turns.remove(turn)
            if was_first and self._turns and not self._turns[0].done():
                _end(self._turns[0])

    async def on_a_thread(self, call: Callable[[], None], deadline: Deadline) -> bool:
        """Runs a call on a thread that keeps no process from ending; says whether it could begin in time.

        Raises what the call raises. Cancelled, it does not wait for a call that has begun.
        """
        asyncio = sys.modules["asyncio"]
        if self._num_threads < _MAX_THREADS:
            self._num_threads += 1
        elif not await self._handed_over(deadline):
            return False
        try:
            done: Future[None] = Future()
            # It ends by itself, cancelled or not.
            done.set_running_or_notify_cancel()
            threading.Thread(target=_run, args=(call, done), name="m2flow-comm copies", daemon=True).start()
            await asyncio.wrap_future(done)
        finally:
            self._hand_over()
        return True

    async def _handed_over(self, deadline: Deadline) -> bool:
        """Waits for another's thread; says whether there was one in time."""
        asyncio = sys.modules["asyncio"]
        turn = asyncio.get_running_loop().create_future()
        self._for_threads.append(turn)
        try:
            await asyncio.wait([turn], timeout=deadline.left_s)
        except BaseException:
            if turn.done():
                self._hand_over()
            raise
        finally:
            if not turn.done():
                self._for_threads.remove(turn)
        return bool(turn.done())

    def _hand_over(self) -> None:
        if self._for_threads:
            _end(self._for_threads.popleft())
        else:
            self._num_threads -= 1


def _end(turn: "asyncio.Future[None]") -> None:
    """Tells whoever waits that it is its turn; on a loop that is closed nobody, as all its puts are thrown away."""
    with contextlib.suppress(RuntimeError):
        turn.set_result(None)


def _run(call: Callable[[], None], done: "Future[None]") -> None:
    try:
        call()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    finally:
        # The error leads to this frame, which leads to it no more.
        del call, done
