"""The connections of one endpoint: dialled by name, accepted, greeted, and lost.

Peers are dialled on first use; frames sent meanwhile go out after the hello. Exactly one end of each failure is here:
a socket that closes without a goodbye is a death, reported once for each life of a peer.
"""

import contextlib
import importlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from m2flow.comm import _handshake
from m2flow.comm._blanks import Blanks
from m2flow.comm._connection import Connection, Link
from m2flow.comm._frames import Kind, ProtocolError
from m2flow.comm._handshake import Identity
from m2flow.comm._local import LocalLink
from m2flow.comm._loop import READ, Loop
from m2flow.comm._mailbox import Mailbox
from m2flow.comm._mappings import Released
from m2flow.comm._segments import Pool
from m2flow.comm._sockets import SocketDirectory, check_name
from m2flow.comm._unix import UnixLink
from m2flow.comm.errors import CommError, PeerLostError, system_refuses
from m2flow.comm.routing import Address, Backend, route
from m2flow.comm.tls import Tls

if TYPE_CHECKING:
    from m2flow.comm._grpc import GrpcLink, Streams

_HELLO_TIMEOUT_S = 5.0
_REDIAL_S = 0.01
_REACCEPT_S = 0.1
_GOODBYE_TIMEOUT_S = 1.0

_log = logging.getLogger("m2flow.comm")

_AnyLink = TypeVar("_AnyLink", bound=Link)
OnFrame = Callable[[Connection, int, bytes], None]
OnPromptCall = Callable[[Connection, int, bytes], bool]
OnGone = Callable[[Connection, bool], None]

# The endpoints of this process by run, which is a directory and a token, and by name. One that hands nothing over by
# reference is alone, under its name.
_living: "dict[tuple[int, int, str, str], dict[str, Fabric]]" = {}
# Held while one comes or goes, and while one is connected to another: both might do that at once.
_meeting = threading.Lock()


