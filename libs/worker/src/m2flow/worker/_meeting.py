"""Where the ranks of a group tell each other what they must know before they reach each other.

The driver serves it: every rank, on whatever machine, reaches the driver from its first moment.
"""

import threading
from concurrent.futures import Future
from typing import Any

from m2flow.comm import Endpoint, Request

SERVICE = "meeting"
_DRIVER = "driver"


class MeetingServer:
    """Hands what is said to a name to the one who hears it, whichever of the two comes first. Thread-safe."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._mutex = threading.Lock()
        self._places: dict[str, Future[Any]] = {}
        endpoint.handle(SERVICE, self._handle)

    def _handle(self, request: Request) -> Any:
        name, said = request.args
        with self._mutex:
            place = self._places.pop(name, None)
            if place is None:
                place = self._places[name] = Future()
        if request.method == "say":
            place.set_result(said)
            return None
        return place


def say(endpoint: Endpoint, name: str, value: Any) -> None:
    """Leaves a value for the one who hears that name. Blocks for the driver's answer."""
    endpoint.request(_DRIVER, SERVICE, "say", (name, value))


def hear(endpoint: Endpoint, name: str, *, timeout_s: float) -> Any:
    """What was said to a name. Blocks until it is; raises TimeoutError where that takes longer."""
    return endpoint.request(_DRIVER, SERVICE, "hear", (name, None), timeout_s=timeout_s)
