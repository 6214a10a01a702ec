"""A connection: two endpoints that know each other, with the calls under way between them and the memory lent.

It is the same on every link. A payload larger than a few pages goes beside the message, which only names it. Where the
link passes descriptors it lies in shared memory: a segment is announced once, then its blocks are named. Whoever lends
a block is told when it comes back, or that its reader vanished, which makes the segment unusable for anything new.
Elsewhere its bytes are a frame of their own, before the message.
"""

import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np

from m2flow.comm._blanks import Blanks
from m2flow.comm._deadline import Deadline
from m2flow.comm._frames import Kind, ProtocolError
from m2flow.comm._loop import Loop
from m2flow.comm._mappings import BlockRef, Hold, Lender, Mapped, Released
from m2flow.comm._replies import Awaited, Reply, nothing
from m2flow.comm._segments import Pool, Segment, Slot
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import CommError, PayloadError, system_refuses
from m2flow.comm.payload import MAX_PAYLOAD_BYTES, Encoded, Tree, decode
from m2flow.proto.comm.v1 import comm_pb2

# Up to here a copy through the socket is cheaper than a block and its way back.
INLINE_BYTES = 32 << 10
# Who asks a peer waits above this many bytes that are on their way to it.
HIGH_WATER_BYTES = 8 << 20
# How often it looks whether it still has to: one that is cancelled ends its deadline.
_LOOK_S = 0.1
# A peer for whom too much waits is given up when it has taken nothing from one look to the next, so often in a row.
# Not in one long look: this end's own io thread may have been busy, and brought it nothing.
_STALL_LOOK_S = 1.0
_NUM_STALL_LOOKS = 5

# In place of a segment's id, which is random.
_DATA = 0

OnReturned = Callable[[bool], None]
_sessions = itertools.count(1)


