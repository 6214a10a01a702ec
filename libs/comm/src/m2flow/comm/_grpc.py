"""Links across hosts: the frames of a connection as one gRPC stream, over TCP or a Unix socket.

gRPC is imported when an endpoint first listens or dials so, and never otherwise. All streams of an endpoint share one
thread with an event loop; frames are handed to the endpoint's io thread, a few chunks ahead at most.
"""

import asyncio
import contextlib
import logging
import re
import socket
import threading
from collections import deque
from collections.abc import AsyncIterable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.internal import encoder

from m2flow.comm._frames import MAX_HELLO_BYTES, FrameParser, Kind, header
from m2flow.comm._handshake import VERSION
from m2flow.comm._loop import Loop
from m2flow.comm._replies import Awaited, nothing
from m2flow.comm.errors import CommError
from m2flow.comm.grpc_options import DIRECT
from m2flow.comm.tls import Tls
from m2flow.comm.token import TOKEN_KEY, same_token
from m2flow.proto.comm.v1 import comm_pb2

_log = logging.getLogger("m2flow.comm")

METHOD = "/m2flow.proto.comm.v1.ChannelService/Exchange"
CHUNK_BYTES = 1 << 20
# Chunks read from the network before the io thread has dealt with the first of them.
_READ_AHEAD = 8
_GOODBYE_TIMEOUT_S = 1.0
_WORDS_TIMEOUT_S = 0.2
_FIELD = b"\x0a"  # of `frames`, the one field of both messages
_OPTIONS = (
    *DIRECT,
    ("grpc.max_receive_message_length", CHUNK_BYTES + 64),
    ("grpc.max_send_message_length", CHUNK_BYTES + 64),
    # A network that swallows everything closes no socket: it is noticed by silence, where nothing else can tell.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

_ADDRESS = re.compile(r"unix:.+|(\[[^\[\]\s]+\]|[^:/\[\]\s]+):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65_535

OnFrame = Callable[[Kind, int, bytes | bytearray, int | None], None]
OnClosed = Callable[[str], None]
# The pieces of one message's bytes, in order.
_Chunk = list[memoryview]


class _Stream(Protocol):
    """What both ends of a gRPC stream offer."""

    async def write(self, message: _Chunk) -> Any: ...


class GrpcLink:
    """One end of a stream. `on_frame` and `on_closed` run on the io thread, `on_closed` once."""

    passes_fds = False

    def __init__(self, loop: Loop, streams: "Streams", *, on_frame: OnFrame, on_closed: OnClosed) -> None:
        self.body_limit = MAX_HELLO_BYTES
        self._loop = loop
        self._streams = streams
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._parser = FrameParser()
        self._closed = False
        self._out: deque[memoryview] = deque()
        self.unsent_bytes = self.num_taken = 0
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._wake = asyncio.Event()
        self._read_ahead = asyncio.Semaphore(_READ_AHEAD)

    # Any thread.

    def send(self, kind: Kind, request_id: int, body: bytes | memoryview, fd: int | None = None) -> None:
        """Sends a frame, whose body must stay as it is. Does not wait. Raises BrokenPipeError once closed."""
        assert fd is None, "this link passes no descriptors"
        head = header(kind, request_id, len(body))
        with self._lock:
            if self._closed:
                raise BrokenPipeError("the link is closed")
            self._out += (memoryview(head), memoryview(body))
            self.unsent_bytes += len(head) + len(body)
        self._streams.call(self._wake.set)

    def wait_sent(self, timeout_s: float | None, at_most_bytes: int) -> bool:
        """Waits until gRPC has taken all but so many bytes of what was sent; says whether it did in time."""
        with self._lock:
            return self._drained.wait_for(lambda: self.unsent_bytes <= at_most_bytes or self._closed, timeout_s)

    def read_until(self, awaited: Awaited, timeout_s: float | None, ask: Callable[[], None] = nothing) -> None:
        """Calls `ask`; a stream is read by its own thread."""
        ask()

    def interrupt(self, awaited: Awaited) -> None:
        """Does nothing: nobody waits in `read_until`."""

    def close(self) -> None:
        """Ends the stream. `on_closed` is not called."""
        with self._lock:
            self._closed = True
            self._drained.notify_all()
        self._streams.call(self._wake.set)

    def fail(self, reason: str) -> None:
        """Ends the stream and reports it, on the io thread."""
        if self._closed:
            return
        # What was sent last, such as why, still goes out before the stream ends.
        self.close()
        on_closed, self._on_closed = self._on_closed, _nothing
        on_closed(reason)

    def abandon(self) -> None:
        """A forked child has no thread for the stream: nothing is left to do."""
        self._closed = True

    # The streams' thread.

    async def write_all(self, stream: _Stream) -> None:
        """Writes what is sent until the link is closed and all of it is out."""
        while True:
            self._wake.clear()
            while (chunk := self._next_chunk()) is not None:
                await stream.write(chunk)
                with self._lock:
                    self.unsent_bytes -= sum(map(len, chunk))
                    self.num_taken += 1
                    self._drained.notify_all()
            if self._closed:
                return
            await self._wake.wait()

    async def read_all(self, chunks: AsyncIterable[memoryview]) -> None:
        """Hands what arrives to the io thread, a few chunks ahead, until the stream ends."""
        async for chunk in chunks:
            await self._read_ahead.acquire()
            self._loop.call(partial(self._feed, chunk))

    def _next_chunk(self) -> _Chunk | None:
        with self._lock:
            taken: _Chunk = []
            room = CHUNK_BYTES
            while self._out and room:
                data = self._out.popleft()
                if len(data) > room:
                    self._out.appendleft(data[room:])
                taken.append(data[:room])
                room -= len(taken[-1])
        return taken or None

    # The io thread.

    def _feed(self, chunk: memoryview) -> None:
        try:
            for found in self._parser.frames(chunk, self):
                if self._closed:
                    return
                self._on_frame(*found, None)
        except CommError as error:
            self.fail(str(error))
        finally:
            self._streams.call(self._read_ahead.release)


class Streams:
    """The gRPC side of an endpoint: its event loop's thread, its server and its clients."""

    def __init__(self, name: str, loop: Loop, token: str, connect_timeout_s: float, tls: Tls | None) -> None:
        self._io_loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._token = token
        self._tls = tls
        self._events = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        # All that listen: one that nobody keeps is stopped.
        self._servers: list[grpc.aio.Server] = []
        self._thread = threading.Thread(target=self._events.run_forever, name=f"m2flow-comm {name} grpc", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> None:
        """Runs a function on the streams' thread; does nothing once closed."""
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(function)

    def link(self, *, on_frame: OnFrame, on_closed: OnClosed) -> GrpcLink:
        """Returns a link that is yet to be dialled or served."""
        return GrpcLink(self._io_loop, self, on_frame=on_frame, on_closed=on_closed)

    @staticmethod
    def check_address(address: str) -> None:
        """Raises ValueError unless it is "host:port" or "unix:path": gRPC makes up a port that it is not given."""
        found = _ADDRESS.fullmatch(address)
        if found is None or int(found["port"] or 0) > _MAX_PORT:
            raise ValueError(
                f"got address {address!r}, want HOST:PORT with a port of 0 to {_MAX_PORT}, an IPv6 HOST in brackets, "
                "or unix:PATH"
            )

    def listen(self, address: str, accept: Callable[[], GrpcLink]) -> str:
        """Listens at "host:port" or "unix:path"; `accept` makes the link of each stream. Returns the address bound.

        Raises ValueError for another address, CommError where it cannot bind. Blocks until it listens.
        """
        self.check_address(address)
        return str(self._run(self._listen(address, accept)))

    def dial(self, address: str, link: GrpcLink) -> None:
        """Connects a link to an address, in the background; the link fails when that fails."""
        self.call(lambda: self._keep(self._dial_or_fail(address, link)))

    def close(self) -> None:
        """Ends all streams and the thread. Blocks until then."""
        self._run(self._close())
        self._events.call_soon_threadsafe(self._events.stop)
        self._thread.join()
        self._events.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._events)
        return done.result()

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._events.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, address: str, accept: Callable[[], GrpcLink]) -> str:
        async def exchange(request: AsyncIterable[memoryview], context: Any) -> None:
            metadata = dict(context.invocation_metadata() or ())
            if not same_token(str(metadata.get(TOKEN_KEY, "")), self._token):
                _log.warning("refused a gRPC call of %s: its token is not this run's", context.peer())
                await self._refuse(request, context)
            await self._serve(accept(), request, context)

        handler = grpc.stream_stream_rpc_method_handler(exchange, _unwrap, _wrap)
        service, method = METHOD.strip("/").split("/")
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        if address.startswith("unix:"):
            _check_free(address)
        try:
            port = self._bind(server, address)
        except OSError as error:
            raise CommError(f"cannot listen at {address!r}: {error}") from error
        except RuntimeError as error:
            # Which does not say why.
            want = "a port of this host that is free: port 0 is one"
            if address.startswith("unix:"):
                want = "a path in a directory of one's own, where no file is"
            if self._tls is not None:
                want += ", and a certificate, its key and an authority in PEM that fit"
            raise CommError(f"cannot listen at {address!r}, want {want} ({error})") from error
        await server.start()
        self._servers.append(server)
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def _refuse(self, request: AsyncIterable[memoryview], context: Any) -> None:
        """Ends a stream that brought no token. The reason goes as a frame first: a status alone may not be heard."""
        reason = "its token is not this run's"
        refusal = comm_pb2.Refusal(reason=reason, version=VERSION).SerializeToString()
        await context.write([memoryview(header(Kind.REFUSAL, 0, len(refusal)) + refusal)])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_drain(request), _GOODBYE_TIMEOUT_S)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    def _bind(self, server: "grpc.aio.Server", address: str) -> int:
        if self._tls is None:
            return int(server.add_insecure_port(address))
        pair = (self._tls.key.read_bytes(), self._tls.certificate.read_bytes())
        authority = self._tls.authority.read_bytes()
        credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=True)
        return int(server.add_secure_port(address, credentials))

    async def _dial_or_fail(self, address: str, link: GrpcLink) -> None:
        try:
            await self._dial(address, link)
        except Exception as error:
            # Certificates that cannot be read, say: whoever has called over this link must hear of it.
            self._io_loop.call(partial(link.fail, f"{address} cannot be dialled: {error}"))

    async def _dial(self, address: str, link: GrpcLink) -> None:
        async with self._open(address) as channel:
            begin = partial(channel.stream_stream(METHOD, _wrap, _unwrap), metadata=((TOKEN_KEY, self._token),))
            try:
                await asyncio.wait_for(channel.channel_ready(), self._connect_timeout_s)
            except TimeoutError:
                # Only a call is told why there is no connection, a certificate that is refused say.
                reason = f"no connection to {address} within {self._connect_timeout_s} s: {await _words(begin())}"
                self._io_loop.call(partial(link.fail, reason))
                return
            call = begin()
            await self._serve(link, call, call)

    def _open(self, address: str) -> "grpc.aio.Channel":
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        files = (self._tls.authority, self._tls.key, self._tls.certificate)
        credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in files))
        return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)

    async def _serve(self, link: GrpcLink, chunks: AsyncIterable[memoryview], stream: _Stream) -> None:
        """Moves both directions until either ends; then tells the link."""
        reading = self._events.create_task(link.read_all(chunks))
        writing = self._events.create_task(link.write_all(stream))
        reason = "its stream was cut off"
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and isinstance(stream, grpc.aio.StreamStreamCall):
                # A client that just left would cut off what it wrote last: the server ends the stream when it has it.
                # And when it was a write that failed, the reader hears why.
                with contextlib.suppress(Exception):
                    await stream.done_writing()
                await asyncio.wait((reading,), timeout=_GOODBYE_TIMEOUT_S)
            reason = await _ending(writing, reading)
            if isinstance(stream, grpc.aio.StreamStreamCall) and stream.done() and (words := await stream.details()):
                reason = f"its stream broke: {words}"
        finally:
            # gRPC cancels what serves a stream whose connection it has given up: that is an end like any other.
            for task in (writing, reading):
                task.cancel()
            self._io_loop.call(partial(link.fail, reason))

    async def _close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_GOODBYE_TIMEOUT_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop(0.2) for server in self._servers))


