"""What a channel's index is asked: answered, timed out or withdrawn, never losing an item."""

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from m2flow.comm._connection import Connection
from m2flow.comm._deadline import Deadline
from m2flow.comm._frames import MAX_MESSAGE_BYTES, Kind
from m2flow.comm._items import Lease, rows
from m2flow.comm._references import Reference, is_reference, referenced
from m2flow.comm._replies import Reply, nothing
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import (
    ChannelClosedError,
    ChannelFullError,
    CommError,
    IterationEnded,
    IterationOverError,
    LeaseLostError,
    PayloadError,
    PeerLostError,
    TimeoutError_,
)
from m2flow.comm.payload import Tree, decode
from m2flow.proto.comm.v1 import comm_pb2

# How long a host may take to answer that a request is withdrawn: it is one message on a living process's io thread.
_CANCEL_TIMEOUT_S = 1.0


class Asked:
    """A request to a channel's index, which goes out by `ask` or when its answer is waited for."""

    def __init__(
        self,
        channel: str,
        connection: Connection,
        request: comm_pb2.ChannelRequest,
        deadline: Deadline,
        *,
        key: str | None = None,
        iteration: int | None = None,
        references: Sequence[Reference] = (),
        device: str | None = None,
    ) -> None:
        self._device = device
        # Kept until the channel has answered: then it holds them.
        self._references = references
        self._gave_back = False
        # The host has not answered its withdrawal in time.
        self._is_silent = False
        self._channel = channel
        self._connection = connection
        self._key = key
        self._iteration = iteration
        self.deadline = deadline
        self._request = request.SerializeToString()
        self._id = 0
        # None before it is asked, and once it was withdrawn.
        self._reply: Reply | None = None
        if len(self._request) > MAX_MESSAGE_BYTES:
            raise PayloadError(
                f"channel {channel!r}: got a message of {len(self._request)} bytes, want at most {MAX_MESSAGE_BYTES}: "
                "put fewer items at a time"
            )

    def ask(self) -> Reply:
        """Sends the request now, ahead of the wait for its answer."""
        reply = self._called()
        reply.ask()
        return reply

    def _called(self) -> Reply:
        if self._reply is None:
            self._id, self._reply = self._connection.call(Kind.CHANNEL, self._request)
        return self._reply

    def wait(self) -> list[Lease]:
        """Blocks for the answer; returns the leases in it."""
        return self._leases(self.wait_response())

    def wait_response(self) -> comm_pb2.ChannelResponse:
        """Blocks for the answer, or until the deadline withdraws the request; raises what it says went wrong."""
        reply = self._called()
        try:
            try:
                body = reply.result(self.deadline.left_s)
            except TimeoutError as error:
                if not self.deadline.ended(error):
                    raise
                # The index answers a withdrawn request at once: with the items, where they had just been given out.
                self._connection.send(Kind.CANCEL, self._id, b"")
                body = reply.result(self.cancel_timeout_s)
        except CommError:
            raise
        except BaseException as error:
            if self.deadline.ended(error):
                raise self._unanswered() from None
            # A KeyboardInterrupt, or what another signal's handler raises: who asks next is not to overtake this.
            take_back([self])
            raise
        try:
            return self._parse(body)
        except (CommError, IterationEnded):
            raise
        except BaseException:
            take_back([self])
            raise

    async def wait_async(self) -> list[Lease]:
        """Like `wait`, on the running event loop."""
        return self._leases(await self.wait_response_async())

    async def wait_response_async(self) -> comm_pb2.ChannelResponse:
        """Like `wait_response`, on the running event loop; of a request that was cancelled nothing happens later."""
        # Whoever awaits has imported it; for all others it would be a quarter of the time to import this package.
        asyncio = sys.modules["asyncio"]
        reply = self.ask()
        events = asyncio.get_running_loop()
        answered = events.create_future()

        def tell(reply: Reply) -> None:
            if not _told(events, answered):
                # The loop has been closed meanwhile: what came is for whoever asks next.
                self._give_back(reply)

        reply.add_done_callback(tell)
        try:
            await asyncio.wait([answered], timeout=self.deadline.left_s)
            if not answered.done():
                self._connection.send(Kind.CANCEL, self._id, b"")
                await asyncio.wait([answered], timeout=self.cancel_timeout_s)
        except asyncio.CancelledError:
            # The answer must still be heard: it says that nothing is put any more.
            await take_back_async([self])
            raise
        except GeneratorExit:
            # The loop was closed when it had heard of the answer, and tells nobody.
            self._connection.hand_over(self.withdraw)
            raise
        if not answered.done():
            raise self._unanswered()
        return self._parse(reply.result())

    @property
    def cancel_timeout_s(self) -> float:
        """Seconds that the answer to a withdrawal may take."""
        # Of a host that has yet to appear, or has not answered one in time, no answer is on its way.
        return 0.0 if self._is_silent or not self._connection.greeted else _CANCEL_TIMEOUT_S

    def withdraw(self, then: Callable[[], object] = nothing) -> None:
        """Takes back what was asked; an item that comes nevertheless is given back. `then` is called after that."""
        reply, self._reply = self._reply, None
        if reply is None:
            then()
            return

        def end(done: Reply) -> None:
            self._give_back(done)
            then()

        self._connection.send(Kind.CANCEL, self._id, b"")
        reply.add_done_callback(end)

    def _give_back(self, done: Reply) -> None:
        if self._gave_back or done.error() is not None:
            return
        response = comm_pb2.ChannelResponse.FromString(done.result())
        # Those that cannot be opened have gone back by themselves.
        with contextlib.suppress(CommError):
            if self._leases(response):
                self._return(response.items.leases)

    def _return(self, leases: Sequence[int]) -> None:
        self._gave_back = True
        ack = comm_pb2.AckRequest(leases=leases, give_back=True)
        request = comm_pb2.ChannelRequest(channel=self._channel, ack=ack)
        self._connection.send(Kind.CHANNEL, 0, request.SerializeToString())

    def _leases(self, response: comm_pb2.ChannelResponse) -> list[Lease]:
        if not response.HasField("items"):
            return []
        unpickles, device = self._connection.unpickles, self._device

        def read(data: bytes | Bytes) -> Tree:
            return decode(data, allow_pickle=unpickles, device=device)

        leases: list[Lease] = []
        refused: CommError | None = None
        try:
            for row in rows(response.items):
                payload = row[-1]
                try:
                    if isinstance(payload, bytes):
                        leases.append(Lease(*row, read))
                    elif is_reference(payload):
                        leases.append(Lease(*row[:-1], *referenced(payload).taken_by(self._connection, read)))
                    else:
                        leases.append(Lease(*row[:-1], self._connection.open(payload), read))
                except CommError as error:
                    refused = error
            if refused is not None:
                raise refused
        except BaseException:
            # One cannot be opened here, or a KeyboardInterrupt has come: all go back, for another or another try.
            self._return(response.items.leases)
            raise
        return leases

    def _parse(self, body: bytes) -> comm_pb2.ChannelResponse:
        response = comm_pb2.ChannelResponse.FromString(body)
        if response.HasField("failure"):
            raise self._error(response.failure)
        return response

    def _error(self, failure: comm_pb2.Failure) -> Exception:
        match failure.type:
            case "IterationEnded":
                return IterationEnded(self._channel, self._iteration or 0)
            case "ChannelClosedError":
                return ChannelClosedError(self._channel, failure.message)
            case "ChannelFullError":
                return ChannelFullError(self._channel)
            case "IterationOverError":
                return IterationOverError(self._channel, failure.message)
            case "LeaseLostError":
                return LeaseLostError(self._channel, failure.message)
            case "PayloadError":
                return PayloadError(f"channel {self._channel!r}: {failure.message}")
            case "PeerLostError":
                return PeerLostError(failure.peers[0], f"it was gone before it closed channel {self._channel!r}")
            case "TimeoutError_":
                return self._timed_out(f"{', '.join(failure.peers)} {failure.message}".strip())
        return CommError(f"channel {self._channel!r}: {failure.message}")

    def _unanswered(self) -> TimeoutError_:
        """Withdraws what the host has answered neither in time nor when it was told that it was withdrawn."""
        self._is_silent = True
        self.withdraw()
        return self._timed_out()

    def _timed_out(self, waited_for: str = "") -> TimeoutError_:
        return self.deadline.timed_out(self._channel, waited_for or self._connection.peer, self._key)


