"""The planner over gRPC gives what the functions give."""

from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

grpc = pytest.importorskip("grpc", reason="the service is an extra")

from m2flow.proto.sched.v1 import sched_pb2, sched_pb2_grpc  # noqa: E402
from m2flow.sched import InputError, plan  # noqa: E402
from m2flow.sched.service import TOKEN_KEY, serve  # noqa: E402

Make = Callable[..., sched_pb2.PlanRequest]
pytestmark = pytest.mark.medium


TOKEN = ((TOKEN_KEY, "secret"),)


@pytest.fixture
def address() -> Iterator[str]:
    server, port = serve("127.0.0.1:0", token="secret")
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(10)


@pytest.fixture
def stub(address: str) -> Iterator[sched_pb2_grpc.SchedulerServiceStub]:
    with grpc.insecure_channel(address) as channel:
        yield sched_pb2_grpc.SchedulerServiceStub(channel)


def test_all_four_calls_answer(stub: sched_pb2_grpc.SchedulerServiceStub, make_request: Make) -> None:
    request = make_request(2, kind="cpu")
    answer = stub.Plan(request, timeout=30, metadata=TOKEN)
    assert list(answer.plans) == list(plan(request).plans)
    explained = stub.Explain(sched_pb2.ExplainRequest(request=request), timeout=60, metadata=TOKEN)
    assert explained.text.startswith("Temporal")
    simulated = stub.Simulate(
        sched_pb2.SimulateRequest(request=request, plan=answer.plans[0].plan), timeout=30, metadata=TOKEN
    )
    assert simulated.iteration_s == pytest.approx(answer.plans[0].simulated_s)
    compared = stub.Compare(sched_pb2.CompareRequest(left=request, right=request), timeout=30, metadata=TOKEN)
    assert "times as fast" in compared.text


def test_an_unusable_input_is_the_callers_mistake(
    stub: sched_pb2_grpc.SchedulerServiceStub, make_request: Make
) -> None:
    request = make_request(2)
    request.mode = "fast"
    with pytest.raises(grpc.RpcError) as failed:
        stub.Plan(request, timeout=30, metadata=TOKEN)
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "mode 'fast'" in failed.value.details()


@pytest.mark.parametrize("metadata", [(), ((TOKEN_KEY, "another"),)])
def test_a_call_without_the_runs_token_is_refused_and_logged(
    stub: sched_pb2_grpc.SchedulerServiceStub,
    make_request: Make,
    caplog: pytest.LogCaptureFixture,
    metadata: tuple[tuple[str, str], ...],
) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        stub.Plan(make_request(2), timeout=30, metadata=metadata)
    assert failed.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert TOKEN_KEY in failed.value.details()
    assert "refused a call of" in caplog.text


def test_silent_strangers_keep_no_caller_out(
    stub: sched_pb2_grpc.SchedulerServiceStub, address: str, make_request: Make
) -> None:
    with grpc.insecure_channel(address) as channel:
        plan_nothing = channel.stream_unary("/m2flow.proto.sched.v1.SchedulerService/Plan")
        silent = [plan_nothing.future(iter(SimpleQueue[bytes]().get, None)) for _ in range(8)]
        assert {call.exception(20).code() for call in silent} == {grpc.StatusCode.UNAUTHENTICATED}
        assert stub.Plan(make_request(2), timeout=30, metadata=TOKEN).plans


def test_a_server_needs_a_token_and_an_address() -> None:
    with pytest.raises(InputError, match="got no token"):
        serve("127.0.0.1:0", token="")
    with pytest.raises(InputError, match="cannot be listened at"):
        serve("unix:/no/such/folder/socket", token="secret")


def test_a_second_server_at_an_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match=f"'{address}' cannot be listened at"):
        serve(address, token="secret")
