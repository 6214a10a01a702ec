"""What can go wrong between two ends, each error naming the other end.

    CommError
    ├── PayloadError          a value that cannot be encoded, or bytes that are no payload
    ├── ChannelClosedError    the channel has ended and is drained
    ├── ChannelFullError      `put_nowait` found no room
    ├── IterationOverError    a put into an iteration that every producer has ended
    ├── LeaseLostError        what was acknowledged had been queued again
    ├── PeerLostError         the other end's socket was closed by its death
    ├── TimeoutError_         nothing came in time (also a TimeoutError)
    └── RemoteError           the handler at the other end raised

`IterationEnded` stands apart: it is how a consumer learns that an iteration is complete, not a failure.
"""

import errno
from typing import Any


class _Error(Exception):
    """An error that stays what it is when it is pickled or copied: it is not made anew from its words."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self),), {**self.__dict__, "args": self.args}


def _blank(kind: type[_Error]) -> _Error:
    return kind.__new__(kind)


class CommError(_Error):
    """Base of everything that m2flow.comm raises."""


def system_refuses(doing: str, error: OSError) -> CommError:
    """Returns the error for what the operating system refuses, mostly for want of descriptors."""
    remedy = ": raise the limit of open files (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return CommError(f"cannot {doing}: {error.strerror}{remedy}")


class PayloadError(CommError):
    """A value that has no encoding, or bytes that are not a whole and unaltered payload."""


class ChannelClosedError(CommError):
    """The channel was closed, and what it held has been taken."""

    def __init__(self, channel: str, detail: str = "it was closed and is drained") -> None:
        super().__init__(f"channel {channel!r}: {detail}")
        self.channel = channel


class ChannelFullError(CommError):
    """A `put_nowait` that would have had to wait."""

    def __init__(self, channel: str) -> None:
        super().__init__(f"channel {channel!r} is full: use put, which waits, or give it more capacity")
        self.channel = channel


class IterationOverError(CommError):
    """A put into an iteration that every producer, this one too, has ended."""

    def __init__(self, channel: str, message: str) -> None:
        super().__init__(f"channel {channel!r}: {message}")
        self.channel = channel


class LeaseLostError(CommError):
    """What a consumer acknowledged was leased over a connection that had ended, and is queued again."""

    def __init__(self, channel: str, items: str) -> None:
        super().__init__(
            f"channel {channel!r}: got an acknowledgement of {items}, whose lease had ended with its connection: "
            "it is queued again, so undo what it caused"
        )
        self.channel = channel


class PeerLostError(CommError):
    """The process at the other end died, or never appeared."""

    def __init__(self, peer: str, detail: str = "its connection closed without a goodbye") -> None:
        super().__init__(f"peer {peer!r} is lost: {detail}")
        self.peer = peer


class TimeoutError_(CommError, TimeoutError):
    """Nothing came within the time given."""

    def __init__(self, *, channel: str, key: str | None, peer: str, elapsed_s: float) -> None:
        about = f"channel {channel!r}" + ("" if key is None else f", key {key!r}")
        super().__init__(f"{about}: waited {elapsed_s:.3f} s for {peer}")
        self.channel = channel
        self.key = key
        self.peer = peer
        self.elapsed_s = elapsed_s


class RemoteError(CommError):
    """A handler at the other end raised; its own words are kept."""

    def __init__(self, peer: str, type_name: str, message: str, traceback: str) -> None:
        super().__init__(f"{type_name} in {peer!r}: {message}")
        self.peer = peer
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class IterationEnded(_Error):
    """Every producer has ended the iteration, and nothing of it is queued."""

    def __init__(self, channel: str, iteration: int) -> None:
        super().__init__(f"channel {channel!r}: iteration {iteration} has ended")
        self.channel = channel
        self.iteration = iteration