class Link(Protocol):
    """What carries frames: a Unix socket, a gRPC stream, or nothing but the thread that sends.

    To send never waits: what the other end does not take yet is kept here, and counted. `num_taken` grows whenever the
    other end takes some of it.
    """

    passes_fds: bool
    body_limit: int

    @property
    def unsent_bytes(self) -> int: ...
    @property
    def num_taken(self) -> int: ...
    def send(self, kind: Kind, request_id: int, body: bytes | memoryview, fd: int | None = None) -> None: ...
    def wait_sent(self, timeout_s: float | None, at_most_bytes: int) -> bool: ...
    def read_until(self, awaited: Awaited, timeout_s: float | None, ask: Callable[[], None] = nothing) -> None: ...
    def interrupt(self, awaited: Awaited) -> None: ...
    def close(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def abandon(self) -> None: ...


class Connection:
    """One connection of an endpoint; `peer` is empty until the other end has said hello."""

    def __init__(
        self,
        peer: str,
        pool: Pool,
        blanks: Blanks,
        released: Released,
        on_segment_gone: Callable[[int], None],
        loop: Loop,
        *,
        allow_pickle: bool = False,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self.peer = peer
        self.max_payload_bytes = max_payload_bytes
        self._allow_pickle = allow_pickle
        # What others remember it by: keeping the connection itself would keep the memory that it maps.
        self.session = next(_sessions)
        self.incarnation = 0
        self.greeted = False
        # Whether the other end is an endpoint of this very process, and reached within it.
        self.within = False
        self.left = False
        self.link: Link
        self._pool = pool
        self._blanks = blanks
        self.owner = Owner(self, released)
        self._on_segment_gone = on_segment_gone
        self._loop = loop
        # Of a message and the data that goes ahead of it: so far, and of the largest that had to wait.
        self._message_bytes = 0
        self._largest_bytes = 0
        self._looks_for_stall = False
        self._ids = itertools.count(1)
        self._calls: dict[int, Reply] = {}
        self._lost: CommError | None = None
        self._lock = threading.Lock()
        self._announced: set[int] = set()
        self._lent: defaultdict[tuple[int, int], list[OnReturned]] = defaultdict(list)
        self._segments: dict[int, Mapped] = {}
        # What came as frames of data and no message has named yet.
        self._data: dict[int, Bytes] = {}

    # Calls.

    def call(self, kind: Kind, body: bytes) -> tuple[int, Reply]:
        """Returns a request's id and its reply, which fails when the peer is lost.

        The request goes out by the reply's `ask`, or when it is first waited for.
        """
        request_id = next(self._ids)
        reply = Reply(self.link, partial(self.send, kind, request_id, body))
        with self._lock:
            lost = self._lost
            if lost is None:
                self._calls[request_id] = reply
        if lost is not None:
            reply.resolve(b"", lost)
        return request_id, reply

    def answered(self, request_id: int, body: bytes) -> None:
        """Resolves a call."""
        with self._lock:
            reply = self._calls.pop(request_id, None)
        if reply is not None:
            reply.resolve(body)

    def send(self, kind: Kind, request_id: int, body: bytes | memoryview) -> None:
        """Sends a frame; a closed link is not an error here, as its calls fail by themselves."""
        link = self.link
        try:
            link.send(kind, request_id, body)
        except BrokenPipeError:
            return
        if link.unsent_bytes > INLINE_BYTES:
            self._bound_unsent(kind, len(body))

    def _bound_unsent(self, kind: Kind, size_bytes: int) -> None:
        """Ends the link to a peer that takes nothing while more than the quota waits, beside the largest message."""
        self._message_bytes += size_bytes
        if kind is Kind.DATA:
            return
        self._largest_bytes, self._message_bytes = max(self._largest_bytes, self._message_bytes), 0
        if self._is_behind() and not self._looks_for_stall:
            self._looks_for_stall = True
            self._look_later(self.link.num_taken, 0)

    def _is_behind(self) -> bool:
        return self.link.unsent_bytes > self._pool.quota_bytes + self._largest_bytes

    def _look_later(self, num_taken: int, num_looks: int) -> None:
        self._loop.call_later(_STALL_LOOK_S, partial(self._look_for_stall, num_taken, num_looks))

    def _look_for_stall(self, num_taken: int, num_looks: int) -> None:
        self._looks_for_stall = self._is_behind()
        if not self._looks_for_stall:
            return
        now = self.link.num_taken
        num_looks = num_looks + 1 if now == num_taken else 0
        if num_looks < _NUM_STALL_LOOKS:
            self._look_later(now, num_looks)
            return
        unsent, quota = self.link.unsent_bytes, self._pool.quota_bytes
        self.link.fail(
            f"it does not take what it is sent: {unsent} bytes wait for it, want at most the quota of {quota}"
        )

    def has_room(self) -> bool:
        """Says whether who asks with a payload need not wait: at most 8 MiB are on their way to the peer."""
        return self.link.unsent_bytes <= HIGH_WATER_BYTES or self.link.wait_sent(0.0, HIGH_WATER_BYTES)

    def hand_over(self, function: Callable[[], None]) -> bool:
        """Has the io thread run a function, taking no lock; says whether the caller may wait for that."""
        self._loop.call(function)
        return self._loop.wake() and not self._loop.inside() and not sys.is_finalizing()

    def wait_for_room(self, deadline: Deadline) -> bool:
        """Waits while 8 MiB are on their way to the peer; says whether it took them in time.

        For calls, puts and messages, and not on a thread that deals with frames. What else is sent never waits: an
        acknowledgement or a withdrawal is small and bounded by what was asked, and an answer may not keep a thread that
        answers others too.
        """
        if self.link.unsent_bytes <= HIGH_WATER_BYTES or self._loop.inside():
            return True
        while (left_s := deadline.left_s) != 0:
            if self.link.wait_sent(_LOOK_S if left_s is None else min(left_s, _LOOK_S), HIGH_WATER_BYTES):
                return True
        return False

    def lose(self, error: CommError) -> None:
        """Fails what is under way, and takes back what is lent as unusable.

        Runs once, as the io thread or in its place.
        """
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            calls, self._calls = self._calls, {}
            lent, self._lent = self._lent, defaultdict(list)
        for reply in calls.values():
            reply.resolve(b"", error)
        for callbacks in lent.values():
            for on_returned in callbacks:
                on_returned(True)

    # Payloads out.

    def pack(self, encoded: Encoded, deadline: Deadline | None = None) -> bytes | comm_pb2.Block:
        """Returns what stands for a payload: its bytes, a block for this peer alone, or where it lies in place.

        Blocks while the quota of shared memory is used up; raises TimeoutError where that lasts until the deadline.
        Without a deadline it does not block: then the message is long. Raises PayloadError for a pickle that would
        leave the host.
        """
        if encoded.pickles and not self.link.passes_fds:
            raise PayloadError(f"got a pickle for {self.peer!r}, which is reached over gRPC: pickles stay on one host")
        if encoded.size_bytes <= INLINE_BYTES:
            return encoded.to_bytes()
        if not self.link.passes_fds:
            return self._send_data(encoded.to_bytes())
        blank, start = self._blanks.under(encoded), 0
        try:
            slot = self._pool.take(
                encoded.size_bytes,
                Deadline(0.0) if deadline is None else deadline,
                or_hold=None if blank is None else blank.slot,
            )
        except (CommError, TimeoutError):
            if deadline is None:
                return encoded.to_bytes()
            raise
        if blank is not None and slot is blank.slot:
            blank.freeze()
            start = blank.start
        try:
            if encoded.from_gpu:
                slot.segment.pin()
            encoded.write_into(slot.view(encoded.size_bytes, start))
            return self.lend_slot(slot, encoded.size_bytes, start)
        finally:
            self._pool.let_go(slot)

    def pass_on(self, data: bytes | Bytes) -> bytes | comm_pb2.Block:
        """Returns what stands for a payload that is bytes already, on its way to this peer. Does not block."""
        size = len(data)
        if size > INLINE_BYTES and not self.link.passes_fds:
            return self._send_data(data)
        if size > INLINE_BYTES:
            # Where the quota or the descriptors are used up: a message may be long.
            with contextlib.suppress(CommError, TimeoutError):
                slot = self._pool.take(size, Deadline(0.0))
                try:
                    slot.view(size)[:] = np.frombuffer(data, np.uint8)
                    return self.lend_slot(slot, size)
                finally:
                    self._pool.let_go(slot)
        return bytes(data)

    def _send_data(self, data: bytes | Bytes) -> comm_pb2.Block:
        number = next(self._ids)
        self.send(Kind.DATA, number, data if isinstance(data, bytes) else data.data)
        return comm_pb2.Block(segment=_DATA, offset_bytes=number, size_bytes=len(data))

    def lend_slot(self, slot: Slot, size_bytes: int, start: int = 0) -> comm_pb2.Block:
        """Lends the peer bytes of a slot of this process from `start` on; returns their name. Raises as `lend` does."""
        ref = BlockRef(slot.segment.id, slot.offset_bytes + start, size_bytes)
        self._pool.hold(slot)
        try:
            self.lend(ref, slot.segment, lambda abandoned: self._pool.let_go(slot, abandoned=abandoned))
        except CommError:
            self._pool.let_go(slot)
            raise
        return comm_pb2.Block(**ref._asdict())

    def look_again(self) -> None:
        """Wakes whoever waits for shared memory: a deadline was ended."""
        self._pool.wake()

    def take_back(self, packed: Iterable[bytes | comm_pb2.Block]) -> None:
        """Undoes the lending of what was packed and is named by no message."""
        for payload in packed:
            if isinstance(payload, comm_pb2.Block):
                if is_data(payload):
                    self.send(Kind.RELEASE, 0, comm_pb2.Release(blocks=[payload]).SerializeToString())
                else:
                    self._returned(payload)(False)

    def lend(self, block: BlockRef, segment: Segment | Mapped, on_returned: OnReturned) -> None:
        """Lends the peer a block of a segment; `on_returned(abandoned)` is called once.

        Raises CommError, and lends nothing, where this process is out of descriptors to pass.
        """
        with self._lock:
            lost = self._lost is not None
            if not lost:
                if segment.id not in self._announced:
                    self._announce(segment)
                    self._announced.add(segment.id)
                self._lent[block.segment, block.offset_bytes].append(on_returned)
        if lost:
            on_returned(False)

    @property
    def lends(self) -> bool:
        """Says whether the peer has blocks of shared memory that are to come back."""
        return bool(self._lent)

    def retire(self, segment_id: int) -> None:
        """Tells the peer that a segment announced to it will not be used again."""
        with self._lock:
            if segment_id not in self._announced:
                return
            self._announced.discard(segment_id)
        self.send(Kind.RETIRE, 0, comm_pb2.Segment(id=segment_id).SerializeToString())

    def _announce(self, segment: Segment | Mapped) -> None:
        body = comm_pb2.Segment(id=segment.id, size_bytes=segment.size_bytes).SerializeToString()
        try:
            self.link.send(Kind.SEGMENT, 0, body, segment.fd)
        except BrokenPipeError:
            return
        except OSError as error:
            raise system_refuses("pass shared memory on", error) from error

    def on_release(self, body: bytes) -> None:
        """Takes back the blocks that a RELEASE frame names; one that was not lent is a protocol error."""
        message = comm_pb2.Release.FromString(body)
        self.returned(message.blocks, message.abandoned)

    def returned(self, blocks: Iterable[comm_pb2.Block | BlockRef], abandoned: bool) -> None:
        """Takes back blocks that were lent; raises ProtocolError for one that was not."""
        for block in blocks:
            if is_data(block):
                self._data.pop(block.offset_bytes, None)
            else:
                self._returned(block)(abandoned)

    def _returned(self, block: comm_pb2.Block | BlockRef) -> OnReturned:
        with self._lock:
            callbacks = self._lent.get((block.segment, block.offset_bytes))
            if not callbacks and self._lost is not None:
                # The loss has taken it back already.
                return _nothing
            if not callbacks:
                raise ProtocolError(
                    f"got a release of block {block.segment:x}+{block.offset_bytes}, which was not lent"
                )
            callback = callbacks.pop()
            if not callbacks:
                del self._lent[block.segment, block.offset_bytes]
        return callback

    # Payloads in.

    @property
    def unpickles(self) -> bool:
        """Says whether what comes this way may be unpickled: within one host, where it is allowed."""
        return self._allow_pickle and self.link.passes_fds

    def decode(self, data: bytes | Bytes) -> Tree:
        """Returns the tree of a payload that came this way."""
        return decode(data, allow_pickle=self.unpickles)

    def on_segment(self, body: bytes, fd: int) -> None:
        """Takes in a segment that a SEGMENT frame announces."""
        message = comm_pb2.Segment.FromString(body)
        if message.id in self._segments:
            os.close(fd)
            raise ProtocolError(f"got segment {message.id:x} twice")
        self._segments[message.id] = Mapped(message.id, fd, message.size_bytes, self._on_segment_gone)

    def on_data(self, number: int, body: bytes) -> None:
        """Takes in the payload of a DATA frame, until a message names it."""
        if number in self._data:
            raise ProtocolError(f"got data {number} twice")
        self._data[number] = np.frombuffer(body, np.uint8)

    def on_retire(self, body: bytes) -> None:
        """Forgets a segment; arrays that lie in it keep it alive."""
        self._segments.pop(comm_pb2.Segment.FromString(body).id, None)

    def segment_of(self, block: comm_pb2.Block) -> tuple[BlockRef, Mapped]:
        """Returns a block that the peer lent, and its segment; raises ProtocolError for one that cannot be."""
        mapped = self._segments.get(block.segment)
        if mapped is None:
            raise ProtocolError(f"got a block of segment {block.segment:x}, which was not announced")
        found = BlockRef(block.segment, block.offset_bytes, block.size_bytes)
        if found.offset_bytes + found.size_bytes > mapped.size_bytes:
            raise ProtocolError(f"got {found}, want it inside the {mapped.size_bytes} bytes of its segment")
        return found, mapped

    def open(self, payload: bytes | comm_pb2.Block) -> bytes | Bytes:
        """Returns a payload's bytes, in place: a block of shared memory is held while they live.

        Raises ProtocolError for what did not come; CommError, having let go of it, for what is too large here or cannot
        be mapped.
        """
        if isinstance(payload, bytes):
            self.check_size(len(payload))
            return payload
        if is_data(payload):
            data = self._data.pop(payload.offset_bytes, None)
            if data is None:
                raise ProtocolError(f"got a message that names data {payload.offset_bytes}, which did not come")
            self.check_size(len(data))
            return data
        block, mapped = self.segment_of(payload)
        try:
            self.check_size(block.size_bytes)
            found = mapped.bytes_of(block)
        except CommError:
            self.release([block])
            raise
        return self.owner.held(found, self.owner, block)

    def check_size(self, size_bytes: int) -> None:
        """Raises PayloadError for a payload that is too large here."""
        if size_bytes > self.max_payload_bytes:
            raise PayloadError(f"got a payload of {size_bytes} bytes, want at most {self.max_payload_bytes}")

    def release(self, blocks: list[BlockRef], *, abandoned: bool = False) -> None:
        """Tells the peer that blocks it lent are not read any more."""
        message = comm_pb2.Release(blocks=[comm_pb2.Block(**block._asdict()) for block in blocks], abandoned=abandoned)
        self.send(Kind.RELEASE, 0, message.SerializeToString())


class Owner:
    """Whom a peer's blocks go back to while it is connected; who keeps one of them does not keep the others too."""

    __slots__ = ("_connection", "_released")

    def __init__(self, connection: Connection, released: Released) -> None:
        self._connection = weakref.ref(connection)
        self._released = released

    def held(self, data: Bytes, lender: Lender, block: BlockRef) -> Bytes:
        """Returns bytes in place; once the last view of them is gone, the io thread calls `lender.release([block])`."""
        return Hold(data, partial(self._released.add, lender, block)).array()

    def release(self, blocks: list[BlockRef], *, abandoned: bool = False) -> None:
        """Tells the peer that blocks it lent are not read any more, if it is there."""
        connection = self._connection()
        if connection is not None:
            connection.release(blocks, abandoned=abandoned)


def _nothing(abandoned: bool) -> None:
    """What is left to do for a block that is back."""


def is_data(block: comm_pb2.Block | BlockRef) -> bool:
    """Says whether a block stands for the bytes of a DATA frame."""
    return block.segment == _DATA


def message_of(packed: bytes | comm_pb2.Block) -> comm_pb2.Payload:
    """Returns a packed payload as a message of its own."""
    return comm_pb2.Payload(data=packed) if isinstance(packed, bytes) else comm_pb2.Payload(block=packed)


def packed_of(message: comm_pb2.Payload) -> bytes | comm_pb2.Block:
    """Returns what a message of a payload holds."""
    return message.block if message.HasField("block") else message.data
