"""Calls between endpoints: a service's method with a tree, answered with a tree or with the error it raised.

Handlers run on a few threads, those of one peer and service in the order they were sent. One that has to wait returns a
Future instead, and no thread waits with it.
"""

import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from m2flow.comm._connection import Connection, message_of, packed_of
from m2flow.comm._executor import LaneExecutor
from m2flow.comm._frames import Kind, ProtocolError
from m2flow.comm._loop import reraise_interrupt
from m2flow.comm._parking import Parking
from m2flow.comm._segments import Slot
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import CommError, RemoteError
from m2flow.comm.payload import Tree, decode, encode
from m2flow.proto.comm.v1 import comm_pb2


class Request(NamedTuple):
    """What a handler is given: who calls, what, with which tree. Arrays in `args` are read-only.

    `held_bytes` of it are in this process's own memory, not in shared memory that the caller pays for. `session` tells
    the connection it came by from others of that peer.
    """

    peer: str
    service: str
    method: str
    args: Tree
    held_bytes: int = 0
    session: int = 0


class Lend(NamedTuple):
    """An answer that lies in shared memory already, as a payload, in a slot that is held until the answer is given.

    The peer reads it in place, as any number of others may; or it gets what `read` makes of the payload's tree.
    """

    slot: Slot
    size_bytes: int
    let_go: Callable[[Slot], None]
    read: Callable[[Tree], Tree] | None = None


# The answer to most calls.
_NOTHING = comm_pb2.CallResponse(result=message_of(encode(None).to_bytes())).SerializeToString()

# Returns the answer's tree, or a Future of it.
Handler = Callable[[Request], Any]


