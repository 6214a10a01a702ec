"""The messages survive the wire, and the committed code is new enough for the oldest runtime that is declared."""

import pytest
from google.protobuf.message import DecodeError

from m2flow.proto.comm.v1 import comm_pb2
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2


def test_a_plan_request_round_trips() -> None:
    graph = flow_pb2.WorkflowGraph(name="grpo", source_items=8)
    graph.stages.add(name="rollout.generate", kind=flow_pb2.STAGE_KIND_WORK, group="rollout", expansion=8.0)
    request = sched_pb2.PlanRequest(workflow=graph, mode="spatial")
    again = sched_pb2.PlanRequest.FromString(request.SerializeToString())
    assert again == request
    assert again.workflow.stages[0].expansion == 8.0


def test_absent_is_not_zero() -> None:
    assert not comm_pb2.GetRequest().HasField("iteration")
    assert comm_pb2.GetRequest(iteration=0).HasField("iteration")


def test_cut_bytes_are_refused() -> None:
    whole = flow_pb2.Span(stage="actor.train", start_ns=1, end_ns=2).SerializeToString()
    with pytest.raises(DecodeError):
        flow_pb2.Span.FromString(whole[:-1] + b"\xff")
