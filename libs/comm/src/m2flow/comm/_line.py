"""Those on one event loop who wait until there is room on the way to a peer, in the order they came."""

import sys
from collections import deque
from typing import TYPE_CHECKING

from m2flow.comm._connection import Connection
from m2flow.comm._deadline import Deadline

if TYPE_CHECKING:
    import asyncio

# How often the first of them looks; the others only wait for it.
_LOOK_S = 0.005


class Line:
    """A line; whoever has left it asks before anything else runs on the loop, so that nobody comes between."""

    def __init__(self) -> None:
        self._turns: deque[asyncio.Future[None]] = deque()

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
                self._turns[0].set_result(None)