class CallServer:
    """The services of one endpoint: `executor` runs their handlers, `own` what may not wait for handlers to end."""

    def __init__(self, executor: LaneExecutor, own: LaneExecutor, parking: Parking) -> None:
        self._executor = executor
        self._own = own
        self._parking = parking
        self._handlers: dict[str, Handler] = {}
        self._prompt: set[str] = set()
        self._owned: set[str] = set()

    def add(self, service: str, handler: Handler, *, prompt: bool = False, own: bool = False) -> None:
        """Serves a service, as the io thread or in its place; raises ValueError for a name that is taken.

        A `prompt` handler never waits, answers with little and minds no thread: it runs as the io thread or
        in its place. The handler of the package's `own` service waits for no other one's to end.
        """
        if service in self._handlers:
            raise ValueError(f"service {service!r} has a handler already: give this one another name")
        self._handlers[service] = handler
        if prompt:
            self._prompt.add(service)
        if own:
            self._owned.add(service)
        self._parking.arrived(service)

    def on_call(self, connection: Connection, request_id: int, body: bytes) -> None:
        """Handles a CALL frame, as the io thread or in its place."""
        message = comm_pb2.CallRequest.FromString(body)
        # A block is opened here, in the order of frames: its segment may be retired by the next one.
        args = self._open(connection, request_id, message)
        if args is None:
            return
        job = partial(self._run, connection, request_id, message.service, message.method, args)
        prompt = message.service in self._prompt
        executor = self._own if message.service in self._owned else self._executor
        submit = job if prompt else partial(executor.submit, (connection, message.service), job)
        if message.service in self._handlers:
            submit()
            return
        refusal = LookupError(f"no service {message.service!r} here, want one of {sorted(self._handlers)}")
        refuse = partial(self._fail, connection, request_id, refusal)
        session = connection.session
        self._parking.park(message.service, session, request_id, retry=submit, expire=refuse, withdraw=refuse)

    def on_gone(self, connection: Connection) -> None:
        """Takes note of a connection that is gone: what it asked of services that are not there is not run."""
        self._parking.left(connection.session)

    def on_prompt_call(self, connection: Connection, request_id: int, body: bytes) -> bool:
        """Handles a CALL frame on a thread that waits, if its service is a prompt one; says whether it did."""
        message = comm_pb2.CallRequest.FromString(body)
        if message.service not in self._prompt:
            return False
        args = self._open(connection, request_id, message)
        if args is not None:
            self._run(connection, request_id, message.service, message.method, args)
        return True

    def _open(self, connection: Connection, request_id: int, message: comm_pb2.CallRequest) -> bytes | Bytes | None:
        """Returns a call's args; None where they cannot be opened here, which the caller is told."""
        try:
            return connection.open(packed_of(message.args))
        except ProtocolError:
            raise
        except CommError as error:
            self._fail(connection, request_id, error)
            return None

    def _run(self, connection: Connection, request_id: int, service: str, method: str, args: Any) -> None:
        try:
            handler = self._handlers[service]
            held_bytes = len(args) if isinstance(args, bytes) or not connection.link.passes_fds else 0
            args = connection.decode(args)
            result = handler(Request(connection.peer, service, method, args, held_bytes, connection.session))
        except BaseException as error:
            self._fail(connection, request_id, error)
            reraise_interrupt(error)
            return
        if isinstance(result, Future):
            if service in self._prompt:
                result.add_done_callback(partial(self._settle, connection, request_id))
                return
            # It may be resolved on any thread, the io thread too: encoding is for one of ours.
            lane = (connection, request_id, service)
            result.add_done_callback(
                lambda done: self._own.submit(lane, partial(self._settle, connection, request_id, done))
            )
        else:
            self._answer(connection, request_id, result)

    def _settle(self, connection: Connection, request_id: int, done: "Future[Any]") -> None:
        if done.cancelled():
            self._fail(connection, request_id, RuntimeError("the call was cancelled where it ran"))
        elif (error := done.exception()) is not None:
            self._fail(connection, request_id, error)
        else:
            self._answer(connection, request_id, done.result())

    def _answer(self, connection: Connection, request_id: int, result: Any) -> None:
        if result is None:
            connection.send(Kind.REPLY, request_id, _NOTHING)
            return
        try:
            # Without a deadline it does not wait: a few such waits would take all threads that answer.
            payload = _lent(connection, result) if isinstance(result, Lend) else connection.pack(encode(result))
            response = comm_pb2.CallResponse(result=message_of(payload)).SerializeToString()
        except BaseException as error:
            self._fail(connection, request_id, error)
            reraise_interrupt(error)
            return
        connection.send(Kind.REPLY, request_id, response)

    def _fail(self, connection: Connection, request_id: int, error: BaseException) -> None:
        failure = comm_pb2.Failure(
            type=type(error).__qualname__,
            message=_words(error).encode("utf-8", "replace").decode(),
            traceback="".join(traceback.format_exception(error)).encode("utf-8", "replace").decode(),
        )
        connection.send(Kind.REPLY, request_id, comm_pb2.CallResponse(failure=failure).SerializeToString())


def _words(error: BaseException) -> str:
    """Returns what an error says, which is its class's own code."""
    try:
        return str(error)
    except BaseException as unsaid:
        reraise_interrupt(unsaid)
        return f"(its __str__ raises {type(unsaid).__qualname__})"


def _lent(connection: Connection, lend: Lend) -> bytes | comm_pb2.Block:
    try:
        if lend.read is None:
            return connection.lend_slot(lend.slot, lend.size_bytes)
        return connection.pack(encode(lend.read(decode(lend.slot.view(lend.size_bytes)))))
    finally:
        lend.let_go(lend.slot)


def read_answer(connection: Connection, body: bytes) -> Tree:
    """Returns the tree of a call's answer; raises RemoteError where the handler raised."""
    if body == _NOTHING:
        return None
    response = comm_pb2.CallResponse.FromString(body)
    if response.HasField("failure"):
        failure = response.failure
        raise RemoteError(connection.peer, failure.type, failure.message, failure.traceback)
    return connection.decode(connection.open(packed_of(response.result)))
