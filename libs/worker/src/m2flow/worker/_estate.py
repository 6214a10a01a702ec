"""What passes from the ranks of a group to those that follow them: names first, then state, by name and global offsets.

The old ranks keep their processes, under other names, until the new ones have what they want; see `Session.replace`.
"""

from collections.abc import Sequence
from typing import Any

from m2flow.comm import Box, Endpoint, Shard
from m2flow.worker.base import Worker
from m2flow.worker.context import WorkerContext

_NAME, _VERSION = "estate", 1


class Giver:
    """Beside a rank that retires."""

    def __init__(self, worker: Worker, context: WorkerContext, number: int) -> None:
        """`number` tells this re-placing from others."""
        self._worker = worker
        self._context = context
        self._name = f"{context.group}.{context.rank}-{number}"
        self._endpoint: Endpoint | None = None

    def give(self) -> tuple[str, str]:
        """Takes the worker off its devices, offers its state under another name, and frees its own.

        The name is empty where there is nothing to keep. Returns it, and where other machines reach it. Blocks for the
        worker's present call, which must be its last.
        """
        address = ""
        with self._context.turn:
            self._worker.offload()
            if shards := self._worker.shards():
                self._endpoint = self._context.open_endpoint(self._name)
                self._endpoint.offer_weights(_NAME, _VERSION, shards)
                address = self._endpoint.listen(f"{self._context.host}:0") if self._context.host else ""
        self._context.endpoint.close()
        return self._name if shards else "", address

    def leave(self) -> None:
        """Withdraws the state."""
        if self._endpoint is not None:
            self._endpoint.close()


class Taker:
    """Beside a rank that follows."""

    def __init__(self, worker: Worker, context: WorkerContext, sources: Sequence[str]) -> None:
        """`sources` are what the former ranks' `give` returned, in rank order."""
        self._worker = worker
        self._context = context
        self._sources = sources

    def take(self) -> None:
        """Gets the parts that the worker wants, checks them, and gives them to it. Blocks.

        Raises ValueError naming a part that none of the former ranks had.
        """
        with self._context.turn:
            wanted = {name: box_of(value) for name, value in self._worker.shards().items()}
            sources = [name for name in self._sources if name]
            receiver = self._context.endpoint.weight_receiver(
                _NAME, sources=sources, wanted=wanted, first_source=self._context.rank
            )
            receiver.stream(_VERSION, self._worker.load_shards)


def box_of(value: Any) -> Box:
    """The indices of a tensor that are here."""
    if isinstance(value, Shard):
        return Box(value.offset, tuple(value.data.shape))
    return Box((0,) * len(value.shape), tuple(value.shape))
