"""An endpoint: one process's presence in a run, under a name that others reach it by.

Every endpoint listens on a Unix socket in the run's private directory and dials others when it first needs them. One
connection carries calls, channels and the descriptors of shared memory, both ways; one io thread moves the bytes. Two
endpoints of one process need neither: each deals with the frames that it sends, in the other's place. A peer's death is
noticed because the kernel closes its socket, not because it missed a heartbeat.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy.typing as npt

from m2flow.comm import _copies
from m2flow.comm._blanks import Shape
from m2flow.comm._calls import CallServer, Handler, read_answer
from m2flow.comm._connection import INLINE_BYTES, Connection, message_of, packed_of
from m2flow.comm._copies import Copies, is_near
from m2flow.comm._deadline import Deadline
from m2flow.comm._executor import LaneExecutor
from m2flow.comm._fabric import Fabric
from m2flow.comm._frames import Kind
from m2flow.comm._handshake import Identity
from m2flow.comm._host import ChannelHost
from m2flow.comm._index import ChannelIndex
from m2flow.comm._memory import memory_bytes
from m2flow.comm._parking import Parking
from m2flow.comm._replies import Answer, Reply
from m2flow.comm._sockets import check_name
from m2flow.comm.channel import Channel
from m2flow.comm.collectives import Handle
from m2flow.comm.errors import CommError, TimeoutError_
from m2flow.comm.payload import MAX_PAYLOAD_BYTES, Tree, encode
from m2flow.comm.resharding import Box
from m2flow.comm.routing import Address
from m2flow.comm.tls import Tls
from m2flow.comm.transfer import DEFAULT_BUCKET_BYTES, WeightReceiver
from m2flow.comm.weights import SERVICE, StagedWeights, WeightReader, WeightStore, reader_numbers
from m2flow.proto.comm.v1 import comm_pb2

# As many for handlers as for what the package itself runs.
_MAX_THREADS = 8
_MAIL = "m2flow.mail"
_T = TypeVar("_T")


class Endpoint:
    """One process's presence in one run. Thread-safe.

    `directory` is the run's own, made with mode 0700 when it is missing; `name` is unique in the run; `token` is the
    run's secret, without which nobody is answered. `quota_bytes`, a quarter of what the machine or the container has
    unless it is told, bounds the shared memory of what is under way, and by itself that of weights from other hosts
    which are kept for this one, the memory of messages that have come and nobody receives (those in shared memory count
    for who sent them, while that lives), and of what one peer has yet to take: beyond that the peer is lost.
    `connect_timeout_s` is how long a peer, a service or a channel may take to appear; `tls` secures what crosses hosts.
    With `by_reference` a message
    to another such endpoint of this process is the object itself, and so is an item of a channel whose host and
    consumers are all such; without it the endpoint is as good as in another process. With `allow_pickle` what a peer on
    this host sent as `Pickled` is unpickled here, which lets it run anything. Create it after forking, never before.

    `max_payload_bytes` is the most that one payload may have which a peer sends: a call's tree, an item, a version of
    weights; and items that are put at once, as far as they lie in their message; 32 KiB at least. Of what is longer the
    call, the `get` or, over gRPC, the `put` fails; what comes as bytes, in its message or over gRPC beside it, and is
    more than 64 KiB longer, ends its connection before memory is made for it, as does what is above 4 GiB always.

    Raises ValueError for a name, token, directory or limit that will not do, CommError where a living endpoint has the
    name or the system refuses the directory.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        token: str,
        quota_bytes: int | None = None,
        connect_timeout_s: float = 10.0,
        tls: Tls | None = None,
        by_reference: bool = True,
        allow_pickle: bool = False,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        if max_payload_bytes < INLINE_BYTES:
            raise ValueError(
                f"got max_payload_bytes {max_payload_bytes}, want {INLINE_BYTES} or more: so much may come in a message"
            )
        if quota_bytes is not None and quota_bytes < 0:
            raise ValueError(
                f"got quota_bytes {quota_bytes}, want 0 or more: None is a quarter of the memory that there is"
            )
        self.name = name
        self.directory = Path(directory)
        self._executor = LaneExecutor(_MAX_THREADS, f"{name} handler")
        # Apart: handlers may keep theirs for long, and wait there for what this one brings.
        self._own_executor = LaneExecutor(_MAX_THREADS, f"{name} own")
        self._lost_callbacks: list[Callable[[str], None]] = []
        self._lost: dict[str, int] = {}
        self._fabric = Fabric(
            self.directory,
            Identity(name, token),
            quota_bytes=memory_bytes() // 4 if quota_bytes is None else quota_bytes,
            connect_timeout_s=connect_timeout_s,
            tls=tls,
            by_reference=by_reference,
            allow_pickle=allow_pickle,
            max_payload_bytes=max_payload_bytes,
        )
        self._calls = CallServer(self._executor, self._own_executor, Parking(self._fabric.loop, connect_timeout_s))
        self._host = ChannelHost(Parking(self._fabric.loop, connect_timeout_s))
        self._weights = WeightStore(self._fabric.pool)
        self._reader = WeightReader()
        self._calls.add(SERVICE, self._weights.handle, own=True)
        # What is fetched for the receivers of this host.
        limit_bytes = min(self._fabric.pool.quota_bytes, max_payload_bytes)
        self._copies = Copies(self, self.directory, self._fabric.pool, limit_bytes)
        self._calls.add(_copies.SERVICE, self._copies.handle, prompt=True)
        mailbox = self._fabric.mailbox
        self._calls.add(
            _MAIL, lambda mail: mailbox.deliver(mail.peer, mail.method, mail.args, mail.held_bytes), prompt=True
        )
        self._fabric.start(
            {
                Kind.CALL: self._calls.on_call,
                Kind.CHANNEL: self._host.on_request,
                Kind.CANCEL: self._host.on_cancel,
            },
            on_prompt_call=self._calls.on_prompt_call,
            on_gone=self._on_gone,
            consumers_of=self._host.consumers_of,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Where ends are.

    @property
    def address(self) -> Address:
        """Where this endpoint is: `route(a.address, a.address_of("b"), payload)` is how what it sends to b goes."""
        return self._fabric.here

    def address_of(self, peer: str) -> Address:
        """Returns where a peer is as this endpoint reaches it, or would. Does not block.

        It has this endpoint's address where objects themselves are handed over, its host where memory is shared.
        """
        return self._fabric.where(peer)

    # Across hosts.

    def listen(self, address: str) -> str:
        """Listens over gRPC as well, at "host:port" (port 0 takes a free one) or "unix:path"; returns the address.

        Every call must bring the run's token, and with `tls` a certificate. A peer that knows the address is called
        back over the connection that it makes. Of several addresses all stay. Raises ValueError for what is no such
        address, CommError where it cannot bind, as where another listens, or is closed. Blocks until it listens.
        """
        return self._fabric.listen(address)

    def add_address(self, peer: str, address: str) -> None:
        """Reaches a peer over gRPC at an address, instead of a socket in this host's directory. Does not block.

        Without an address it is in the directory again. What is connected already stays so. This endpoint's own address
        is not used: it reaches itself within its process. Raises ValueError for what is no address.
        """
        self._fabric.add_address(peer, address)

    # Memory.

    def empty(self, shape: Shape, dtype: npt.DTypeLike, *, timeout_s: float | None = None) -> npt.NDArray[Any]:
        """Returns an uninitialized array in shared memory, to be filled and then read in place, without a copy.

        So it is where this endpoint puts, sends or returns it to another process of the host, in a payload of more than
        32 KiB, as the last array of its tree (no tensor, numpy scalar, `Pickled`, or str or bytes above 1 KiB follows),
        all the rest of which takes at most 4 KiB. It is read-only from the first such put on, also one that is refused;
        a view or a tensor of it is not, and must not be written any more. It is copied like any other otherwise, and
        while it has a reader: of a broadcast, for all peers but the first.

        Its memory is taken at once and counts against the quota for as long as anyone refers to it, and what must be
        copied needs room beside it: let go of one before you ask for the next.

        Blocks while the quota is used up, and is no call for a callback or a prompt handler (CommError). Raises
        TimeoutError_ after `timeout_s` seconds, CommError for more than the quota, PayloadError for a dtype that does
        not travel, ValueError or TypeError for what is no shape or dtype.
        """
        self._fabric.check_open()
        self._fabric.check_may_wait("empty")
        deadline = Deadline(timeout_s)
        try:
            return self._fabric.blanks.empty(shape, dtype, deadline)
        except TimeoutError as error:
            if not deadline.ended(error):
                raise
            raise deadline.timed_out("empty", str(error)) from error

    # Calls.

    def handle(self, service: str, handler: Handler, *, prompt: bool = False) -> None:
        """Answers the calls of a service with `handler(Request) -> tree`, from now on.

        Handlers run on eight threads, never the io thread; those of one peer and service run one at a time, in the
        order sent. While eight of them wait or work, no other begins: one that must wait returns a
        concurrent.futures.Future instead, whose result, or error, is the answer.
        Whatever a handler raises is its caller's RemoteError, SystemExit too.
        A `prompt` handler never waits and answers with little: it runs as the io thread or in its place, which costs
        less, and must bear being run on several threads at once.
        Calls that came earlier wait for it, for as long as a peer may take to appear. Raises ValueError for a service
        that has a handler. Blocks for the io thread.
        """
        self._fabric.check_open()
        self._on_io_thread(lambda: self._calls.add(service, handler, prompt=prompt))

    def request(
        self, peer: str, service: str, method: str, args: Tree = None, *, timeout_s: float | None = None
    ) -> Tree:
        """Calls a method of a peer's service and returns its answer. Blocks until then.

        Raises RemoteError with what the handler raised, PeerLostError when the peer dies or does not appear,
        TimeoutError_ after `timeout_s` seconds, in which it waits for shared memory too, and for the peer to take what
        was sent before, PayloadError for args that cannot be encoded, ValueError for a service or method that is no str
        or a peer whose name cannot be one.
        """
        self._fabric.check_may_wait(f"request {service}.{method}")
        deadline = Deadline(timeout_s)
        connection, reply = self._call(peer, service, method, args, deadline)
        try:
            body = reply.result(deadline.left_s)
        except BaseException as error:
            # The time is over, the peer is lost, or a signal's handler has raised this.
            reply.add_done_callback(partial(_discard, connection))
            if deadline.ended(error):
                raise deadline.timed_out(f"{service}.{method}", peer) from None
            raise
        return read_answer(connection, body)

    def request_async(
        self, peer: str, service: str, method: str, args: Tree = None, *, timeout_s: float | None = None
    ) -> "Future[Tree]":
        """Like `request`, returning the future of the answer; its callbacks must not block.

        Blocks for the copy of what is large, while 8 MiB are on their way to the peer, unless in a callback, and while
        the quota of shared memory is used up: in a callback it raises TimeoutError_ instead, as the memory would not
        come back meanwhile. `timeout_s` bounds what it blocks for, not how long the future may take: after so many
        seconds it raises TimeoutError_, and nothing is asked.
        """
        return self._request_async(peer, service, method, args, Deadline(timeout_s))

    def _request_async(self, peer: str, service: str, method: str, args: Tree, deadline: Deadline) -> "Future[Tree]":
        connection, reply = self._call(peer, service, method, args, deadline)
        reply.ask()
        result: Answer[Tree] = Answer()
        result.link = connection.link

        def resolve(body: bytes) -> None:
            if not result.set_running_or_notify_cancel():
                _open_answer(connection, body)
                return
            try:
                tree = read_answer(connection, body)
            except Exception as error:
                # Without its frames: among them are those of a thread that reads the link, which may hold memory.
                result.set_exception(error.with_traceback(None))
            else:
                result.set_result(tree)

        def done(answered: Reply) -> None:
            error = answered.error()
            if error is not None:
                if result.set_running_or_notify_cancel():
                    result.set_exception(error)
            elif len(answered.result()) <= INLINE_BYTES:
                resolve(answered.result())
            else:
                # Decoding what is long is no work for the io thread.
                self._own_executor.submit((connection, "answers"), partial(resolve, answered.result()))

        reply.add_done_callback(done)
        return result

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Calls `callback(peer)` once for each peer that dies while connected to this endpoint, on a thread beside the
        handlers', which the endpoint needs back soon: weights and long answers wait for one of eight too.

        A peer that closes its endpoint in good order is not lost. A restarted peer that dies again is lost again. Does
        not block.
        """
        self._lost_callbacks.append(callback)

    def _call(self, peer: str, service: str, method: str, args: Tree, deadline: Deadline) -> tuple[Connection, Reply]:
        encoded = encode(args)
        connection = self._fabric.connection(peer)
        if not connection.wait_for_room(deadline):
            raise deadline.timed_out(_name(service, method), peer)
        for_memory = Deadline(0.0) if self._fabric.loop.inside() else deadline
        try:
            payload = connection.pack(encoded, for_memory)
        except TimeoutError as error:
            if not for_memory.ended(error):
                raise
            raise deadline.timed_out(_name(service, method), str(error)) from error
        try:
            request = comm_pb2.CallRequest(service=service, method=method, args=message_of(payload))
        except (TypeError, ValueError) as error:
            connection.take_back([payload])
            raise ValueError(f"got {service!r} and {method!r} for {peer!r}, want two strs: {error}") from error
        return connection, connection.call(Kind.CALL, request.SerializeToString())[1]

    def _on_gone(self, connection: Connection, lost: bool) -> None:
        self._host.on_gone(connection)
        self._calls.on_gone(connection)
        # After what it asked before, which is dealt with in this order.
        self._own_executor.submit((connection, SERVICE), partial(self._weights.on_gone, connection.session))
        if not lost or self._lost.get(connection.peer) == connection.incarnation:
            return
        self._lost[connection.peer] = connection.incarnation
        for callback in self._lost_callbacks:
            self._own_executor.submit(("lost", callback), partial(callback, connection.peer))

    # Messages.

    def isend(self, peer: str, tree: Tree, *, tag: str = "", timeout_s: float | None = None) -> "Future[None]":
        """Sends a tree to a peer; the future is done when the peer has received it. Blocks as `request_async` does,
        for `timeout_s` seconds at most.

        Within one process the tree itself is handed over: the sender must not change it afterwards. The future fails
        with PeerLostError, or with CommError where the peer has its quota of messages that it does not receive;
        PayloadError is raised at once for what cannot be encoded.
        """
        return self._isend(peer, tree, tag, Deadline(timeout_s))

    def _isend(self, peer: str, tree: Tree, tag: str, deadline: Deadline) -> "Future[None]":
        local = self._fabric.by_reference(peer)
        if local is not None:
            return local.mailbox.deliver(self.name, tag, tree) or _taken()
        return self._request_async(peer, _MAIL, tag, tree, deadline)

    def irecv(self, peer: str, *, tag: str = "") -> "Future[Tree]":
        """Returns the future of a peer's next tree with a tag, in the order sent. Cancelled, it takes none.

        The future fails with PeerLostError when the peer dies first. Does not block.
        """
        check_name(peer)
        future = self._fabric.mailbox.receive(peer, tag)
        if not future.done():
            future.link = self._fabric.link_from(peer)
        return future

    def send(self, peer: str, tree: Tree, *, tag: str = "", timeout_s: float | None = None) -> None:
        """Like `isend`, blocking until the peer has it. Raises PeerLostError, and TimeoutError_ after `timeout_s`."""
        self._fabric.check_may_wait(f"send {tag}")
        deadline = Deadline(timeout_s)
        sent = self._isend(peer, tree, tag, deadline)
        Handle(f"send {tag}", [(peer, sent)], lambda _: None, deadline).wait()

    def recv(self, peer: str, *, tag: str = "", timeout_s: float | None = None) -> Tree:
        """Like `irecv`, blocking for the tree. Raises PeerLostError, and TimeoutError_ after `timeout_s` seconds."""
        self._fabric.check_may_wait(f"recv {tag}")
        future = self.irecv(peer, tag=tag)
        try:
            return Handle(f"recv {tag}", [(peer, future)], lambda got: got[0], Deadline(timeout_s)).wait()
        except TimeoutError_:
            if future.cancel():
                raise
            return future.result()
        except BaseException:
            # A KeyboardInterrupt: what comes is for who asks next.
            future.cancel()
            raise

    # Channels.

    def host_channel(
        self,
        name: str,
        *,
        capacity: int = 0,
        producers: Sequence[str],
        consumers: Sequence[str],
        route: Literal["any", "by_key"] = "any",
    ) -> None:
        """Hosts a channel's index here. `producers` and `consumers` are the endpoints that may put and get.

        `capacity` bounds the items that wait to be taken; 0 is no bound. With `route="by_key"` every key has one
        consumer; while that is dead or has left, another stands in for it. Raises ValueError for a channel's name that
        is hosted, an endpoint's name that none can have and a capacity that is no int. Blocks for the io thread.
        """
        self._fabric.check_open()
        for member in (*producers, *consumers):
            check_name(member)
        index = ChannelIndex(name, capacity=capacity, producers=producers, consumers=consumers, route=route)
        self._on_io_thread(lambda: self._host.add(index))

    def announce_successor(self, name: str, *, lost: str, successor: str) -> None:
        """Lets the consumers of a channel hosted here wait for `successor` in place of a producer that dies or died.

        From now on what the successor puts, ends and closes counts for what `lost` owed too, and goes on from there: an
        iteration that was ended stays so. Raises ValueError for a channel that is not hosted here or has no such
        producer. Blocks for the io thread.
        """
        check_name(successor)
        self._on_io_thread(lambda: self._host.index(name).announce_successor(lost, successor))

    def drop_channel(self, name: str) -> None:
        """Ends a channel hosted here and forgets it: what is queued is dropped, those waiting are told it is closed.

        Does nothing for a channel that is not hosted here. Blocks for the io thread.
        """
        self._on_io_thread(lambda: self._host.remove(name))

    def channel(self, name: str, *, host: str, device: str | None = None) -> Channel:
        """Returns a client of a channel that the endpoint `host` hosts. Does not block, nor check that it does.

        Items from a GPU wait in pinned host memory until they are taken, and are tensors there when they are read
        unless `device`, such as "cuda:0", says where this client wants its tensors. Items that are handed over within
        one process stay where they are.
        """
        fabric = self._fabric
        return Channel(name, host, fabric.connection, fabric.stays_here, fabric.check_may_wait, device)

    def _on_io_thread(self, call: Callable[[], _T]) -> _T:
        if self._fabric.loop.works():
            return call()
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self._fabric.loop.work(run)
        return done.result()

    # Weights.

    def stage_weights(
        self, name: str, version: int, weights: Mapping[str, Tree], *, timeout_s: float | None = None
    ) -> StagedWeights:
        """Writes a version of named tensors to shared memory, once, for any number of readers.

        `weights` maps names to numpy arrays or tensors of any shape and dtype, or to `Shard`s of larger ones. It takes
        the place of the version before, whose memory is used again unless a reader holds an array of it. That version
        is readable beside it for as long as a reader is in the midst of it, or a receiver of another host has it as the
        base of its next changes, if the quota has room for both; else it is withdrawn, and they are waited for.

        Blocks for the digests, the copy and, while the quota is used up, for readers to let go. Raises ValueError for a
        version that is no int from 0 or not newer than the last, PayloadError for what is no array, CommError for
        weights that do not fit into the quota beside those of other names, and TimeoutError_ after `timeout_s` seconds:
        then the version before may be withdrawn, and the next to be staged is the next to be had.
        """
        self._fabric.check_open()
        return self._weights.stage(name, version, weights, timeout_s=timeout_s)

    def offer_weights(self, name: str, version: int, weights: Mapping[str, Tree]) -> None:
        """Offers a version where it is, to receivers that stream it (`WeightReceiver.stream`). Does not block.

        `weights` is as in `stage_weights`, and must stay as it is until it is released or this endpoint is closed.
        """
        self._fabric.check_open()
        self._weights.offer(name, version, weights)

    def fetch_weights(
        self, source: str, name: str, version: int, *, timeout_s: float | None = None
    ) -> Mapping[str, Tree]:
        """Returns a version's tensors, of this host in place, for reading only. Blocks until `source` has staged it.

        They stay as they are for as long as any of them is kept. All digests are checked the first time, one in eight
        later. Raises PayloadError for a digest that differs, RemoteError for a version that is withdrawn, naming those
        that are there, or only offered, PeerLostError when the source dies, TimeoutError_ after `timeout_s` seconds.
        """
        deadline = Deadline(timeout_s)
        if not is_near(self, source):
            receiver, weights = self.weight_receiver(name, sources=[source]), dict[str, Tree]()
            receiver.prepare(version, timeout_s=timeout_s)
            receiver.commit(weights.update)
            return weights
        asked = (name, version, next(reader_numbers))

        def ask() -> Tree:
            return self.request(source, SERVICE, "digests", asked, timeout_s=deadline.left_s)

        try:
            answer = self.request(source, SERVICE, "fetch", asked, timeout_s=deadline.left_s)
            return dict(self._reader.check(source, name, version, answer, ask))
        finally:
            # It is neither awaited nor read any more.
            with contextlib.suppress(CommError):
                self.request_async(source, SERVICE, "done", asked, timeout_s=0.0)

    def newest_weights(self, source: str, name: str, *, timeout_s: float | None = None) -> int:
        """Returns the newest version that `source` has staged under a name, -1 where there is none; or the one that it
        is staging, once the one before has made way for it: to fetch that is to wait for it.

        Blocks for the answer. Raises PeerLostError when the source dies, TimeoutError_ after `timeout_s` seconds.
        """
        newest: int = self.request(source, SERVICE, "newest", (name,), timeout_s=timeout_s)
        return newest

    def weight_receiver(
        self,
        name: str,
        *,
        sources: Sequence[str],
        wanted: Mapping[str, Box] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_source: int = 0,
        delta: bool = False,
    ) -> WeightReceiver:
        """Returns this rank's receiver of weights that `sources` stage, each its own shards. Does not block.

        `wanted` maps names to the boxes it wants; None is every tensor, whole. `bucket_bytes` is how much is loaded at
        a time, half of it by `stream`, in whole wanted parts: one that is larger is a bucket of its own, so the largest
        of them bounds what a bucket costs. `first_source` says which source is asked first where several have the same
        part: give receivers different ones, but those of one host the same where the sources are on others. What they
        want of such a source comes once, into memory that they share. With `delta` sources on other hosts send only the
        elements that changed since the version prepared before, to the bit; that version is kept here, and at the
        source while it has room for two. Raises ValueError where there are no sources.
        """
        return WeightReceiver(
            self._copies,
            name,
            sources=sources,
            wanted=wanted,
            bucket_bytes=bucket_bytes,
            first_source=first_source,
            delta=delta,
        )

    def release_weights(self, name: str, version: int) -> None:
        """Withdraws a version that is staged or offered; readers keep what they hold. Does not block.

        Raises ValueError for one that is neither.
        """
        self._weights.release(name, version)

    def close(self) -> None:
        """Says goodbye to all peers and frees threads, sockets and memory; may be called twice.

        Blocks until the goodbyes are sent, at most a second a peer, and until gRPC has ended where it was used: some
        seconds where a peer has stopped. Does nothing in a forked child.
        """
        if self._fabric.abandoned:
            return
        self._fabric.close()
        self._executor.close()
        self._own_executor.close()
        self._weights.close()
        self._copies.close()
        self._host.close()


def _name(service: str, method: str) -> str:
    """Returns what errors name a call by."""
    return f"send {method}" if service == _MAIL else f"{service}.{method}"


def _taken() -> "Future[None]":
    """Returns the future of a message that its receiver has."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _discard(connection: Connection, done: Reply) -> None:
    if done.error() is None:
        _open_answer(connection, done.result())


def _open_answer(connection: Connection, body: bytes) -> None:
    """Opens an answer that nobody reads, so that its memory goes back."""
    # What cannot be opened has gone back by itself.
    with contextlib.suppress(CommError):
        connection.open(packed_of(comm_pb2.CallResponse.FromString(body).result))
