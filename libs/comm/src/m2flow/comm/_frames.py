"""Frames: what two endpoints exchange, a header and a body, the same on every link.

    length of the body, 4 bytes | kind, 1 byte | 3 bytes zero | id, 8 bytes | body

An answer carries the id of its request; frames that want no answer carry 0.
"""

import enum
import struct

from m2flow.comm.errors import CommError

HEADER = struct.Struct("<IB3xQ")
# Larger payloads lie in shared memory, or are cut into chunks, so a longer frame is a lie.
MAX_BODY_BYTES = (1 << 32) - 1
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


_KINDS = {int(kind): kind for kind in Kind}


class FrameParser:
    """Cuts frames out of bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview, limit: int) -> tuple[Kind, int, bytes] | None:
        """Adds bytes; returns the first whole frame as kind, id and body, or None. Call with b"" for the next."""
        self._bytes += data
        if len(self._bytes) < HEADER.size:
            return None
        length, kind, request_id = parse_header(self._bytes, 0, limit)
        end = HEADER.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(memoryview(self._bytes)[HEADER.size : end])
        del self._bytes[:end]
        return kind, request_id, body


class ProtocolError(CommError):
    """The other end sent what no endpoint of this version sends; the connection is closed."""


def frame(kind: Kind, request_id: int, body: bytes) -> bytes:
    """Returns one frame as bytes; raises ProtocolError for a body that no frame can hold."""
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"got a message of {len(body)} bytes, want at most {MAX_BODY_BYTES}: send it in parts")
    return HEADER.pack(len(body), kind, request_id) + body


def parse_header(data: memoryview | bytes | bytearray, at: int, limit: int) -> tuple[int, Kind, int]:
    """Returns length, kind and id of the header at `at`; raises ProtocolError for an unknown kind or a longer body."""
    length, kind, request_id = HEADER.unpack_from(data, at)
    if length > limit:
        raise ProtocolError(f"got a frame of {length} bytes, want at most {limit}")
    found = _KINDS.get(kind)
    if found is None:
        raise ProtocolError(f"got a frame of kind {kind}, want 1 to {max(Kind)}")
    return length, found, request_id
