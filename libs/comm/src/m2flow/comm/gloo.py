"""Messages over a gloo process group: for ranks that torch.distributed has joined already.

This is an adapter: importing it imports torch. Sizes go before bytes, as gloo's receiver must know them; each peer and
direction has a thread's lane of its own, so that messages keep their order and nobody blocks the caller.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from m2flow.comm._executor import LaneExecutor
from m2flow.comm.errors import PeerLostError
from m2flow.comm.payload import Encoded, Tree, decode, encode


class GlooBackend:
    """Sends and receives between the ranks of a process group. `members` are the ranks' names, in order."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[str]) -> None:
        if len(members) != group.size():
            raise ValueError(f"got {len(members)} names, want {group.size()}, one a rank")
        self.name = members[group.rank()]
        self._group = group
        self._ranks = {name: rank for rank, name in enumerate(members)}
        # One thread a peer and direction: gloo's operations block the thread that waits for them.
        self._executor = LaneExecutor(2 * len(members), f"{self.name} gloo")

    def isend(self, peer: str, tree: Tree, *, tag: str = "") -> "Future[None]":
        """Sends a tree; the future is done when gloo has handed it over. Raises PayloadError at once."""
        encoded = encode(tree)
        return self._run(peer, ("send", peer), partial(self._send, self._rank(peer), encoded, _number(tag)))

    def irecv(self, peer: str, *, tag: str = "") -> "Future[Tree]":
        """Returns the future of a peer's next tree with a tag; the receives of one peer run in the order asked for."""
        return self._run(peer, ("recv", peer), partial(self._recv, self._rank(peer), _number(tag)))

    def close(self) -> None:
        """Ends the threads once they are idle; the process group is its owner's."""
        self._executor.close()

    def _rank(self, peer: str) -> int:
        if peer not in self._ranks:
            raise ValueError(f"got peer {peer!r}, want one of {', '.join(self._ranks)}")
        return self._ranks[peer]

    def _send(self, rank: int, encoded: Encoded, number: int) -> None:
        data = np.empty(encoded.size_bytes, np.uint8)
        encoded.write_into(data)
        self._group.send([torch.tensor([data.size])], rank, number).wait()
        self._group.send([torch.from_numpy(data)], rank, number).wait()

    def _recv(self, rank: int, number: int) -> Tree:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], rank, number).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._group.recv([data], rank, number).wait()
        return decode(data.numpy())

    def _run(self, peer: str, lane: tuple[str, str], work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except RuntimeError as error:
                future.set_exception(PeerLostError(peer, f"gloo gave up: {error}"))
            except Exception as error:
                future.set_exception(error)

        self._executor.submit(lane, job)
        return future


def _number(tag: str) -> int:
    """Returns gloo's number of a tag, the same in every process."""
    return int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=3).digest(), "little")
