"""Messages over a stream socket: four bytes of length, then the message."""

import socket
import struct
from typing import TypeVar

from google.protobuf.message import Message

LENGTH = struct.Struct("<I")
"""What stands before a message: its size in bytes."""

AnyMessage = TypeVar("AnyMessage", bound=Message)


def send_frame(sock: socket.socket, message: Message) -> None:
    """Sends one message. Blocks while the socket's buffer is full; raises OSError when the other end has gone."""
    body = message.SerializeToString()
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive_frame(sock: socket.socket, kind: type[AnyMessage]) -> AnyMessage | None:
    """The next message, or None when the other end has gone. Blocks."""
    head = _receive(sock, LENGTH.size)
    if head is None:
        return None
    body = _receive(sock, LENGTH.unpack(head)[0])
    return None if body is None else kind.FromString(body)


def _receive(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = sock.recv(size - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
