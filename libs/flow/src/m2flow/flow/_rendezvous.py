"""Where the ranks of a group that moves in step meet before each chunk: rank 0 keeps the list."""

import threading
from collections.abc import Hashable
from concurrent.futures import Future

from m2flow.comm import Endpoint, Request

_SERVICE = "flow.step"


class Rendezvous:
    """One rank's way to meet the others. Meetings have a name; each rank comes once, with work or without."""

    def __init__(self, endpoint: Endpoint, group: str, rank: int, world_size: int) -> None:
        self._endpoint = endpoint
        self._leader = f"{group}.0"
        self._world_size = world_size
        self._mutex = threading.Lock()
        self._there: dict[Hashable, list[tuple[bool, Future[bool]]]] = {}
        if rank == 0:
            endpoint.handle(_SERVICE, self._on_request)

    def arrive(self, name: tuple[str, int, int], has_work: bool) -> "Future[bool]":
        """Comes to a meeting; once every rank has, the answer is whether any of them has work. Does not block."""
        return self._endpoint.request_async(self._leader, _SERVICE, "arrive", [*name, has_work])

    def _on_request(self, request: Request) -> "Future[bool]":
        *name, has_work = request.args
        mine: Future[bool] = Future()
        with self._mutex:
            there = self._there.setdefault(tuple(name), [])
            there.append((has_work, mine))
            complete = len(there) == self._world_size
            if complete:
                del self._there[tuple(name)]
        if complete:
            for _, future in there:
                future.set_result(any(work for work, _ in there))
        return mine
