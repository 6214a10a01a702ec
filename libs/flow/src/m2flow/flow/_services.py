"""What the driver serves to the workers of a session: the device lock and the board of quotas, once a session."""

import threading
from weakref import WeakKeyDictionary

from m2flow.comm import Endpoint
from m2flow.flow._quota import QuotaBoard
from m2flow.worker import LockServer

_mutex = threading.Lock()
_boards: "WeakKeyDictionary[Endpoint, QuotaBoard]" = WeakKeyDictionary()


def serve(endpoint: Endpoint) -> QuotaBoard:
    """Serves lock and quotas at a driver's endpoint; a session that had a runtime before serves them already."""
    with _mutex:
        board = _boards.get(endpoint)
        if board is None:
            LockServer(endpoint)
            board = _boards[endpoint] = QuotaBoard(endpoint)
        return board
