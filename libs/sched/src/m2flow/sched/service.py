"""The planner as a gRPC service; needs the extra `m2flow-sched[service]`.

A call brings the token that the server was started with as metadata, under `TOKEN_KEY`; one that does not is refused
as UNAUTHENTICATED and logged.
"""

import hmac
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import grpc

from m2flow.proto.sched.v1 import sched_pb2, sched_pb2_grpc
from m2flow.sched.comparison import compare
from m2flow.sched.errors import InputError, SchedError
from m2flow.sched.explanation import explain
from m2flow.sched.planning import plan
from m2flow.sched.simulation import simulate

TOKEN_KEY = "m2flow-token"
A = TypeVar("A")
B = TypeVar("B")
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_log = logging.getLogger(__name__)


class Scheduler(sched_pb2_grpc.SchedulerServiceServicer):
    """Answers each call with the Python function of its name; an unusable input becomes INVALID_ARGUMENT."""

    def Plan(self, request: sched_pb2.PlanRequest, context: grpc.ServicerContext) -> sched_pb2.PlanResponse:
        return _answered(plan, request, context)

    def Explain(self, request: sched_pb2.ExplainRequest, context: grpc.ServicerContext) -> sched_pb2.ExplainResponse:
        return _answered(explain, request, context)

    def Simulate(self, request: sched_pb2.SimulateRequest, context: grpc.ServicerContext) -> sched_pb2.SimulateResponse:
        return _answered(simulate, request, context)

    def Compare(self, request: sched_pb2.CompareRequest, context: grpc.ServicerContext) -> sched_pb2.CompareResponse:
        return _answered(compare, request, context)


def serve(address: str, *, token: str, num_threads: int = 2) -> tuple[grpc.Server, int]:
    """Starts a server; returns it, running, and its port (0 for a Unix socket).

    Args:
        address: "127.0.0.1:0" takes a free port, "unix:PATH" a socket.
        token: What callers must know, of printable ASCII.
        num_threads: Calls that are answered side by side.

    Raises:
        InputError: there is no token, or the address cannot be had.
    """
    if not token or not token.isascii() or not token.isprintable():
        raise InputError("serve: got no token that metadata can carry, want printable ASCII: give the run's token")
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="scheduler")
    # Else a second process of the user may listen at the same port, and each gets some of the calls.
    options = (("grpc.so_reuseport", 0),)
    server = grpc.server(pool, interceptors=[_Guard(token)], options=options)
    sched_pb2_grpc.add_SchedulerServiceServicer_to_server(Scheduler(), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        raise InputError(f"serve: address {address!r} cannot be listened at, want a free one: use port 0") from None
    server.start()
    return server, port


class _Guard(grpc.ServerInterceptor):
    """Lets through the calls that bring the token; of the others it waits for no message, which would take a thread."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._refusal: _Handler = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], _Handler | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        brought = dict(handler_call_details.invocation_metadata).get(TOKEN_KEY, "")
        if hmac.compare_digest(str(brought).encode(), self._token):
            return continuation(handler_call_details)
        return self._refusal


def _refuse(_requests: "Iterator[bytes]", context: grpc.ServicerContext) -> bytes:
    _log.warning("refused a call of %s: its token is not this run's", context.peer())
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        f"got no token, or another run's, want this run's under the metadata key {TOKEN_KEY!r}: send it with the call",
    )
    raise AssertionError  # abort does not return


def _answered(function: Callable[[A], B], request: A, context: grpc.ServicerContext) -> B:
    try:
        return function(request)
    except SchedError as wrong:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
        raise
