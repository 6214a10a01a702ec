"""An exception or an exit, in words, and whether it is a cause or only the sight of another's end."""

import os
import signal
import traceback
from collections.abc import Iterator

from m2flow.comm import ChannelClosedError, PeerLostError
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._wire import failure_report

# What the operating system and the collectives of torch say when the other end has gone.
_ECHOES = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed")


def cause_of(failure: BaseException) -> str:
    """The exception in one line."""
    if isinstance(failure, SystemExit):
        return f"sys.exit({failure.code if failure.code is not None else ''})"
    return "".join(traceback.format_exception_only(failure)).strip()


def traceback_of(failure: BaseException) -> str:
    """The traceback without the frame of the runtime that called the worker; empty where there is no other frame."""
    below = failure.__traceback__.tb_next if failure.__traceback__ else None
    if below is None:
        return ""
    return "".join(traceback.format_exception(type(failure), failure, below))


def is_consequence(failure: BaseException) -> bool:
    """Whether the exception, or one that it came of, says that a peer has gone."""
    return any(
        isinstance(link, PeerLostError | ChannelClosedError | ConnectionError | EOFError)
        or any(echo in str(link).lower() for echo in _ECHOES)
        for link in _chain(failure)
    )


def failure_of(
    failure: BaseException, group: str, rank: int, phase: str, *, attempt: int = 0, call_id: int = 0
) -> pb.SessionResponse:
    """The report of an exception in a rank, or in the driver, of this process."""
    return failure_report(
        group,
        rank,
        pid=os.getpid(),
        phase=phase,
        cause=cause_of(failure),
        attempt=attempt,
        traceback=traceback_of(failure),
        call_id=call_id,
        consequence=is_consequence(failure),
    )


def exit_in_words(exit_code: int) -> str:
    """A wait status as `os.waitstatus_to_exitcode` gives it: "exit code 3", or "SIGKILL"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"{name} (the kernel's answer to a lack of memory, or someone's kill -9)" if name == "SIGKILL" else name


def _chain(failure: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = failure
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
