"""The channels that an endpoint hosts: frames to and from their indexes, and the payloads' memory in between.

Everything here runs as the endpoint's io thread or in its place, one thread at a time: the indexes need no lock. But
`Passed.taken_by` runs on the thread that reads, and who lets go may be any.
"""

import threading
from collections.abc import Sequence, Set
from functools import partial

import numpy as np

from m2flow.comm._connection import Connection, is_data
from m2flow.comm._entries import Entry, Filter, Held, drop
from m2flow.comm._frames import MAX_MESSAGE_BYTES, Kind, ProtocolError
from m2flow.comm._index import ChannelIndex
from m2flow.comm._items import add_columns, add_payloads, rows
from m2flow.comm._mappings import BlockRef
from m2flow.comm._parking import Parking
from m2flow.comm._references import Decode, Referable, Reference, gone, is_reference, referenced
from m2flow.comm._replies import nothing
from m2flow.comm._tree import Bytes
from m2flow.comm._waiting import Caller, Refusal
from m2flow.comm.errors import CommError
from m2flow.comm.payload import encode, has_pickle
from m2flow.proto.comm.v1 import comm_pb2


class Passed(Held, Referable):
    """A payload on its way through, in a block that its producer gets back when all have let go of it."""

    __slots__ = ("_abandoned", "_block", "_counting", "_from", "_holds", "_mapped", "_message")

    def __init__(self, connection: Connection, block: comm_pb2.Block) -> None:
        self._message = block
        self._block, self._mapped = connection.segment_of(block)
        self._from = connection.owner
        self._abandoned = False
        self._counting = threading.Lock()
        self._holds = 1

    def drop(self) -> None:
        """Ends the index's own hold."""
        self._let_go(False)

    def give(self, reader: Connection) -> bytes | comm_pb2.Block:
        """Returns what stands for the payload: a number within the process, a block lent on the host, or a copy."""
        if reader.within:
            return self.number
        if reader.link.passes_fds:
            self._hold()
            try:
                # A block has the same name at every end.
                reader.lend(self._block, self._mapped, self._let_go)
                return self._message
            except CommError:
                # No descriptor is left to lend it by.
                self._let_go(False)
        # A copy: the block may be used again before all of it is sent.
        return reader.pass_on(self._mapped.bytes_of(self._block).tobytes())

    def taken_by(self, reader: Connection, decode: Decode) -> tuple[Bytes, Decode]:
        """Returns the bytes in place, held while they live."""
        reader.check_size(self._block.size_bytes)
        found = self._mapped.bytes_of(self._block)
        self._hold()
        # Told here, where the producer is known: the reader's endpoint may be closed by then.
        return self._from.held(found, self, self._block), decode

    def release(self, blocks: list[BlockRef]) -> None:
        """Ends the holds of readers of this process."""
        for _ in blocks:
            self._let_go(False)

    def _hold(self) -> None:
        with self._counting:
            if not self._holds:
                raise gone(self.number)
            self._holds += 1

    def _let_go(self, abandoned: bool) -> None:
        with self._counting:
            self._holds -= 1
            self._abandoned |= abandoned
            last = not self._holds
        if last:
            self._from.release([self._block], abandoned=self._abandoned)


