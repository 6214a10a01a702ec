"""The planner as a gRPC service; needs the extra `m2flow-sched[service]`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from m2flow.proto.sched.v1 import sched_pb2, sched_pb2_grpc
from m2flow.sched.comparison import compare
from m2flow.sched.errors import SchedError
from m2flow.sched.explanation import explain
from m2flow.sched.planning import plan
from m2flow.sched.simulation import simulate

A = TypeVar("A")
B = TypeVar("B")


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


def serve(address: str, *, num_threads: int = 2) -> tuple[grpc.Server, int]:
    """Starts a server at `address` ("127.0.0.1:0" takes a free port); returns it, running, and its port."""
    server = grpc.server(ThreadPoolExecutor(num_threads, thread_name_prefix="scheduler"))
    sched_pb2_grpc.add_SchedulerServiceServicer_to_server(Scheduler(), server)
    port = server.add_insecure_port(address)
    server.start()
    return server, port


def _answered(function: Callable[[A], B], request: A, context: grpc.ServicerContext) -> B:
    try:
        return function(request)
    except SchedError as wrong:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
        raise
