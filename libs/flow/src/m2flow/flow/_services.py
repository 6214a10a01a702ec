"""What the driver serves to the workers of a session: the device lock and the board of quotas, once a session."""

import threading
from weakref import WeakKeyDictionary

from m2flow.comm import Endpoint
from m2flow.flow._quota import QuotaBoard
from m2flow.worker import LockServer, Session

_mutex = threading.Lock()
_boards: "WeakKeyDictionary[Endpoint, QuotaBoard]" = WeakKeyDictionary()


def serve(session: Session) -> QuotaBoard:
    """Serves lock and quotas at the driver's endpoint; a session that had a runtime before serves them already.

    The lock is a witness of the session's watchdog: after a silence it says who waits for whose devices.
    """
    with _mutex:
        board = _boards.get(session.endpoint)
        if board is None:
            session.watchdog.add_witness(LockServer(session.endpoint).waits)
            board = _boards[session.endpoint] = QuotaBoard(session.endpoint)
        return board