class ChannelHost:
    """All channels hosted here, by name."""

    def __init__(self, parking: Parking) -> None:
        self._indexes: dict[str, ChannelIndex] = {}
        self._parking = parking

    def add(self, index: ChannelIndex) -> None:
        """Hosts a channel; raises ValueError for a name that is taken."""
        if index.name in self._indexes:
            raise ValueError(f"channel {index.name!r} is hosted already: give it another name")
        self._indexes[index.name] = index
        self._parking.arrived(index.name)

    def remove(self, name: str) -> None:
        """Stops hosting a channel, which ends it first."""
        index = self._indexes.pop(name, None)
        if index is not None:
            index.discard()

    def close(self) -> None:
        """Lets go of all channels once the endpoint is closed: their items keep what it had mapped."""
        self._indexes.clear()

    def index(self, name: str) -> ChannelIndex:
        """Returns a channel's index; raises ValueError where none has this name."""
        try:
            return self._indexes[name]
        except KeyError:
            raise ValueError(f"channel {name!r} is not hosted here, want one of {sorted(self._indexes)}") from None

    def consumers_of(self, name: str) -> Set[str]:
        """Returns the consumers of a channel; none where it is not hosted here. Any thread may ask."""
        index = self._indexes.get(name)
        return frozenset() if index is None else index.members.consumers.keys()

    def on_request(self, connection: Connection, request_id: int, body: bytes) -> None:
        """Handles a CHANNEL frame."""
        request = comm_pb2.ChannelRequest.FromString(body)
        # Taken in here, in the order of frames: the segment of a block may be retired by the next one.
        try:
            entries = _entries(connection, request.put.items) if request.HasField("put") else []
        except ProtocolError:
            raise
        except CommError as error:
            # What is too large here, or objects that whoever put them, and waited no longer, has let go of.
            connection.returned([block for block in request.put.items.blocks if is_data(block)], False)
            _answer(connection, request_id, (), Refusal(type(error).__name__, str(error)))
            return
        index = self._indexes.get(request.channel)
        if index is not None:
            self._serve(index, connection, request_id, request, entries, len(body))
        elif not request.HasField("ack"):
            # A channel that is not there has leased nothing.
            self._park(connection, request_id, request, entries, len(body))

    def _park(
        self,
        connection: Connection,
        request_id: int,
        request: comm_pb2.ChannelRequest,
        entries: list[Entry],
        size_bytes: int,
    ) -> None:
        def refuse(refusal: Refusal) -> None:
            drop(entries)
            _answer(connection, request_id, (), refusal)

        not_here = Refusal("CommError", "it is not hosted by this endpoint: call host_channel there")
        self._parking.park(
            request.channel,
            connection.session,
            request_id,
            retry=lambda: self._serve(
                self._indexes[request.channel], connection, request_id, request, entries, size_bytes
            ),
            expire=partial(refuse, not_here),
            withdraw=partial(refuse, Refusal("TimeoutError_")),
        )

    def _serve(
        self,
        index: ChannelIndex,
        connection: Connection,
        request_id: int,
        request: comm_pb2.ChannelRequest,
        entries: list[Entry],
        size_bytes: int,
    ) -> None:
        caller = Caller(connection.session, connection.peer, request_id, partial(_answer, connection, request_id))
        kind = request.WhichOneof("kind")
        if kind == "put":
            if not connection.link.passes_fds and any(_has_pickle(entry.payload) for entry in entries):
                refusal = Refusal("PayloadError", "got a pickle over gRPC: pickles stay on one host")
                caller.answer((), refusal)
                return
            index.put(caller, entries, wait=request.put.wait, size_bytes=size_bytes + _longest_data(request.put.items))
        elif kind == "get":
            get = request.get
            if get.ack:
                index.ack(connection.session, get.ack[:], give_back=False)
            at_least = get.at_least if get.HasField("at_least") else None
            index.get(caller, _filter(get), get.weight, at_least, get.max_bytes or MAX_MESSAGE_BYTES)
        elif kind == "ack":
            index.ack(connection.session, request.ack.leases[:], give_back=request.ack.give_back)
        elif kind == "end":
            index.end(caller, request.end.iteration)
        elif kind == "close":
            index.close(caller)
        elif kind == "stats":
            _answer_stats(connection, request_id, index)
        else:
            raise ProtocolError(f"got a channel request of kind {kind}")

    def on_cancel(self, connection: Connection, request_id: int, body: bytes) -> None:
        """Handles a CANCEL frame: the request is answered as it stands, if it is still open."""
        for index in self._indexes.values():
            index.cancel(connection.session, request_id)
        self._parking.cancel(connection.session, request_id)

    def on_gone(self, connection: Connection) -> None:
        """Takes note of a connection that is gone; a channel that it asked for is told when it is there."""
        session, peer = connection.session, connection.peer
        for index in list(self._indexes.values()):
            index.left(session, peer)
        for name in self._parking.left(session):
            tell = partial(self._left, name, session, peer)
            self._parking.park(name, None, 0, retry=tell, expire=nothing, withdraw=nothing)

    def _left(self, name: str, session: int, peer: str) -> None:
        self._indexes[name].left(session, peer)