class Fabric:
    """Connections by peer name."""

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        *,
        quota_bytes: int,
        connect_timeout_s: float,
        tls: Tls | None,
        by_reference: bool,
        allow_pickle: bool,
        max_payload_bytes: int,
    ) -> None:
        # First what may be refused.
        self._directory = SocketDirectory(directory)
        try:
            self._listener, self._inode = self._directory.listen(identity.name)
        except BaseException:
            self._directory.close()
            raise
        self.identity = identity
        self.here = Address(os.uname().nodename, f"process {os.getpid()}")
        self._by_reference = by_reference
        try:
            self.loop = Loop(identity.name, before_sleep=self._send_releases)
        except OSError as error:
            self._leave_directory()
            raise system_refuses(f"make endpoint {identity.name!r}", error) from error
        self.pool = Pool(quota_bytes, on_retire=self._retire, readers=self._readers)
        self.released = Released(self.loop.wake)
        self.blanks = Blanks(self.pool, self.released)
        self.mailbox = Mailbox(quota_bytes)
        self._new_connection = partial(
            Connection,
            pool=self.pool,
            blanks=self.blanks,
            released=self.released,
            on_segment_gone=self._retire,
            loop=self.loop,
            allow_pickle=allow_pickle,
            max_payload_bytes=max_payload_bytes,
        )
        self._connect_timeout_s = connect_timeout_s
        # The gRPC side: names and addresses of peers on other hosts, and the streams once they are needed.
        self._addresses: dict[str, str] = {}
        self._tls = tls
        self._streams: Streams | None = None
        # Given when it starts.
        self._on_frame: dict[Kind, OnFrame]
        self._on_prompt_call: OnPromptCall
        self._on_gone: OnGone
        self._consumers_of: Callable[[str], Set[str]]
        self._dialled: dict[str, Connection] = {}
        self._accepted: dict[str, Connection] = {}
        self._all: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False
        # This is a forked child, and all that is here is its parent's.
        self.abandoned = False
        self._run = (*self._directory.identity, identity.token, "" if by_reference else identity.name)
        self._living: dict[str, Fabric] = {}

    def start(
        self,
        on_frame: dict[Kind, OnFrame],
        *,
        on_prompt_call: OnPromptCall,
        on_gone: OnGone,
        consumers_of: Callable[[str], Set[str]],
    ) -> None:
        """Begins to accept and to answer: `on_frame` maps kinds of frames to what handles them.

        That runs as the io thread or in its place. A CALL that a waiting thread reads is offered to `on_prompt_call`
        first, which says whether it has handled it. `on_gone(connection, lost)` hears of the end of each connection
        whose other end was believed; `consumers_of` names the consumers of a channel that is hosted here.
        """
        self._on_frame, self._on_prompt_call = on_frame, on_prompt_call
        self._on_gone, self._consumers_of = on_gone, consumers_of
        self.loop.watch(self._listener.fileno(), READ, self._accept)
        with _meeting:
            self._living = _living.setdefault(self._run, {})
            self._living[self.identity.name] = self
        self.loop.start()

    def connection(self, peer: str) -> Connection:
        """Returns the connection to a peer, dialling when there is none. Does not wait for the peer."""
        known = self._known(peer)
        if known is not None:
            return known
        check_name(peer)
        other = self.in_this_process(peer)
        if other is not None and self._backend_to(peer) != "grpc":
            joined = self._join(other)
            if joined is not None:
                return joined
        with self._lock:
            known = self._known(peer)
            if known is not None:
                return known
            if self._backend_to(peer) == "grpc":
                connection, stream = self._new(peer, self._grpc_link)
                assert self._streams is not None
                dial = partial(self._streams.dial, self._addresses[peer], stream)
            else:
                connection, link = self._new(peer, UnixLink)
                # As the io thread: a KeyboardInterrupt would leave a connection that nobody dials.
                dial = partial(self.loop.call, partial(self._dial, connection, link, time.monotonic()))
            # Before any other thread finds the connection: nothing may go out ahead of the hello.
            connection.send(Kind.HELLO, 0, self.identity.hello())
            self._dialled[peer] = connection
            self._all.add(connection)
        dial()
        return connection

    def _known(self, peer: str) -> Connection | None:
        self.check_open()
        # What a restarted peer has dialled is found here once the connection of its earlier life has ended.
        return self._dialled.get(peer) or self._accepted.get(peer)

    def check_open(self) -> None:
        """Raises CommError where this endpoint is closed, or its parent's in a forked child."""
        if self.abandoned:
            raise CommError(f"endpoint {self.identity.name!r} is the parent process's: make one after the fork")
        if self._closed:
            raise CommError(f"endpoint {self.identity.name!r} is closed")

    def _join(self, other: "Fabric") -> Connection | None:
        """Returns the connection to an endpoint of this process, making both its ends; None where that one closes."""
        names = self.identity.name, other.identity.name
        with _meeting:
            known = self._known(names[1])
            if known is not None:
                return known
            (near, link), (far, its_link) = self._new(names[1], _local_link), other._new(names[0], _local_link)
            link.join(its_link)
            self._meet(near, other.identity.hello())
            other._meet(far, self.identity.hello())
            if not other._enter(far, other._accepted):
                return None
            if not self._enter(near, self._dialled):
                link.close()
                raise CommError(f"endpoint {names[0]!r} is closed")
            return near

    def _enter(self, connection: Connection, by_name: dict[str, Connection]) -> bool:
        """Keeps a connection; says whether this endpoint is there to do so."""
        with self._lock:
            if not self._closed:
                by_name[connection.peer] = connection
                self._all.add(connection)
            return not self._closed

    def check_may_wait(self, call: str) -> None:
        """Raises CommError where the caller deals with frames: what it waits for could not come."""
        if self.loop.inside():
            raise CommError(
                f"{call}: called as the io thread or in its place, as callbacks are, which must not wait: "
                "call it elsewhere"
            )

    def link_from(self, peer: str) -> Link:
        """Returns the link that a peer's own frames come by: the one that it dialled, where both have dialled."""
        connection = self._accepted.get(peer)
        return self.connection(peer).link if connection is None else connection.link

    def add_address(self, peer: str, address: str) -> None:
        """Dials a peer over gRPC at an address from now on, or with none through this host's directory again."""
        check_name(peer)
        if peer == self.identity.name:
            # It is here, wherever others find it.
            return
        # Once closed it dials nobody.
        if address and not self._closed:
            self._remote().check_address(address)
        with self._lock:
            if address:
                self._addresses[peer] = address
            else:
                self._addresses.pop(peer, None)

    def listen(self, address: str) -> str:
        """Listens over gRPC too; returns the address bound."""
        self.check_open()
        return self._remote().listen(address, self._accept_stream)

    def in_this_process(self, peer: str) -> "Fabric | None":
        """Returns a peer of the same run in this process, if both hand objects over, or this very endpoint."""
        found = self._living.get(peer)
        return None if found is None or found._closed else found

    def where(self, peer: str) -> Address:
        """Returns a peer's address, as far as it is known: by its connection, or by how it would be reached.

        Whose link passes no descriptors is on another host.
        """
        known = self._dialled.get(peer) or self._accepted.get(peer)
        if peer in self._addresses if known is None else not known.link.passes_fds:
            return Address(self._addresses.get(peer, f"host of {peer}"), peer)
        if self._by_reference and self.in_this_process(peer) is not None:
            return self.here
        return Address(self.here.host, peer)

    def _backend_to(self, peer: str) -> Backend:
        return route(self.here, self.where(peer), "cpu").backend

    def by_reference(self, peer: str) -> "Fabric | None":
        """Returns a peer of this process to which objects are handed over as they are; None for any other."""
        found = self._living.get(peer)
        return found if found is not None and self._backend_to(peer) == "reference" else None

    def stays_here(self, channel: str, host: str) -> bool:
        """Says whether what is put into a channel need not leave this process: its host and all consumers are in it."""
        hosting = self.by_reference(host)
        if hosting is None:
            return False
        consumers = hosting._consumers_of(channel)
        return bool(consumers) and consumers <= self._living.keys()

    def close(self) -> None:
        """Says goodbye to all peers and frees sockets, thread and memory. Blocks for at most a second a peer."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # Those at whose other end our hello comes first.
            connections = {*self._dialled.values(), *self._accepted.values()}
        self._go()
        for connection in connections:
            connection.send(Kind.GOODBYE, 0, b"")
        for connection in connections:
            # Another endpoint of this process deals with it in its own time.
            if connection.greeted and not connection.within:
                connection.link.wait_sent(_GOODBYE_TIMEOUT_S, 0)
        self.loop.call(self._shut)
        self.loop.stop()
        if self._streams is not None:
            self._streams.close()
        self.pool.trim()

    def _go(self) -> None:
        with _meeting:
            if self._living.get(self.identity.name) is self:
                del self._living[self.identity.name]
            if not self._living:
                _living.pop(self._run, None)

    # Dialling and accepting.

    def _new(self, peer: str, make_link: Callable[..., _AnyLink]) -> tuple[Connection, _AnyLink]:
        connection = self._new_connection(peer)
        connection.link = link = make_link(
            self.loop,
            on_frame=partial(self._frame, connection),
            take=partial(self._take, connection),
            on_closed=partial(self._gone, connection),
        )
        return connection, link

    def _grpc_link(self, loop: Loop, *, on_frame: Any, take: Any, on_closed: Any) -> "GrpcLink":
        """The io thread deals with all that comes over gRPC."""
        assert self._streams is not None
        return self._streams.link(on_frame=on_frame, on_closed=on_closed)

    def _remote(self) -> "Streams":
        """Returns the gRPC side, which is imported and started when it is first needed."""
        with self._lock:
            if self._streams is None:
                name, token = self.identity.name, self.identity.token
                try:
                    remote = importlib.import_module("m2flow.comm._grpc")
                    self._streams = remote.Streams(name, self.loop, token, self._connect_timeout_s, self._tls)
                except OSError as error:
                    raise system_refuses("start gRPC", error) from error
            return self._streams

    def _accept_stream(self) -> "GrpcLink":
        with self._lock:
            connection, link = self._new("", self._grpc_link)
            self._all.add(connection)
        self._await_hello(connection)
        return link

    def _dial(self, connection: Connection, link: UnixLink, since: float) -> None:
        try:
            connected = self._directory.connect(connection.peer)
        except (FileNotFoundError, BlockingIOError):
            waited = time.monotonic() - since
            if waited > self._connect_timeout_s:
                self.loop.call(partial(link.fail, f"no endpoint of this name appeared within {waited:.1f} s"))
            elif not self._closed:
                self.loop.call_later(_REDIAL_S, partial(self._dial, connection, link, since))
        except ConnectionRefusedError as error:
            self.loop.call(partial(link.fail, f"nobody listens at its socket any more ({error})"))
        except OSError as error:
            # The peer may be well.
            self.loop.call(partial(link.fail, system_refuses(f"connect to {connection.peer!r}", error)))
        else:
            link.attach(connected)

    def _accept(self, events: int) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: the caller waits in the backlog, and the io thread must not spin on it.
            _log.warning("endpoint %s cannot accept: %s", self.identity.name, error)
            self.loop.remove(self._listener.fileno())
            self.loop.call_later(_REACCEPT_S, self._accept_again)
            return
        with self._lock:
            connection, link = self._new("", UnixLink)
            self._all.add(connection)
        link.attach(accepted)
        self._await_hello(connection)

    def _accept_again(self) -> None:
        if not self._closed:
            self.loop.watch(self._listener.fileno(), READ, self._accept)

    def _await_hello(self, connection: Connection) -> None:
        self.loop.call_later(_HELLO_TIMEOUT_S, partial(self._expect_hello, weakref.ref(connection)))

    def _expect_hello(self, reference: "weakref.ref[Connection]") -> None:
        connection = reference()
        if connection is not None and not connection.greeted:
            connection.link.fail(f"it said no hello within {_HELLO_TIMEOUT_S} s")

    # Frames.

    def _take(self, connection: Connection, kind: Kind, request_id: int, body: bytes, fd: int | None) -> bool:
        """Deals with a frame that any thread may deal with; says whether it did."""
        try:
            if kind is Kind.REPLY:
                connection.answered(request_id, body)
            elif kind is Kind.CALL:
                return self._on_prompt_call(connection, request_id, body)
            elif kind is Kind.SEGMENT:
                assert fd is not None
                connection.on_segment(body, fd)
            elif kind is Kind.DATA:
                connection.on_data(request_id, body)
            elif kind is Kind.RELEASE:
                connection.on_release(body)
            else:
                return False
        except CommError:
            raise
        except Exception as error:
            raise _end_of_link(kind, error) from error
        return True

    def _frame(self, connection: Connection, kind: Kind, request_id: int, body: bytes, fd: int | None) -> None:
        try:
            if not connection.greeted:
                self._first_frame(connection, kind, body)
            elif (handler := self._on_frame.get(kind)) is not None:
                handler(connection, request_id, body)
            elif self._take(connection, kind, request_id, body, fd):
                pass
            elif kind is Kind.RETIRE:
                connection.on_retire(body)
            elif kind is Kind.GOODBYE:
                connection.left = True
                connection.link.fail("it closed its endpoint")
            else:
                raise ProtocolError(f"got a {kind.name} frame in mid-conversation")
        except CommError:
            raise
        except Exception as error:
            raise _end_of_link(kind, error) from error

    def _first_frame(self, connection: Connection, kind: Kind, body: bytes) -> None:
        if kind is Kind.REFUSAL:
            connection.lose(_handshake.refused(connection, body))
            raise ProtocolError("the other end refused")
        if kind is not Kind.HELLO:
            self.identity.refuse(connection, f"its first frame is a {kind.name}, want a HELLO")
        was_accepted = not connection.peer
        self._meet(connection, body)
        if was_accepted:
            connection.send(Kind.HELLO, 0, self.identity.hello())
            with self._lock:
                self._accepted[connection.peer] = connection
                dialled = self._dialled.get(connection.peer)
                closing = self._closed
            if closing:
                # It came too late for `close` to take its leave.
                connection.send(Kind.GOODBYE, 0, b"")
            if dialled is not None and dialled.link.passes_fds and not (connection.link.passes_fds or dialled.greeted):
                # Looked for on this host, it has come from another.
                dialled.link.fail("it connected from another host meanwhile: call it again")

    def _meet(self, connection: Connection, hello: bytes) -> None:
        self.identity.greet(connection, hello)
        connection.within = connection.link.passes_fds and self.in_this_process(connection.peer) is not None

    # Endings.

    def _gone(self, connection: Connection, reason: str | CommError) -> None:
        with self._lock:
            self._all.discard(connection)
            for by_name in (self._dialled, self._accepted):
                if by_name.get(connection.peer) is connection:
                    del by_name[connection.peer]
            never_met = not connection.greeted and connection.peer in self._accepted
        error = PeerLostError(connection.peer, reason) if isinstance(reason, str) else reason
        lost = self._was_closed() if self._closed else error
        connection.lose(lost)
        if not never_met:
            self.mailbox.fail(connection.peer, lost)
        if connection.greeted:
            # Peers hang up on an endpoint that has said goodbye: what ends then is no death either.
            self._on_gone(connection, not connection.left and not self._closed)

    def _shut(self) -> None:
        with self._lock:
            connections, self._all = self._all, set()
            self._dialled.clear()
            self._accepted.clear()
        for connection in connections:
            connection.link.close()
            closed = self._was_closed()
            connection.lose(closed)
            self.mailbox.fail(connection.peer, closed)
        self.mailbox.close(PeerLostError(self.identity.name, "it closed its endpoint"))
        self.loop.remove(self._listener.fileno())
        self._leave_directory()

    def _leave_directory(self) -> None:
        self._listener.close()
        self._directory.unlink(self.identity.name, self._inode)
        self._directory.close()

    def _was_closed(self) -> CommError:
        return CommError(f"endpoint {self.identity.name!r} was closed")

    def _abandon(self) -> None:
        """In a forked child: drops the copies of the parent's sockets, whose closing must tell of its death."""
        self.abandoned = self._closed = True
        self.pool.abandon()
        self.loop.abandon()
        self._listener.close()
        for connection in self._all:
            connection.link.abandon()

    # Memory.

    def _readers(self) -> set[str]:
        """Returns the peers that were lent shared memory of this process; takes no lock: the caller has the pool's."""
        return {connection.peer for connection in list(self._all) if connection.lends}

    def _send_releases(self) -> None:
        if self.released:
            for lender, blocks in self.released.drain().items():
                lender.release(blocks)

    def _retire(self, segment_id: int) -> None:
        self.loop.call(partial(self._retire_now, segment_id))

    def _retire_now(self, segment_id: int) -> None:
        with self._lock:
            connections = list(self._all)
        for connection in connections:
            connection.retire(segment_id)


def _end_of_link(kind: Kind, error: Exception) -> CommError:
    """Returns why a link ends for a frame that cannot be dealt with: nobody may wait for its answer in vain."""
    if isinstance(error, DecodeError):
        return ProtocolError(f"got a {kind.name} frame that is no message: {error}")
    # Our own defect, which nobody may miss.
    _log.error("m2flow.comm: a %s frame was not dealt with", kind.name, exc_info=error)
    return CommError(f"this end failed to deal with a {kind.name} frame: {error!r}")


def _local_link(loop: Loop, *, on_frame: Any, take: Any, on_closed: Any) -> LocalLink:
    """Nothing is read: whoever is at work deals with all that comes."""
    return LocalLink(loop, on_frame=on_frame, on_closed=on_closed)


def _abandon_all() -> None:
    global _meeting
    _meeting = threading.Lock()
    for fabric in [fabric for run in _living.values() for fabric in run.values()]:
        with contextlib.suppress(OSError):
            fabric._abandon()
    _living.clear()


os.register_at_fork(after_in_child=_abandon_all)