def take_back(asked: Sequence[Asked]) -> None:
    """Withdraws requests of one channel; blocks until nothing can overtake what had come for them, where it may.

    The io thread does it: no Ctrl-C ends that, and this may be a finaliser that runs inside any lock.
    """
    if asked:
        timeout_s, given_back = asked[0].cancel_timeout_s, threading.Event()
        if asked[0]._connection.hand_over(partial(_withdraw, tuple(asked), given_back.set)):
            asked[0]._is_silent = not given_back.wait(timeout_s)


async def take_back_async(asked: Sequence[Asked]) -> None:
    """Like `take_back`, on the running event loop; when it is cancelled, that is raised afterwards."""
    if not asked:
        return
    asyncio = sys.modules["asyncio"]
    events = asyncio.get_running_loop()
    deadline, given_back, cancelled = Deadline(asked[0].cancel_timeout_s), events.create_future(), None
    may_wait = asked[0]._connection.hand_over(partial(_withdraw, tuple(asked), partial(_told, events, given_back)))
    while may_wait and deadline.left_s and not given_back.done():
        try:
            await asyncio.wait([given_back], timeout=deadline.left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    asked[0]._is_silent = may_wait and not given_back.done()
    if cancelled is not None:
        raise cancelled


def _withdraw(asked: Sequence[Asked], then: Callable[[], object]) -> None:
    """Withdraws requests; `then` is called once what had come for the last of them is given back."""
    left = list(asked)

    def end() -> None:
        left.pop()
        if not left:
            then()

    for one in asked:
        one.withdraw(end)


def _told(events: Any, waiting: Any) -> bool:
    """Ends a future of an event loop; says whether the loop is there to hear of it."""
    try:
        events.call_soon_threadsafe(lambda: waiting.done() or waiting.set_result(None))
    except RuntimeError:
        return False
    return True
