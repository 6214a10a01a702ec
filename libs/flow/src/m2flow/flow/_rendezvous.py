"""Where the ranks of a group that moves in step meet before each chunk: rank 0 keeps the list."""

import threading
from collections.abc import Hashable
from concurrent.futures import Future

from m2flow.comm import Endpoint, Request

_SERVICE = "flow.step"


class Rendezvous:
    """One rank's way to meet the others. Meetings have a name; each rank comes once."""

    def __init__(self, endpoint: Endpoint, group: str, rank: int, world_size: int) -> None:
        self._endpoint = endpoint
        self._leader = f"{group}.0"
        self._rank = rank
        self._world_size = world_size
        self._mutex = threading.Lock()
        self._waiting: dict[Hashable, list[Future[None]]] = {}
        if rank == 0:
            endpoint.handle(_SERVICE, self._on_request)

    def meet(self, name: tuple[str, int, int]) -> None:
        """Returns when every rank has come to the meeting. Blocks; raises PeerLostError when rank 0 has died."""
        if self._rank == 0:
            self._arrive(name).result()
        else:
            self._endpoint.request(self._leader, _SERVICE, "meet", list(name))

    def _on_request(self, request: Request) -> "Future[None]":
        return self._arrive(tuple(request.args))

    def _arrive(self, name: Hashable) -> "Future[None]":
        mine: Future[None] = Future()
        with self._mutex:
            there = self._waiting.setdefault(name, [])
            there.append(mine)
            complete = len(there) == self._world_size
            if complete:
                del self._waiting[name]
        if complete:
            for future in there:
                future.set_result(None)
        return mine
