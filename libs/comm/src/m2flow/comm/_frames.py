"""Frames: what two endpoints exchange, a header and a body, the same on every link.

    length of the body, 4 bytes | kind, 1 byte | 3 bytes zero | id, 8 bytes | body

An answer carries the id of its request; frames that want no answer carry 0.
"""

import enum
import struct
from collections.abc import Iterator
from typing import Protocol

from m2flow.comm.errors import CommError

HEADER = struct.Struct("<IB3xQ")
MAX_BODY_BYTES = (1 << 32) - 1
# Protocol buffers write and read no longer ones.
MAX_MESSAGE_BYTES = (1 << 31) - 1
MAX_HELLO_BYTES = 64 << 10


class Kind(enum.IntEnum):
    """What a frame's body is: a message of m2flow.proto.comm.v1, named here."""

    HELLO = 1  # Hello
    REFUSAL = 2  # Refusal
    GOODBYE = 3  # nothing: the endpoint closes in good order
    SEGMENT = 4  # Segment, with one descriptor
    RETIRE = 5  # Segment: it will not be used again
    RELEASE = 6  # Release
    CALL = 7  # CallRequest
    CHANNEL = 8  # ChannelRequest
    CANCEL = 9  # nothing: the request of this id is withdrawn, and answered as it stands
    REPLY = 10  # CallResponse or ChannelResponse
    DATA = 11  # the bytes of a payload, which a later message names by this id


_KINDS = {int(kind): kind for kind in Kind}


class Limits(Protocol):
    """How long a body may be: more once the other end is believed, perhaps from one frame to the next."""

    body_limit: int


class FrameParser:
    """Cuts frames out of bytes that arrive in pieces of any size; a body grows as it arrives, and is copied no more."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._body = bytearray()
        # Of the frame whose body is arriving: its length, kind and id.
        self._begun: tuple[int, Kind, int] | None = None

    def frames(self, data: memoryview, limits: Limits) -> Iterator[tuple[Kind, int, bytearray]]:
        """Yields kind, id and body of each frame that these bytes complete; raises ProtocolError as `parse_header`."""
        while True:
            if self._begun is None:
                wanted = HEADER.size - len(self._header)
                self._header += data[:wanted]
                data = data[wanted:]
                if len(self._header) < HEADER.size:
                    return
                self._begun = parse_header(self._header, 0, limits.body_limit)
                self._header.clear()
            length, kind, request_id = self._begun
            wanted = length - len(self._body)
            self._body += data[:wanted]
            data = data[wanted:]
            if len(self._body) < length:
                return
            body, self._body, self._begun = self._body, bytearray(), None
            yield kind, request_id, body


class ProtocolError(CommError):
    """The other end sent what no endpoint of this version sends; the connection is closed."""


def header(kind: Kind, request_id: int, size: int) -> bytes:
    """Returns the header of a frame whose body has `size` bytes; raises ProtocolError where no frame can hold them."""
    if size > MAX_BODY_BYTES:
        raise ProtocolError(f"got a message of {size} bytes, want at most {MAX_BODY_BYTES}: send it in parts")
    return HEADER.pack(size, kind, request_id)


def parse_header(data: memoryview | bytes | bytearray, at: int, limit: int) -> tuple[int, Kind, int]:
    """Returns length, kind and id of the header at `at`; raises ProtocolError for an unknown kind or a longer body."""
    length, kind, request_id = HEADER.unpack_from(data, at)
    if length > limit:
        raise ProtocolError(f"got a frame of {length} bytes, want at most {limit}")
    found = _KINDS.get(kind)
    if found is None:
        raise ProtocolError(f"got a frame of kind {kind}, want 1 to {max(Kind)}")
    return length, found, request_id
