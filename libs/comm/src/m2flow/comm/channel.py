"""Channels: bounded queues with many producers and many consumers, whose items are leased until acknowledged.

The order is kept by an index in the endpoint that hosts the channel; every other endpoint has a client of it. The bytes
of large items stay where their producer wrote them, in shared memory, and the consumer maps them there.
"""

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from m2flow.comm._asked import Asked, take_back, take_back_async
from m2flow.comm._connection import INLINE_BYTES, Connection
from m2flow.comm._deadline import Deadline
from m2flow.comm._frames import MAX_MESSAGE_BYTES, Kind
from m2flow.comm._items import Lease, Put, add_payloads, describe
from m2flow.comm._line import Line
from m2flow.comm._references import Reference
from m2flow.comm._tree import check
from m2flow.comm.errors import ChannelClosedError, IterationEnded, PayloadError, TimeoutError_
from m2flow.comm.payload import Encoded, Tree, encode
from m2flow.proto.comm.v1 import comm_pb2

# A tombstone's reason must not be empty: an item with none is an ordinary one.
NO_REASON = "no reason given"
# A copy of so much takes less than another thread takes to begin one.
_COPIED_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one channel: items in it now (`queued`, `leased`), items so far (`put`, `acked`, `dropped` as doubled,
    `tombstones`, `regiven` after a death), requests that wait, and the sum of the queued items' weights.
    """

    queued: int
    leased: int
    put: int
    acked: int
    dropped: int
    tombstones: int
    regiven: int
    waiting_producers: int
    waiting_consumers: int
    queued_weight: float
    closed: bool


class Channel:
    """One endpoint's client of a channel. Thread-safe; many calls may wait at once, each for its own.

    What blocks raises CommError in the callback of a future: that runs as the io thread or in its place, where none may
    wait.

    While its host and all its consumers are endpoints of this process, items are handed over as they are: whoever puts
    one must not change it afterwards, nor may whoever takes it.
    """

    def __init__(
        self,
        name: str,
        host: str,
        connect: Callable[[str], Connection],
        stays_here: Callable[[str, str], bool],
        check_may_wait: Callable[[str], None],
        device: str | None = None,
    ) -> None:
        self.name = name
        self.host = host
        self._connect = connect
        self._stays_here = stays_here
        self._check_may_wait = check_may_wait
        self._device = device
        # By event loop.
        self._lines: weakref.WeakKeyDictionary[object, Line] = weakref.WeakKeyDictionary()

    # Putting.

    def put(
        self,
        item: Tree,
        *,
        id: str = "",
        iteration: int = 0,
        weight: float = 1.0,
        key: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Puts an item; returns when the channel has it. Blocks while the channel is full.

        Raises PayloadError at once for an item that cannot be encoded and ValueError for what it cannot be put with,
        ChannelClosedError when nothing more is taken, IterationOverError when every producer has ended its iteration,
        TimeoutError_ after `timeout_s` seconds, in which it waits for shared memory too, PeerLostError without its
        host. The item is then not in the channel, unless its host was out of reach: an item that has an id may be put
        again.
        """
        self.put_many(
            [Put(item=item, id=id, iteration=iteration, weight=weight, key=key)],
            timeout_s=timeout_s,
        )

    def put_nowait(
        self,
        item: Tree,
        *,
        id: str = "",
        iteration: int = 0,
        weight: float = 1.0,
        key: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Puts an item if there is room now, else raises ChannelFullError; otherwise like `put`.

        Blocks for the host's answer, and for shared memory where the quota is used up.
        """
        puts = [Put(item=item, id=id, iteration=iteration, weight=weight, key=key)]
        self._waits("put_nowait")
        deadline = Deadline(timeout_s)
        self._ask_put(puts, self._encoded(puts), deadline, wait=False).wait()

    def put_tombstone(
        self,
        *,
        id: str,
        iteration: int,
        reason: str,
        weight: float = 1.0,
        key: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Puts the fact that an item carries no data, and why; otherwise like `put`.

        An empty reason, such as the text of an error that has none, is put as "no reason given".
        """
        item = Put(id=id, iteration=iteration, weight=weight, key=key, tombstone=NO_REASON if reason == "" else reason)
        self.put_many([item], timeout_s=timeout_s)

    def put_many(self, items: Sequence[Put], *, timeout_s: float | None = None) -> None:
        """Puts items in order, in one message; returns when the channel has them all. Otherwise like `put`.

        After a TimeoutError_ the first ones may be in the channel: put all again under the same ids. Raises
        PayloadError where what lies in the message is above 2 GiB.
        """
        if items:
            self._waits("put")
            deadline = Deadline(timeout_s)
            self._ask_put(items, self._encoded(items), deadline, wait=True).wait()

    async def aput(
        self,
        item: Tree,
        *,
        id: str = "",
        iteration: int = 0,
        weight: float = 1.0,
        key: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Like `put`, without blocking the event loop.

        Cancelled, the item is not in the channel, or whole in it, and does not come into it later.
        """
        await self.aput_many(
            [Put(item=item, id=id, iteration=iteration, weight=weight, key=key)],
            timeout_s=timeout_s,
        )

    async def aput_many(self, items: Sequence[Put], *, timeout_s: float | None = None) -> None:
        """Like `put_many`, without blocking the event loop: more than 1 MiB is copied on another thread.

        What is no array is encoded on the loop's, pickles too.
        """
        if not items:
            return
        deadline, encoded = Deadline(timeout_s), self._encoded(items)
        events = sys.modules["asyncio"].get_running_loop()
        line = self._lines.get(events) or self._lines.setdefault(events, Line())
        if not await line.room(self._connect(self.host), deadline):
            raise deadline.timed_out(self.name, self.host, _key_of(items))
        if encoded is not None and max(payload.size_bytes for payload in encoded) > INLINE_BYTES:
            asked = await self._ask_put_async(items, encoded, deadline, line)
        else:
            # It has waited for the host to take what was sent before.
            asked = self._ask_put(items, encoded, deadline, wait=True, at_once=True)
        await asked.wait_async()

    # Taking.

    def get(
        self,
        *,
        key: str | None = None,
        iteration: int | None = None,
        ack: Sequence[Lease] = (),
        timeout_s: float | None = None,
    ) -> Lease:
        """Takes the first item, of a key or an iteration when they are given. Blocks until there is one.

        First it commits the leases in `ack`, as `ack` does, for the price of no message: they are committed also where
        there is no item for it. Should the connection be lost meanwhile, the same may be asked again: it commits what
        is not committed yet, and takes nothing and raises LeaseLostError where something of it is queued again.
        Raises IterationEnded once every producer has ended `iteration` and none of its items is queued for this
        consumer, or waits for room; ChannelClosedError once the channel is closed and drained; PeerLostError naming a
        producer that was gone before it closed the channel, once what it had put is drained and unless a successor is
        announced; TimeoutError_ after `timeout_s` seconds; ValueError for an empty key.
        """
        self._waits("get")
        return self._ask_get(0.0, key, iteration, ack, timeout_s).wait()[0]

    def get_batch(
        self,
        weight: float,
        *,
        at_least: float | None = None,
        key: str | None = None,
        iteration: int | None = None,
        ack: Sequence[Lease] = (),
        timeout_s: float | None = None,
    ) -> list[Lease]:
        """Takes items of total weight `weight`, in order. Blocks until so much is there, or no more can come.

        With `at_least` it waits only for so much, and takes what is there by then; 0 does not wait, and may take
        nothing. Never more than `weight`, unless the first alone is heavier. Less, and less than `at_least`, where the
        next item is too heavy to come along, when every producer has ended the iteration or closed, when one died,
        when the channel is full and cannot hold as much or a put finds no room, or where more would not fit into one
        message: this endpoint's `max_payload_bytes`, at most 2 GiB, of all that does not lie in shared memory. `ack` is
        as in `get`, which says what is raised.
        """
        self._waits("get_batch")
        return self._ask_batch(weight, key, iteration, ack, timeout_s, at_least).wait()

    async def aget(
        self,
        *,
        key: str | None = None,
        iteration: int | None = None,
        ack: Sequence[Lease] = (),
        timeout_s: float | None = None,
    ) -> Lease:
        """Like `get`, without blocking the event loop; cancelled, it loses no item."""
        return (await self._ask_get(0.0, key, iteration, ack, timeout_s).wait_async())[0]

    async def aget_batch(
        self,
        weight: float,
        *,
        at_least: float | None = None,
        key: str | None = None,
        iteration: int | None = None,
        ack: Sequence[Lease] = (),
        timeout_s: float | None = None,
    ) -> list[Lease]:
        """Like `get_batch`, without blocking the event loop; cancelled, it loses no item."""
        return await self._ask_batch(weight, key, iteration, ack, timeout_s, at_least).wait_async()

    def leases(
        self,
        *,
        key: str | None = None,
        iteration: int | None = None,
        ahead: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[Lease]:
        """Yields one item after another, until the channel is closed and drained or `iteration` has ended.

        Whoever goes on to the next commits the one before. The one at which the loop is left is still leased, to be
        acknowledged or given back. With `ahead`, that many more are leased while the loop works on one: it waits less,
        and whoever is slow keeps more from others. They go back when the loop is left, which blocks until they have, a
        second at most. Otherwise like `get`, with `timeout_s` for each, and a LeaseLostError that may be told `ahead`
        items later; raises ValueError for an `ahead` below 0.
        """
        _check_ahead(ahead)
        asked: deque[Asked] = deque()
        taken: Sequence[Lease] = ()
        try:
            while ahead >= 0:
                self._waits("leases")
                self._ask_ahead(asked, ahead, key, iteration, taken, timeout_s)
                # Whoever let go of it has its memory back while the next one is waited for.
                taken = ()
                try:
                    taken = asked[0].wait()
                except (ChannelClosedError, IterationEnded):
                    # What was asked later may have an item that was queued again since.
                    ahead -= 1
                # No call, after which a Ctrl-C might come: from here on the item is the caller's.
                del asked[0]
                if taken:
                    yield taken[0]
        finally:
            take_back(asked)

    async def aleases(
        self,
        *,
        key: str | None = None,
        iteration: int | None = None,
        ahead: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Lease]:
        """Like `leases`, without blocking the event loop: for `async for`.

        Left before its end it is to be closed, as by `contextlib.aclosing`: event loops do that late, or never.
        """
        _check_ahead(ahead)
        asked: deque[Asked] = deque()
        taken: Sequence[Lease] = ()
        try:
            while ahead >= 0:
                self._ask_ahead(asked, ahead, key, iteration, taken, timeout_s)
                taken = ()
                try:
                    taken = await asked[0].wait_async()
                except (ChannelClosedError, IterationEnded):
                    ahead -= 1
                del asked[0]
                if taken:
                    yield taken[0]
        finally:
            await take_back_async(asked)

    def ack(self, leases: Lease | Iterable[Lease]) -> None:
        """Commits leases, after the outputs they caused were put. Does not wait for the host.

        Whether it has arrived only the answer of a `get(ack=)` tells. The next `get` raises LeaseLostError where a
        lease had ended with its connection.
        """
        self._end_leases(leases, give_back=False)

    def give_back(self, leases: Lease | Iterable[Lease]) -> None:
        """Returns leases to their places in the queue, for anyone to take. Does not wait for the host."""
        self._end_leases(leases, give_back=True)

    # Ending.

    def end(self, iteration: int, *, timeout_s: float | None = None) -> None:
        """Says that this producer has put all of an iteration; once all have, what is queued of it is flushed.

        Raises CommError where this endpoint is no producer. Blocks for the host's answer; without one in `timeout_s`
        seconds it raises TimeoutError_, and may be asked for again, as may `close`.
        """
        self._waits("end")
        self._ask_end(iteration, timeout_s).wait()

    async def aend(self, iteration: int, *, timeout_s: float | None = None) -> None:
        """Like `end`, without blocking the event loop."""
        await self._ask_end(iteration, timeout_s).wait_async()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Leaves the channel: a producer puts no more, a consumer gives its leases back. Blocks for the host's answer.

        When all producers have left, consumers drain the channel and then get ChannelClosedError. From an endpoint that
        is neither, it ends the channel for all.
        """
        self._waits("close")
        self._ask_close(timeout_s).wait()

    async def aclose(self, *, timeout_s: float | None = None) -> None:
        """Like `close`, without blocking the event loop."""
        await self._ask_close(timeout_s).wait_async()

    def stats(self, *, timeout_s: float | None = None) -> Stats:
        """Returns the channel's counts. Blocks for the host's answer."""
        self._waits("stats")
        return _stats(self._ask_stats(timeout_s).wait_response())

    async def astats(self, *, timeout_s: float | None = None) -> Stats:
        """Like `stats`, without blocking the event loop."""
        return _stats(await self._ask_stats(timeout_s).wait_response_async())

    # Requests.

    def _waits(self, method: str) -> None:
        self._check_may_wait(f"channel {self.name!r}: {method}")

    def _ask(self, request: comm_pb2.ChannelRequest, timeout_s: float | None) -> Asked:
        request.channel = self.name
        return Asked(self.name, self._connect(self.host), request, Deadline(timeout_s))

    def _ask_end(self, iteration: int, timeout_s: float | None) -> Asked:
        return self._ask(comm_pb2.ChannelRequest(end=comm_pb2.EndRequest(iteration=iteration)), timeout_s)

    def _ask_close(self, timeout_s: float | None) -> Asked:
        return self._ask(comm_pb2.ChannelRequest(close=comm_pb2.CloseRequest()), timeout_s)

    def _ask_stats(self, timeout_s: float | None) -> Asked:
        return self._ask(comm_pb2.ChannelRequest(stats=comm_pb2.StatsRequest()), timeout_s)

    def _ask_ahead(
        self,
        asked: "deque[Asked]",
        ahead: int,
        key: str | None,
        iteration: int | None,
        ack: Sequence[Lease],
        timeout_s: float | None,
    ) -> None:
        """Asks for an item and for as many more as may be under way beside it; the first request commits leases."""
        while len(asked) <= ahead:
            asked.append(self._ask_get(0.0, key, iteration, ack, None))
            ack = ()
            if ahead:
                asked[-1].ask()
        asked[0].deadline = Deadline(timeout_s)

    def _ask_batch(
        self,
        weight: float,
        key: str | None,
        iteration: int | None,
        ack: Sequence[Lease],
        timeout_s: float | None,
        at_least: float | None,
    ) -> Asked:
        if not weight > 0:
            raise ValueError(f"get_batch: got weight {weight}, want more than 0: get takes one item")
        if at_least is not None and not 0 <= at_least <= weight:
            raise ValueError(f"get_batch: got at_least {at_least}, want 0 to the weight {weight}")
        return self._ask_get(weight, key, iteration, ack, timeout_s, at_least)

    def _ask_get(
        self,
        weight: float,
        key: str | None,
        iteration: int | None,
        ack: Sequence[Lease],
        timeout_s: float | None,
        at_least: float | None = None,
    ) -> Asked:
        deadline = Deadline(timeout_s)
        if key == "":
            raise ValueError("get: got key '', want one that items are put with: None takes any, also those of no key")
        connection, device = self._connect(self.host), self._device
        request = comm_pb2.ChannelRequest(channel=self.name)
        get = request.get
        get.weight = weight
        if weight and connection.max_payload_bytes < MAX_MESSAGE_BYTES:
            get.max_bytes = connection.max_payload_bytes
        if key is not None:
            try:
                get.key = key
            except (TypeError, ValueError) as error:
                raise ValueError(f"get: got key {key!r}, want a str that UTF-8 can spell: {error}") from error
        if iteration is not None:
            get.iteration = iteration
        if at_least is not None:
            get.at_least = at_least
        get.ack.extend([lease.number for lease in ack])
        return Asked(self.name, connection, request, deadline, key=key, iteration=iteration, device=device)

    def _encoded(self, puts: Iterable[Put]) -> list[Encoded] | None:
        """Encodes all items before the first one costs anything: one that cannot be encoded harms none.

        None where they stay in this process: there it is only checked that they could be.
        """
        if not self._stays_here(self.name, self.host):
            return [encode(put.item) for put in puts]
        for put in puts:
            check(put.item)
        return None

    def _ask_put(
        self,
        puts: Sequence[Put],
        encoded: Sequence[Encoded] | None,
        deadline: Deadline,
        *,
        wait: bool,
        at_once: bool = False,
    ) -> Asked:
        # Before any memory is lent: what is wrong here costs nothing.
        request, key = self._put_request(puts, wait=wait), _key_of(puts)
        connection = self._connect(self.host)
        if encoded is None:
            references = [Reference(put.item) for put in puts]
            add_payloads(request.put.items, [reference.number for reference in references])
            return Asked(self.name, connection, request, deadline, key=key, references=references)
        packed = self._pack(connection, encoded, key, deadline, at_once=at_once)
        return self._send_put(request, connection, packed, key, deadline)

    async def _ask_put_async(
        self, puts: Sequence[Put], encoded: Sequence[Encoded], deadline: Deadline, line: Line
    ) -> Asked:
        """Like `_ask_put`, packing what is large or waits for memory on another thread.

        Cancelled, or thrown away with its loop, that thread ends, and nothing is put or stays lent.
        """
        asyncio = sys.modules["asyncio"]
        request, key = self._put_request(puts, wait=True), _key_of(puts)
        connection = self._connect(self.host)
        small = sum(payload.size_bytes for payload in encoded) <= _COPIED_AT_ONCE_BYTES
        if small and not any(payload.from_gpu for payload in encoded):
            # Where there is memory for it now.
            with contextlib.suppress(TimeoutError_):
                here = self._pack(connection, encoded, key, Deadline(0.0), at_once=True)
                return self._send_put(request, connection, here, key, deadline)
        packed: list[bytes | comm_pb2.Block] = []
        # Taken by who comes first: this thread when it is cancelled, or the other when it has packed all.
        decided = threading.Lock()

        def pack() -> None:
            packed.extend(self._pack(connection, encoded, key, deadline))
            if not decided.acquire(blocking=False):
                connection.take_back(packed)

        def give_up() -> None:
            if not decided.acquire(blocking=False):
                connection.take_back(packed)
            deadline.end()
            connection.look_again()

        try:
            if not await line.on_a_thread(pack, deadline):
                waited_for = f"earlier puts, which wait for {self.host} or shared memory"
                raise deadline.timed_out(self.name, waited_for, key)
        except asyncio.CancelledError:
            give_up()
            raise
        except GeneratorExit:
            # Its loop was closed; a finaliser, which may run inside any lock.
            connection.hand_over(give_up)
            raise
        return self._send_put(request, connection, packed, key, deadline)

    def _put_request(self, puts: Sequence[Put], *, wait: bool) -> comm_pb2.ChannelRequest:
        request = comm_pb2.ChannelRequest(channel=self.name)
        put = request.put
        put.wait = wait
        describe(puts, put.items)
        return request

    def _send_put(
        self,
        request: comm_pb2.ChannelRequest,
        connection: Connection,
        packed: list[bytes | comm_pb2.Block],
        key: str | None,
        deadline: Deadline,
    ) -> Asked:
        add_payloads(request.put.items, packed)
        try:
            return Asked(self.name, connection, request, deadline, key=key)
        except PayloadError:
            connection.take_back(packed)
            raise

    def _pack(
        self,
        connection: Connection,
        encoded: Sequence[Encoded],
        key: str | None,
        deadline: Deadline,
        *,
        at_once: bool = False,
    ) -> list[bytes | comm_pb2.Block]:
        packed: list[bytes | comm_pb2.Block] = []
        try:
            for payload in encoded:
                # What is large may go ahead of the message.
                waits = not at_once and (not packed or payload.size_bytes > INLINE_BYTES)
                if waits and not connection.wait_for_room(deadline):
                    raise deadline.timed_out(self.name, self.host, key)
                packed.append(connection.pack(payload, deadline))
        except BaseException as error:
            connection.take_back(packed)
            if deadline.ended(error) and not isinstance(error, TimeoutError_):
                raise deadline.timed_out(self.name, str(error), key) from error
            raise
        return packed

    def _end_leases(self, leases: Lease | Iterable[Lease], *, give_back: bool) -> None:
        ended = [leases] if isinstance(leases, Lease) else leases
        ack = comm_pb2.AckRequest(leases=[lease.number for lease in ended], give_back=give_back)
        request = comm_pb2.ChannelRequest(channel=self.name, ack=ack)
        self._connect(self.host).send(Kind.CHANNEL, 0, request.SerializeToString())


def _check_ahead(ahead: int) -> None:
    if ahead < 0:
        raise ValueError(f"leases: got ahead {ahead}, want 0 or more")


def _key_of(puts: Sequence[Put]) -> str | None:
    """Returns the key that an error names; None for several items."""
    return (puts[0].key or None) if len(puts) == 1 else None


def _stats(response: comm_pb2.ChannelResponse) -> Stats:
    return Stats(**{name: getattr(response.stats, name) for name in Stats.__slots__})
