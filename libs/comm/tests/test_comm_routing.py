"""What `route` says of two endpoints is how their messages, items and weights really go."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import Address, Endpoint, explain_route, route
from m2flow.comm._connection import INLINE_BYTES
from m2flow.comm._frames import Kind
from m2flow.comm._grpc import GrpcLink

# By name: whether each end hands over by reference, the backend, and words of the reason.
PAIRS = {
    "one process": ((True, True), "reference", "in one process"),
    "as if in two": ((False, False), "shared_memory", "on one host"),
    "one of them as if in another": ((True, False), "shared_memory", "on one host"),
    "the other as if in another": ((False, True), "shared_memory", "on one host"),
    "tcp": ((True, True), "grpc", "and '127.0.0.1:"),
    "grpc over a unix socket": ((True, True), "grpc", "and 'unix:"),
    "tcp within one run": ((True, True), "grpc", "and '127.0.0.1:"),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Endpoint, Endpoint, str, str]]:
    """Endpoints "a" and "b", and what `route` must say of a payload from a to b."""
    (a_hands_over, b_hands_over), backend, why = PAIRS[request.param]
    apart = backend == "grpc" and request.param != "tcp within one run"
    with ExitStack() as stack:
        a = stack.enter_context(Endpoint(tmp_path / "a", "a", token="t", by_reference=a_hands_over))
        directory = tmp_path / ("b" if apart else "a")
        b = stack.enter_context(Endpoint(directory, "b", token="t", by_reference=b_hands_over))
        if backend == "grpc":
            a.add_address("b", b.listen(f"unix:{tmp_path}/grpc" if "unix" in request.param else "127.0.0.1:0"))
        if backend == "grpc" and not apart:
            b.add_address("a", a.listen("127.0.0.1:0"))
        yield a, b, backend, why


def backend_used(a: Endpoint, peer: str, array: Any, move: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns how an array went from an endpoint to a peer: by what arrived, what was lent and what its link sent."""
    sent: list[int] = []
    link = a._fabric.connection(peer).link
    send = link.send

    def count(kind: Kind, request_id: int, body: Any, *rest: Any, **named: Any) -> None:
        sent.append(len(body))
        send(kind, request_id, body, *rest, **named)

    lent = a._fabric.pool.size_bytes
    with monkeypatch.context() as patched:
        patched.setattr(link, "send", count)
        arrived = move()
    lent = a._fabric.pool.size_bytes - lent
    if arrived is array:
        assert not lent
        assert sum(sent) < INLINE_BYTES
        return "reference"
    assert np.array_equal(arrived, array)
    if isinstance(link, GrpcLink):
        assert not lent
        assert sum(sent) > array.nbytes
        return "grpc"
    assert lent > array.nbytes
    assert sum(sent) < INLINE_BYTES
    return "shared_memory"


def test_messages_go_as_route_says(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, backend, why = pair
    array = np.arange(100_000)

    def move() -> Any:
        a.isend("b", array)
        return b.recv("a", timeout_s=10)

    found = route(a.address, a.address_of("b"), "cpu")
    assert found.backend == backend
    assert why in found.reason
    assert f"{backend} ({found.reason})" in explain_route(a.address, a.address_of("b"), "cpu")
    assert backend_used(a, "b", array, move, monkeypatch) == backend
    # Now that they are connected they say so of each other.
    assert route(a.address, a.address_of("b"), "cpu") == found
    assert route(b.address, b.address_of("a"), "cpu").backend == backend


def test_items_go_as_route_says(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, backend, _ = pair
    b.host_channel("q", producers=["a"], consumers=["b"])
    array = np.arange(100_000)

    def move() -> Any:
        a.channel("q", host="b").put(array, timeout_s=10)
        return b.channel("q", host="b").get(timeout_s=10).item

    assert backend_used(a, "b", array, move, monkeypatch) == backend
    assert route(a.address, a.address_of("b"), "cpu").backend == backend


def test_weights_leave_their_host_only_where_route_says_grpc(pair: Any) -> None:
    a, b, backend, _ = pair
    array = np.arange(100_000)
    b.stage_weights("w", 1, {"x": array})
    prepared = a.weight_receiver("w", sources=["b"]).prepare(1, timeout_s=10)
    assert prepared.moved_bytes == (array.nbytes if backend == "grpc" else 0)
    assert np.array_equal(a.fetch_weights("b", "w", 1, timeout_s=10)["x"], array)


def test_another_process_of_this_host_is_told_from_this_one(
    run_dir: Path, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(100_000)
    with Endpoint(run_dir, "a", token="token-of-this-run") as a:
        peer("v", "endpoint.send('a', endpoint.recv('a')); say(endpoint.address == endpoint.address_of('a')); input()")

        def move() -> Any:
            a.send("v", array, timeout_s=10)
            return a.recv("v", timeout_s=10)

        assert route(a.address, a.address_of("v"), "cpu").backend == "shared_memory"
        assert backend_used(a, "v", array, move, monkeypatch) == "shared_memory"
        assert a.address_of("v") == Address(a.address.host, "v")


@pytest.mark.parametrize(
    ("target", "payload", "parked", "backend"),
    [
        (Address("h", "1"), "cpu", False, "reference"),
        (Address("h", "1"), "cuda", True, "reference"),
        (Address("h", "2"), "cpu", False, "shared_memory"),
        (Address("h", "2"), "cuda", False, "cuda_ipc"),
        (Address("h", "2"), "cuda", True, "shared_memory"),
        (Address("i", "1"), "cpu", False, "grpc"),
        (Address("i", "1"), "cuda", False, "nccl"),
        (Address("i", "1"), "cuda", True, "grpc"),
    ],
)
def test_a_route_follows_from_addresses_and_payload(target: Address, payload: Any, parked: bool, backend: str) -> None:
    source = Address("h", "1")
    found = route(source, target, payload, parked=parked)
    assert found.backend == backend
    assert ("parked in host memory" in found.reason) == (parked and backend != "reference")
    assert f"{backend} ({found.reason})" in explain_route(source, target, payload, parked=parked)
