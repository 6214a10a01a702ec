"""Who has yet to say who it is: it may send a hello of 64 KiB, and has a few seconds for it."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from m2flow.comm import Endpoint, _fabric
from m2flow.comm._frames import MAX_HELLO_BYTES, Kind, header
from m2flow.comm._grpc import METHOD, _wrap

TOO_LONG = header(Kind.HELLO, 0, MAX_HELLO_BYTES + 1)


@pytest.fixture
def listener(run_dir: Path) -> Iterator[Endpoint]:
    with Endpoint(run_dir, "a", token="t") as endpoint:
        yield endpoint


def hangs_up_on(endpoint: Endpoint, way: str, data: bytes, within_s: float = 5) -> bool:
    """Says whether an endpoint ends the connection of a stranger who sends this and then nothing."""
    if way == "unix":
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(os.path.relpath(endpoint._fabric._directory.path / "a.sock"))
            stranger.settimeout(within_s)
            stranger.sendall(data)
            try:
                return stranger.recv(1) == b""
            except TimeoutError:
                return False
    messages: SimpleQueue[Any] = SimpleQueue()
    messages.put(_wrap([memoryview(data)]))
    with grpc.insecure_channel(endpoint.listen("127.0.0.1:0")) as channel:
        call = channel.stream_stream(METHOD)(
            iter(messages.get, None), metadata=[("m2flow-token", "t")], timeout=within_s
        )
        try:
            return list(call) == []
        except grpc.RpcError:
            return call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        finally:
            messages.put(None)


@pytest.mark.parametrize("way", ["unix", "grpc"])
def test_a_hello_is_limited_before_anything_is_believed(
    listener: Endpoint, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(_fabric, "_HELLO_TIMEOUT_S", 60)
    assert hangs_up_on(listener, way, TOO_LONG)
    assert not hangs_up_on(listener, way, header(Kind.HELLO, 0, MAX_HELLO_BYTES), within_s=0.1)


@pytest.mark.parametrize("way", ["unix", "grpc"])
@pytest.mark.parametrize("data", [b"", header(Kind.HELLO, 0, 9)], ids=["nothing", "the beginning of a hello"])
def test_who_says_no_hello_in_time_is_hung_up_on(
    listener: Endpoint, monkeypatch: pytest.MonkeyPatch, way: str, data: bytes
) -> None:
    monkeypatch.setattr(_fabric, "_HELLO_TIMEOUT_S", 0.05)
    assert hangs_up_on(listener, way, data)