def _answer_stats(connection: Connection, request_id: int, index: ChannelIndex) -> None:
    stats = comm_pb2.ChannelStats(
        queued=index.num_queued,
        leased=index.num_leased,
        put=index.counts.put,
        acked=index.counts.acked,
        dropped=index.counts.dropped,
        tombstones=index.counts.tombstones,
        regiven=index.counts.regiven,
        waiting_producers=index.num_waiting_puts,
        waiting_consumers=index.num_waiting_gets,
        queued_weight=index.queued_weight,
        closed=index.closed or index.members.all_closed(),
    )
    connection.send(Kind.REPLY, request_id, comm_pb2.ChannelResponse(stats=stats).SerializeToString())


def _entries(connection: Connection, items: comm_pb2.Items) -> list[Entry]:
    peer = connection.peer
    return [
        Entry(
            id,
            key,
            weight,
            iteration,
            peer,
            tombstone,
            # In line: a call for each of many small items costs as much as the rest of their entry.
            payload if isinstance(payload, bytes) else _taken_in(payload, connection),
        )
        for id, key, weight, tombstone, iteration, _, _, payload in rows(items)
    ]


def _taken_in(payload: comm_pb2.Block, connection: Connection) -> Passed | Reference | bytes | Bytes:
    if is_data(payload):
        # It has come over a network, and lives as long as its item.
        return connection.open(payload)
    if not is_reference(payload):
        return Passed(connection, payload)
    found = referenced(payload)
    # Numbers of what passes through are for readers.
    assert isinstance(found, Reference)
    return found


def _longest_data(items: comm_pb2.Items) -> int:
    """Returns the bytes of the longest payload that came beside its message."""
    return max((block.size_bytes for block in items.blocks if is_data(block)), default=0) if items.blocks else 0


def _has_pickle(payload: object) -> bool:
    return isinstance(payload, bytes | np.ndarray) and has_pickle(payload)


def _filter(request: comm_pb2.GetRequest) -> Filter:
    return Filter(
        request.key if request.HasField("key") else None,
        request.iteration if request.HasField("iteration") else None,
    )


def _answer(connection: Connection, request_id: int, entries: Sequence[Entry], refusal: Refusal | None) -> None:
    response = comm_pb2.ChannelResponse()
    if entries:
        items = response.items
        add_columns(
            items,
            ids=[entry.id for entry in entries],
            keys=[entry.key for entry in entries],
            weights=[entry.weight for entry in entries],
            tombstones=[entry.tombstone for entry in entries],
            iterations=[entry.iteration for entry in entries],
            producers=[entry.producer for entry in entries],
            leases=[entry.lease for entry in entries],
        )
        held = [entry.payload for entry in entries]
        add_payloads(items, [load if isinstance(load, bytes) else _given(load, connection) for load in held])
    elif refusal is not None:
        failure = comm_pb2.Failure(type=refusal.type, message=refusal.message, peers=refusal.peers)
        response = comm_pb2.ChannelResponse(failure=failure)
    connection.send(Kind.REPLY, request_id, response.SerializeToString())


def _given(payload: object, reader: Connection) -> bytes | comm_pb2.Block:
    if isinstance(payload, Passed):
        return payload.give(reader)
    if isinstance(payload, np.ndarray):
        return reader.pass_on(payload)
    assert isinstance(payload, Reference)
    # Its consumer has come back in another process since it was put. It was found to have an encoding then.
    return payload.number if reader.within else reader.pass_on(encode(payload.tree).to_bytes())
