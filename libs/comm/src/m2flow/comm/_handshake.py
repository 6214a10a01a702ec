"""The first words of a connection: version and token, before anything else is believed.

An end that hears another version, a wrong token or anything but a hello answers with the reason, logs it and closes.
"""

import logging
import os
from dataclasses import dataclass, field

from m2flow.comm._connection import Connection
from m2flow.comm._frames import MAX_BODY_BYTES, MAX_HELLO_BYTES, Kind, ProtocolError
from m2flow.comm.errors import CommError
from m2flow.comm.token import check_token, same_token
from m2flow.proto.comm.v1 import comm_pb2

_log = logging.getLogger("m2flow.comm")

# Of the frames and messages, not of the package: raised when an older end could not follow.
VERSION = "3"


@dataclass(frozen=True)
class Identity:
    """What an endpoint says of itself. Raises ValueError for a token that will not do."""

    name: str
    token: str = field(repr=False)
    incarnation: int = field(default_factory=lambda: int.from_bytes(os.urandom(8), "little"))

    def __post_init__(self) -> None:
        check_token(self.token)

    def hello(self) -> bytes:
        """Returns the body of the frame that introduces this endpoint."""
        message = comm_pb2.Hello(version=VERSION, peer=self.name, token=self.token, incarnation=self.incarnation)
        return message.SerializeToString()

    def greet(self, connection: Connection, body: bytes) -> None:
        """Believes the other end's hello, or raises ProtocolError after telling it why not."""
        message = comm_pb2.Hello.FromString(body)
        expected = connection.peer
        if message.version != VERSION:
            reason = f"it speaks version {message.version!r} and this end {VERSION!r}: run one version of m2flow"
        elif not same_token(message.token, self.token):
            reason = "its token is not this run's"
        elif not message.peer or (expected and message.peer != expected):
            reason = f"it calls itself {message.peer!r}, want {expected!r}"
        else:
            connection.peer = message.peer
            connection.incarnation = message.incarnation
            connection.greeted = True
            # Of a payload and the names in its message.
            connection.link.body_limit = min(MAX_BODY_BYTES, connection.max_payload_bytes + MAX_HELLO_BYTES)
            return
        self.refuse(connection, reason)

    def refuse(self, connection: Connection, reason: str) -> None:
        """Tells the other end why it is refused, logs it, and raises ProtocolError."""
        _log.warning("endpoint %s refused a connection of %r: %s", self.name, connection.peer or "unknown", reason)
        refusal = comm_pb2.Refusal(reason=reason, version=VERSION)
        connection.send(Kind.REFUSAL, 0, refusal.SerializeToString())
        raise ProtocolError(f"refused: {reason}")


def refused(connection: Connection, body: bytes) -> CommError:
    """Returns the error that a REFUSAL frame stands for."""
    message = comm_pb2.Refusal.FromString(body)
    return CommError(f"{connection.peer!r} (version {message.version}) refuses this end: {message.reason}")
