"""Endpoints that reach each other over gRPC: the same calls, channels and deaths, with payloads in the stream."""

import gc
import logging
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.comm import CommError, Endpoint, PayloadError, PeerLostError, Pickled, Put, RemoteError, Tls
from m2flow.comm._frames import FrameParser, Kind, ProtocolError, header
from m2flow.comm._grpc import METHOD
from m2flow.proto.comm.v1 import comm_pb2

Pair = tuple[Endpoint, Endpoint]


@pytest.fixture(params=["tcp", "unix"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path, make_endpoint: Any) -> Iterator[Pair]:
    """Two endpoints in directories of their own, `b` listening and `a` knowing where."""
    with (
        Endpoint(tmp_path / "host-a", "a", token="t", connect_timeout_s=2) as a,
        Endpoint(tmp_path / "host-b", "b", token="t") as b,
    ):
        a.add_address("b", b.listen("127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/b"))
        yield a, b


def test_calls_go_both_ways(hosts: Pair) -> None:
    a, b = hosts
    b.handle("echo", lambda request: request.args)
    a.handle("double", lambda request: request.args * 2)
    for size in (0, 10, 1 << 16, 3 << 20):
        array = np.arange(size)
        assert np.array_equal(a.request("b", "echo", "", array), array)
    assert b.request("a", "double", "", np.ones(1 << 20)).sum() == 2 << 20


def test_an_endpoint_that_is_told_its_own_address_reaches_itself_within(hosts: Pair) -> None:
    a, b = hosts
    # Where nobody listens: what is told to all may be out of date.
    a.add_address("a", "127.0.0.1:1")
    a.handle("echo", lambda request: request.args)
    assert a.request("a", "echo", "", 1, timeout_s=5) == 1
    b.stage_weights("w", 1, {"x": np.arange(1 << 16)})
    weights = a.fetch_weights("b", "w", 1, timeout_s=5)
    assert np.array_equal(weights["x"], np.arange(1 << 16))


def test_a_channel_crosses_hosts(hosts: Pair) -> None:
    a, b = hosts
    b.host_channel("q", capacity=4, producers=["a", "b"], consumers=["a", "b"])
    out, back = a.channel("q", host="b"), b.channel("q", host="b")
    out.put(np.arange(1 << 18), id="far", key="to b")
    lease = back.get(key="to b", timeout_s=5)
    assert lease.item.sum() == np.arange(1 << 18).sum()
    back.put({"x": np.ones(1 << 18)}, id="near", key="to a")
    assert out.get(key="to a", timeout_s=5).item["x"].sum() == 1 << 18


def test_large_items_of_a_network_reach_consumers_of_the_hosts_own_machine(hosts: Pair) -> None:
    a, b = hosts
    with Endpoint(b._fabric._directory.path, "c", token="t") as c:
        b.host_channel("q", producers=["a"], consumers=["b", "c"])
        a.channel("q", host="b").put_many([Put(item=np.full(1 << 18, index)) for index in range(2)])
        for consumer in (b, c):
            channel = consumer.channel("q", host="b")
            lease = channel.get(timeout_s=5)
            assert lease.item.min() == lease.item.max() == (0 if consumer is b else 1)
            channel.ack(lease)
    assert _data_left(b) == 0


def test_what_no_item_is_made_of_leaves_no_data_behind(tmp_path: Path) -> None:
    with (
        Endpoint(tmp_path / "host-a", "a", token="t") as a,
        Endpoint(tmp_path / "host-b", "b", token="t", connect_timeout_s=0.1) as b,
    ):
        a.add_address("b", b.listen("127.0.0.1:0"))
        b.host_channel("q", producers=["b"], consumers=["b"])
        large = np.ones(1 << 18)
        with pytest.raises(CommError, match="not hosted by this endpoint"):
            a.channel("none", host="b").put(large)
        with pytest.raises(CommError, match="'a' is no producer"):
            a.channel("q", host="b").put(large)
        with pytest.raises(PayloadError, match="pickles stay on one host"):
            a.channel("q", host="b").put_many([Put(item=large), Put(item=Pickled(1))])
        with pytest.raises(RemoteError, match="no service 'none'"):
            a.request("b", "none", "", large)
        assert _data_left(b) == 0


def test_what_is_refused_for_its_size_leaves_no_data_behind(tmp_path: Path) -> None:
    with (
        Endpoint(tmp_path / "a", "a", token="t") as a,
        Endpoint(tmp_path / "b", "b", token="t", max_payload_bytes=100_000) as b,
    ):
        a.add_address("b", b.listen("127.0.0.1:0"))
        b.host_channel("q", producers=["a"], consumers=["b"])
        channel = a.channel("q", host="b")
        with pytest.raises(PayloadError, match=r"got a payload of 150\d{3} bytes, want at most 100000"):
            channel.put_many([Put(bytes(150_000)), *[Put(bytes(90_000))] * 3], timeout_s=10)
        assert channel.stats(timeout_s=10).put == 0
        assert _data_left(b) == 0


def test_a_message_that_names_data_that_did_not_come_ends_its_connection(hosts: Pair) -> None:
    a, b = hosts
    b.handle("echo", lambda request: request.args)
    assert a.request("b", "echo", "", 1) == 1
    args = comm_pb2.Payload(block=comm_pb2.Block(offset_bytes=99, size_bytes=8))
    request = comm_pb2.CallRequest(service="echo", args=args).SerializeToString()
    with pytest.raises(PeerLostError):
        a._fabric.connection("b").call(Kind.CALL, request)[1].result(5)
    assert a.request("b", "echo", "", 2) == 2


class _Limits:
    body_limit = 100


@given(st.lists(st.binary(max_size=100), max_size=8), st.lists(st.integers(0, 60), max_size=20))
def test_frames_are_the_same_however_their_bytes_arrive(bodies: list[bytes], cuts: list[int]) -> None:
    sent = [(Kind.CALL, number, body) for number, body in enumerate(bodies)]
    data = memoryview(b"".join(header(kind, number, len(body)) + body for kind, number, body in sent))
    parser = FrameParser()
    found = []
    for size in [*cuts, len(data)]:
        found += list(parser.frames(data[:size], _Limits()))
        data = data[size:]
    assert found == sent
    too_long = pytest.raises(ProtocolError, match="101 bytes, want at most 100")
    with too_long:
        list(parser.frames(memoryview(header(Kind.CALL, 0, 101)), _Limits()))


def _data_left(endpoint: Endpoint) -> int:
    return sum(len(connection._data) for connection in endpoint._fabric._all)


def test_a_goodbye_crosses_hosts(hosts: Pair) -> None:
    a, b = hosts
    lost: list[str] = []
    a.on_peer_lost(lost.append)
    b.on_peer_lost(lost.append)
    b.handle("never", lambda request: Future())
    asked = a.request_async("b", "never", "")
    time.sleep(0.3)
    b.close()
    with pytest.raises(PeerLostError, match="closed its endpoint"):
        asked.result(5)
    assert lost == []


def test_a_wrong_token_is_refused_and_logged(hosts: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = hosts
    address = a._fabric._addresses["b"]
    refused = pytest.raises(CommError, match="token is not this run's")
    with Endpoint(tmp_path / "s", "s", token="other") as stranger, refused:
        stranger.add_address("b", address)
        stranger.request("b", "x", "", timeout_s=5)
    assert "refused a gRPC call" in caplog.text
    assert b.name == "b"


@pytest.mark.parametrize("metadata", [(), (("m2flow-token", "other"),)], ids=["none", "another"])
def test_every_call_without_the_token_is_refused_and_logged(
    hosts: Pair, metadata: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = hosts
    with grpc.insecure_channel(a._fabric._addresses["b"]) as channel:
        call = channel.stream_stream(METHOD)(iter([b"\x0a\x00"]), metadata=metadata, timeout=5)
        with pytest.raises(grpc.RpcError, match="token is not this run's"):
            list(call)
    assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "refused a gRPC call" in caplog.text
    assert b.name == "b"


@pytest.mark.parametrize("message", [b"", b"GET / HTTP/1.1", b"\x0a\x05hello", b"\x0a\xff\xff\xff\xff\xff"])
def test_strangers_with_the_token_harm_nobody(hosts: Pair, message: bytes) -> None:
    a, b = hosts
    b.handle("echo", lambda request: request.args)
    with grpc.insecure_channel(a._fabric._addresses["b"]) as channel:
        call = channel.stream_stream(METHOD)(iter([message]), metadata=(("m2flow-token", "t"),), timeout=5)
        try:
            list(call)
        except grpc.RpcError as error:
            logging.getLogger(__name__).info("refused: %s", error)
    assert a.request("b", "echo", "", 7) == 7


def test_nobody_at_an_address_is_a_lost_peer(tmp_path: Path) -> None:
    lost = pytest.raises(PeerLostError, match=r"no connection to 127\.0\.0\.1:9 within 0.3 s: .*Connection refused")
    with Endpoint(tmp_path / "a", "a", token="t", connect_timeout_s=0.3) as a, lost:
        a.add_address("b", "127.0.0.1:9")
        a.request("b", "x", "")


def test_a_killed_process_is_lost_over_tcp(tmp_path: Path, peer: Callable[..., Any], make_endpoint: Any) -> None:
    victim = peer("v", "endpoint.handle('s', lambda r: 1); say(endpoint.listen('127.0.0.1:0')); time.sleep(60)")
    address = victim.line()
    a = Endpoint(tmp_path / "far", "a", token="token-of-this-run")
    try:
        seen = threading.Event()
        a.on_peer_lost(lambda name: seen.set())
        a.add_address("v", address)
        assert a.request("v", "s", "", timeout_s=10) == 1
        victim.kill()
        assert seen.wait(5)
    finally:
        a.close()


def test_a_peer_that_returns_before_its_death_is_seen_is_reached(tmp_path: Path, peer: Callable[..., Any]) -> None:
    """The end that listens knows no address: it must find the connection that the restarted peer has made."""
    with Endpoint(tmp_path / "b", "b", token="token-of-this-run") as b:
        address = b.listen("127.0.0.1:0")
        text = f"""
        endpoint.close()
        endpoint = Endpoint(Path(sys.argv[1]) / str(time.monotonic_ns()), "a", token=sys.argv[3])
        endpoint.handle("who", lambda request: __import__("os").getpid())
        endpoint.add_address("b", {address!r})
        endpoint.send("b", None, timeout_s=20)
        time.sleep(60)
        """
        lost = threading.Event()
        b.on_peer_lost(lambda name: lost.set())
        lives = []
        for _ in range(2):
            lives.append(peer("a", text))
            assert b.recv("a", timeout_s=20) is None
        lives[0].kill()
        assert lost.wait(5)
        assert b.request("a", "who", "", timeout_s=5) == lives[1].process.pid


def test_what_waits_for_a_peer_that_comes_from_another_host(tmp_path: Path) -> None:
    """The end that listens looks on its own host: a receive is served all the same, a call fails and says so."""
    with Endpoint(tmp_path / "b", "b", token="t") as b, Endpoint(tmp_path / "a", "a", token="t") as a:
        received = b.irecv("a")
        called = b.request_async("a", "echo", "", 1)
        a.add_address("b", b.listen("127.0.0.1:0"))
        a.handle("echo", lambda request: request.args)
        a.send("b", "here", timeout_s=5)
        assert received.result(5) == "here"
        with pytest.raises(PeerLostError, match="it connected from another host meanwhile: call it again"):
            called.result(5)
        assert b.request("a", "echo", "", 2, timeout_s=5) == 2


def test_every_call_to_a_peer_that_restarts_is_answered_or_fails(tmp_path: Path, peer: Callable[..., Any]) -> None:
    with Endpoint(tmp_path / "a", "a", token="token-of-this-run") as a, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        a.add_address("v", f"127.0.0.1:{port}")
        text = f"""
        endpoint.handle("echo", lambda request: request.args)
        endpoint.listen("127.0.0.1:{port}")
        say("up")
        time.sleep(60)
        """
        ended, answered = threading.Event(), [0, 0, 0]
        lost: list[str] = []

        def call(caller: int) -> None:
            while not ended.is_set():
                try:
                    assert a.request("v", "echo", "", caller, timeout_s=20) == caller
                    answered[caller] += 1
                except PeerLostError as error:
                    lost.append(str(error))

        with ThreadPoolExecutor(3) as threads:
            callers = [threads.submit(call, caller) for caller in range(3)]
            for _ in range(3):
                before = list(answered)
                victim = peer("v", text)
                assert victim.line() == "up"
                while any(now == then for now, then in zip(answered, before, strict=True)):
                    assert not any(caller.done() for caller in callers), "a call vanished"
                    time.sleep(0.01)
                victim.kill()
            peer("v", text)
            ended.set()
            for caller in callers:
                caller.result(30)
        assert lost


def test_certificates_that_cannot_be_read_are_an_error_of_the_call(tmp_path: Path) -> None:
    nothing = tmp_path / "missing"
    with Endpoint(tmp_path / "a", "a", token="t", tls=Tls(nothing, nothing, nothing)) as a:
        a.add_address("b", "127.0.0.1:9")
        with pytest.raises(PeerLostError, match=r"cannot be dialled: .*missing"):
            a.request("b", "x", "", timeout_s=10)


def test_a_second_listener_at_an_address_is_refused_and_the_first_goes_on(
    hosts: Pair, peer: Callable[..., Any]
) -> None:
    a, b = hosts
    b.handle("echo", lambda request: request.args)
    address = a._fabric._addresses["b"]
    text = f"""
    try:
        endpoint.listen({address!r})
    except CommError as error:
        say(error)
    """
    refused = rf"cannot listen at '{address}', (where somebody listens, )?want a p(ort|ath) of .*: "
    assert re.match(refused, peer("another", text).line())
    with pytest.raises(CommError, match=refused):
        b.listen(address)
    assert a.request("b", "echo", "", 1, timeout_s=5) == 1


def test_a_socket_that_nobody_listens_at_any_more_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    with Endpoint(tmp_path / "b", "b", token="t") as b, Endpoint(tmp_path / "a", "a", token="t") as a:
        a.add_address("b", b.listen(f"unix:{tmp_path}/s"))
        b.handle("echo", lambda request: request.args)
        assert a.request("b", "echo", "", 1, timeout_s=5) == 1


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x", "::1:70", ":0", "unix:", "tcp://a:1"]
)
def test_an_address_without_a_port_that_can_be_is_refused(hosts: Pair, address: str) -> None:
    a, b = hosts
    refused = pytest.raises(ValueError, match=rf"got address '{address}', want HOST:PORT .*unix:PATH")
    with refused:
        b.listen(address)
    if address:
        # Without one a peer is in this host's directory.
        with refused:
            a.add_address("c", address)


def test_a_proxy_is_not_asked_for_the_way_to_a_peer(hosts: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = hosts
    b.handle("echo", lambda request: request.args)
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        # Where nobody listens.
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert a.request("b", "echo", "", 1, timeout_s=5) == 1


def test_an_endpoint_listens_at_all_its_addresses_until_it_is_closed(tmp_path: Path) -> None:
    with Endpoint(tmp_path / "b", "b", token="t") as b:
        b.handle("echo", lambda request: request.args)
        addresses = [b.listen("127.0.0.1:0"), b.listen(f"unix:{tmp_path}/s")]
        gc.collect()
        for number, address in enumerate(addresses):
            with Endpoint(tmp_path / f"a{number}", "a", token="t", connect_timeout_s=2) as a:
                a.add_address("b", address)
                assert a.request("b", "echo", "", number, timeout_s=5) == number
    with pytest.raises(CommError, match="endpoint 'b' is closed"):
        b.listen("127.0.0.1:0")
    # A process that is told where others are may have closed its own end.
    b.add_address("c", "127.0.0.1:1")


def certificates(directory: Path, authority: str) -> Tls:
    """Makes an authority and a certificate that it signs."""

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=directory)

    key, name = f"{authority}.key", f"{authority}.crt"
    run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key,
        "-out", name, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")  # fmt: skip
    return Tls(directory / name, directory / key, directory / name)


def test_certificates_that_will_not_do_are_named_where_it_listens(tmp_path: Path) -> None:
    ours, theirs, nothing = certificates(tmp_path, "ours"), certificates(tmp_path, "theirs"), tmp_path / "missing"
    for tls, words in (
        (Tls(nothing, nothing, nothing), "missing"),
        (Tls(ours.certificate, theirs.key, ours.authority), "and a certificate, its key and an authority"),
    ):
        refused = pytest.raises(CommError, match=f"cannot listen at '127.0.0.1:0'.*{words}")
        with Endpoint(tmp_path / "a", "a", token="t", tls=tls) as a, refused:
            a.listen("127.0.0.1:0")


def test_mutual_tls_lets_in_only_who_shows_a_certificate(tmp_path: Path) -> None:
    ours, theirs = certificates(tmp_path, "ours"), certificates(tmp_path, "theirs")
    server_hangs_up = "it hung up, as a server does that gets no certificate of its authority"
    strangers = {
        "x": (Tls(theirs.certificate, theirs.key, ours.authority), server_hangs_up),
        "y": (None, server_hangs_up),
        "z": (Tls(ours.certificate, ours.key, theirs.authority), "CERTIFICATE_VERIFY_FAILED"),
    }
    with ExitStack() as stack:
        b, a = (stack.enter_context(Endpoint(tmp_path / name, name, token="t", tls=ours)) for name in "ba")
        b.handle("echo", lambda request: request.args)
        address = b.listen("localhost:0")
        a.add_address("b", address)
        assert a.request("b", "echo", "", 5) == 5
        asked = {}
        for name, (tls, words) in strangers.items():
            end = stack.enter_context(Endpoint(tmp_path / name, name, token="t", tls=tls, connect_timeout_s=1))
            end.add_address("b", address)
            asked[words, name] = end.request_async("b", "echo", "", 5)
        for (words, _), answer in asked.items():
            with pytest.raises(PeerLostError, match=f"no connection to localhost:.* within 1 s: .*{words}"):
                answer.result(10)


def test_who_sends_to_an_end_that_is_busy_waits_instead_of_filling_either_ends_memory(tmp_path: Path) -> None:
    with Endpoint(tmp_path / "host-a", "a", token="t") as a, Endpoint(tmp_path / "host-b", "b", token="t") as b:
        a.add_address("b", b.listen(f"unix:{tmp_path}/b"))
        b.handle("size", lambda request: len(request.args))
        item = bytes(1 << 20)
        assert a.request("b", "size", "", item) == len(item)
        going_on = threading.Event()
        b._fabric.loop.call(going_on.wait)
        answers: list[Future[Any]] = []

        def flood() -> None:
            answers.extend(a.request_async("b", "size", "", item) for _ in range(64))

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            thread.join(0.5)
            # What may wait at either end, and what is in between.
            assert thread.is_alive()
            assert len(answers) < 32
        finally:
            going_on.set()
        thread.join(20)
        assert [answer.result(20) for answer in answers] == [len(item)] * 64
