"""Pickles: only where the sender names them, the receiver allows them, and both are on one host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import CommError, Endpoint, PayloadError, Pickled, RemoteError, decode, encode, payload


class Plain:
    """A class that is not registered."""

    def __init__(self, x: int) -> None:
        self.x = x


@pytest.fixture
def trusting(run_dir: Path) -> Iterator[tuple[Endpoint, Endpoint]]:
    with (
        Endpoint(run_dir, "a", token="t", allow_pickle=True, by_reference=False) as a,
        Endpoint(run_dir, "b", token="t", allow_pickle=True, by_reference=False) as b,
    ):
        yield a, b


def test_both_ends_must_say_so() -> None:
    tree = {"arrays": np.arange(3), "set": Pickled({1, 2})}
    data = encode(tree).to_bytes()
    arrived = decode(data, allow_pickle=True)
    assert arrived["set"].value == {1, 2}
    assert arrived["arrays"].tolist() == [0, 1, 2]
    with pytest.raises(PayloadError, match="allow_pickle=True"):
        decode(data)
    with pytest.raises(PayloadError, match="no encoding"):
        encode({"set": {1, 2}})
    with pytest.raises(PayloadError, match="pickle refuses"):
        encode(Pickled(lambda: 1))


def test_a_pickle_that_the_header_does_not_admit_is_refused() -> None:
    data = bytearray(encode(Pickled(Plain(1))).to_bytes())
    assert payload.has_pickle(bytes(data))
    assert not payload.has_pickle(encode(1).to_bytes())
    honest = payload._LAYOUT_WITH_PICKLE
    payload._LAYOUT_WITH_PICKLE = payload._LAYOUT
    try:
        forged = encode(Pickled(Plain(1))).to_bytes()
    finally:
        payload._LAYOUT_WITH_PICKLE = honest
    with pytest.raises(PayloadError, match="does not take"):
        decode(forged, allow_pickle=True)


def test_a_pickle_that_cannot_be_read_is_a_payload_error() -> None:
    data = bytearray(encode(Pickled("x" * 100)).to_bytes())
    data[-1:] = b"\xff"
    with pytest.raises(PayloadError, match="cannot be read here"):
        decode(bytes(data), allow_pickle=True)


def test_calls_messages_and_channels_carry_them_within_a_host(trusting: tuple[Endpoint, Endpoint]) -> None:
    a, b = trusting
    b.handle("set", lambda request: Pickled(request.args.value | {3}))
    assert a.request("b", "set", "", Pickled({1})).value == {1, 3}
    sent = a.isend("b", Pickled(Plain(5)))
    assert b.recv("a", timeout_s=10).value.x == 5
    sent.result(10)
    b.host_channel("q", producers=["a"], consumers=["b"])
    a.channel("q", host="b").put(Pickled([Plain(7), np.zeros(50_000)]))
    assert b.channel("q", host="b").get(timeout_s=10).item.value[0].x == 7


def test_an_endpoint_that_does_not_allow_them_refuses(run_dir: Path) -> None:
    with (
        Endpoint(run_dir, "a", token="t", allow_pickle=True, by_reference=False) as a,
        Endpoint(run_dir, "b", token="t") as b,
    ):
        b.handle("echo", lambda request: request.args)
        with pytest.raises(RemoteError, match=r"PayloadError.*allow_pickle"):
            a.request("b", "echo", "", Pickled(1))
        b.host_channel("q", producers=["a"], consumers=["b"])
        a.channel("q", host="b").put(Pickled(1))
        lease = b.channel("q", host="b").get(timeout_s=10)
        with pytest.raises(PayloadError, match="allow_pickle"):
            _ = lease.item


def test_over_tcp_they_are_refused_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Endpoint(tmp_path / "a", "a", token="t", allow_pickle=True) as a,
        Endpoint(tmp_path / "b", "b", token="t", allow_pickle=True) as b,
    ):
        a.add_address("b", b.listen("127.0.0.1:0"))
        b.handle("echo", lambda request: request.args)
        b.host_channel("q", producers=["a"], consumers=["b"])
        refused = "pickles stay on one host"
        with pytest.raises(PayloadError, match=refused):
            a.request("b", "echo", "", Pickled(1))
        with pytest.raises(PayloadError, match=refused):
            a.channel("q", host="b").put(Pickled(1))
        # A sender that does not refuse by itself is no way in.
        monkeypatch.setattr(type(a._fabric.connection("b")), "pack", _pack_anything)
        with pytest.raises(RemoteError, match=r"PayloadError.*allow_pickle"):
            a.request("b", "echo", "", Pickled(1))
        with pytest.raises(PayloadError, match=refused):
            a.channel("q", host="b").put(Pickled(1))
        with pytest.raises(CommError):
            b.channel("q", host="b").get(timeout_s=0.05)


def _pack_anything(connection: Any, encoded: Any, deadline: Any = None) -> bytes:
    data: bytes = encoded.to_bytes()
    return data
