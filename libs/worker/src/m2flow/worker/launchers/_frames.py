"""Messages over a stream socket: four bytes of length, then the message.

They are sent without SIGPIPE, which would end a process that has it at its default when the other end has gone.
"""

import socket
import struct

from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16


def framed(body: bytes) -> bytes:
    """A serialised message as it goes over the wire."""
    return _LENGTH.pack(len(body)) + body


def send_frame(sock: socket.socket, message: Message) -> None:
    """Sends one message. Blocks while the socket's buffer is full; raises OSError when the other end has gone."""
    sock.sendall(framed(message.SerializeToString()), socket.MSG_NOSIGNAL)


class FrameReader:
    """Cuts what comes from a socket into messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = bytearray()

    def read(self) -> list[bytes] | None:
        """The messages that one more read completes, often none; None when the other end has gone.

        Blocks where the socket does.
        """
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._rest += data
        found, start = [], 0
        while len(self._rest) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            end = body + _LENGTH.unpack_from(self._rest, start)[0]
            if end > len(self._rest):
                break
            found.append(bytes(memoryview(self._rest)[body:end]))
            start = end
        del self._rest[:start]
        return found
