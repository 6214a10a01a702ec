"""The way from a driver to the agents of its nodes: what a launcher is given, and what it gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from m2flow.proto.worker.v1 import worker_pb2 as pb


class Link(Protocol):
    """The way to one node's agent."""

    def send(self, request: pb.SessionRequest) -> None:
        """Says something. Does not block."""

    @property
    def lost(self) -> bool:
        """Whether the agent has gone, unasked."""

    @property
    def host(self) -> str:
        """Where the agent is reached, of "HOST:PORT"; empty on this machine."""

    def close(self) -> None:
        """Ends the session and all its ranks. Blocks until they have ended."""


@dataclass(frozen=True)
class Wiring:
    """What a link is made of: the run's private directory, its token, what its ranks preload, and who listens."""

    directory: Path
    token: str
    preload: Sequence[str]
    on_response: Callable[[pb.SessionResponse], None]
    on_lost: Callable[[str], None]