def _check_free(address: str) -> None:
    """Raises CommError where somebody listens at a Unix socket: gRPC would take its path away from it."""
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            caller.connect(address.removeprefix("unix:"))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except BlockingIOError:
        # It is behind with accepting.
        pass
    except OSError as error:
        raise CommError(f"cannot listen at {address!r}: {error}") from error
    raise CommError(f"cannot listen at {address!r}, where somebody listens, want a path of one's own: give another")


async def _words(call: "grpc.aio.StreamStreamCall[Any, Any]") -> str:
    """Returns why a call fails, which one without a connection does at once unless nothing at all is heard."""
    try:
        words = await asyncio.wait_for(call.details(), _WORDS_TIMEOUT_S)
    except TimeoutError:
        return "nothing answers"
    _, _, last = words.rpartition("last error: ")
    return last.replace("Socket closed", "it hung up, as a server does that gets no certificate of its authority")


async def _ending(*tasks: "asyncio.Task[None]") -> str:
    """Ends what is left of a stream's tasks; returns the reason that they give."""
    reason = "its stream ended without a goodbye"
    for task in tasks:
        if not task.done():
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            continue
        except Exception as error:
            reason = f"its stream broke: {error}"
    return reason


async def _drain(request: AsyncIterable[memoryview]) -> None:
    async for _ in request:
        pass


def _wrap(chunk: _Chunk) -> bytes:
    """Returns the message whose one field is the chunk: the field's tag and length, then its bytes, copied once."""
    head = bytearray(_FIELD)
    encoder._EncodeVarint(head.extend, sum(map(len, chunk)))  # type: ignore[attr-defined]
    return b"".join((head, *chunk))


def _unwrap(message: bytes) -> memoryview:
    """Returns the bytes of a message's one field, in place."""
    size = shift = 0
    for at in range(1, min(len(message), 6)):
        size |= (message[at] & 0x7F) << shift
        shift += 7
        if message[at] < 0x80:
            break
    else:
        raise ValueError("got a message that is no ExchangeRequest")
    if message[:1] != _FIELD or at + 1 + size != len(message):
        raise ValueError("got a message that is no ExchangeRequest")
    return memoryview(message)[at + 1 :]


def _nothing(reason: str) -> None:
    """A closed link does not close again."""
