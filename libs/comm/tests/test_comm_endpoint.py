"""Endpoints: calls, answers, refusals, and peers that die."""

import contextlib
import gc
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from m2flow.comm import (
    CommError,
    Endpoint,
    PayloadError,
    PeerLostError,
    RemoteError,
    Request,
    TimeoutError_,
    _handshake,
    encode,
)
from m2flow.comm._frames import Kind, header
from m2flow.comm._loop import WRITE
from m2flow.comm._replies import Reply
from m2flow.comm._unix import UnixLink
from m2flow.comm.collectives import Handle


def test_a_call_is_answered(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("echo", lambda request: (request.peer, request.service, request.method, request.args))
    assert a.request("b", "echo", "say", {"x": 1}) == ("a", "echo", "say", {"x": 1})
    a.handle("back", lambda request: request.args)
    assert b.request("a", "back", "say", [2]) == [2]


def test_an_endpoint_can_call_itself(make_endpoint: Any) -> None:
    a = make_endpoint("a")
    a.handle("echo", lambda request: request.args)
    assert a.request("a", "echo", "", np.arange(100_000))[-1] == 99_999


def test_large_arrays_arrive_and_their_memory_comes_back(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("sum", lambda request: request.args.sum())
    array = np.arange(1 << 20)
    for _ in range(10):
        assert a.request("b", "sum", "", array) == array.sum()
    assert a._fabric.pool.size_bytes <= 3 * (10 << 20)


def test_a_remote_error_keeps_its_words(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")

    def fail(request: Request) -> None:
        raise KeyError("the words")

    b.handle("fail", fail)
    with pytest.raises(RemoteError, match="KeyError in 'b': 'the words'") as caught:
        a.request("b", "fail", "")
    assert "in fail" in caught.value.traceback


def test_an_answer_that_cannot_be_encoded_is_the_callers_error(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("odd", lambda request: object())
    with pytest.raises(RemoteError, match="PayloadError"):
        a.request("b", "odd", "")


def test_args_that_cannot_be_encoded_fail_at_once(make_endpoint: Any) -> None:
    a = make_endpoint("a")
    with pytest.raises(PayloadError):
        a.request("nobody", "x", "", object())


def test_a_handler_may_answer_later_without_a_thread(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    promised: list[Future[Any]] = []

    def later(request: Request) -> Future[Any]:
        promised.append(Future())
        return promised[-1]

    b.handle("later", later)
    asked = [a.request_async("b", "later", "", index) for index in range(50)]
    while len(promised) < 50:
        time.sleep(0.01)
    for index, future in enumerate(promised):
        future.set_result(index)
    assert [future.result(5) for future in asked] == list(range(50))
    failing = a.request_async("b", "later", "")
    while len(promised) < 51:
        time.sleep(0.01)
    promised[-1].set_exception(ValueError("no"))
    with pytest.raises(RemoteError, match="ValueError"):
        failing.result(5)


def test_calls_of_one_peer_and_service_run_in_order(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    seen: list[int] = []
    b.handle("note", lambda request: seen.append(request.args))
    for future in [a.request_async("b", "note", "", index) for index in range(300)]:
        future.result(5)
    assert seen == list(range(300))


def test_a_slow_service_does_not_stop_another(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    release = threading.Event()
    b.handle("slow", lambda request: release.wait(10))
    b.handle("fast", lambda request: "done")
    slow = a.request_async("b", "slow", "")
    assert a.request("b", "fast", "", timeout_s=5) == "done"
    release.set()
    assert slow.result(5) is True


def test_handlers_that_keep_all_threads_hold_up_nothing_else(make_endpoint: Any, peer: Any) -> None:
    # Whose quota no long answer fits into: it goes in its message.
    a, b = make_endpoint("a"), make_endpoint("b", quota_bytes=1 << 16)
    a.stage_weights("w", 1, {"x": np.ones(10)})
    b.handle("long", lambda request: bytes(1 << 20))
    b.handle("m", lambda request: 1, prompt=True)
    lost, begun, ended, later = threading.Event(), threading.Semaphore(0), threading.Event(), Future[int]()
    a.on_peer_lost(lambda name: lost.set())
    a.handle("later", lambda request: later)
    answer = b.request_async("a", "later", "")

    def keep(request: Request) -> None:
        begun.release()
        ended.wait(20)

    for number in range(8):
        a.handle(f"keep{number}", keep)
    kept = [b.request_async("a", f"keep{number}", "") for number in range(8)]
    try:
        for _ in range(8):
            assert begun.acquire(timeout=10)
        assert b.fetch_weights("a", "w", 1, timeout_s=5)["x"].sum() == 10
        assert len(a.request_async("b", "long", "").result(5)) == 1 << 20
        later.set_result(7)
        assert answer.result(5) == 7
        victim = peer("v", "say(endpoint.request('b', 'm', '')); endpoint.handle('s', lambda r: 1); time.sleep(60)")
        assert victim.line() == "1"
        assert a.request("v", "s", "", timeout_s=10) == 1
        victim.kill()
        assert lost.wait(5)
    finally:
        ended.set()
    for call in kept:
        call.result(10)


def test_a_timeout_names_the_call_the_peer_and_the_seconds(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("never", lambda request: Future())
    with pytest.raises(TimeoutError_, match=r"never\.go.*waited 0\.\d+ s for b") as caught:
        a.request("b", "never", "go", timeout_s=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.elapsed_s >= 0.1


def test_a_peer_that_appears_late_is_waited_for(make_endpoint: Any) -> None:
    a = make_endpoint("a")
    asked = a.request_async("b", "echo", "", 5)
    time.sleep(0.1)
    make_endpoint("b").handle("echo", lambda request: request.args)
    assert asked.result(5) == 5


def test_a_peer_that_never_appears_is_lost(run_dir: Path) -> None:
    lost = pytest.raises(PeerLostError, match="'nobody' is lost: no endpoint of this name")
    with Endpoint(run_dir, "a", token="t", connect_timeout_s=0.1) as a, lost:
        a.request("nobody", "x", "")


def test_a_service_or_channel_that_never_appears_is_refused_by_name(run_dir: Path) -> None:
    with Endpoint(run_dir, "a", token="t", connect_timeout_s=0.1) as a:
        with pytest.raises(RemoteError, match="no service 'other' here, want one of"):
            a.request("a", "other", "")
        with pytest.raises(CommError, match="channel 'q': it is not hosted by this endpoint"):
            a.channel("q", host="a").get()
        with pytest.raises(CommError, match="channel 'q': it is not hosted by this endpoint"):
            a.channel("q", host="a").put(np.ones(100_000))
        a._fabric.pool.trim()
        assert a._fabric.pool.size_bytes == 0, "what was refused still holds memory"


def test_names_are_unique_and_taken_over_from_the_dead(make_endpoint: Any, peer: Any) -> None:
    make_endpoint("a")
    with pytest.raises(CommError, match="names are unique"):
        make_endpoint("a")
    dead = peer("b", "say('ready'); time.sleep(60)")
    assert dead.line() == "ready"
    dead.kill()
    make_endpoint("b").handle("echo", lambda request: "new")
    assert make_endpoint("c").request("b", "echo", "") == "new"


@pytest.mark.parametrize("name", ["", "a/b", ".", "x" * 65, "a b", 5])
def test_odd_names_are_refused(run_dir: Path, name: Any) -> None:
    with pytest.raises(ValueError, match="endpoint name"):
        Endpoint(run_dir, name, token="t")


def test_an_odd_name_of_a_peer_is_refused_each_time_and_nothing_is_kept_of_it(make_endpoint: Any) -> None:
    a = make_endpoint("a")
    q = a.channel("q", host="b/0")
    for ask in (lambda: a.request("b/0", "s", ""), lambda: q.put(1), lambda: a.recv("b/0"), lambda: a.send("b/0", 1)):
        for _ in range(2):
            with pytest.raises(ValueError, match="got endpoint name 'b/0', want 1 to 64 of"):
                ask()
    with pytest.raises(ValueError, match="got endpoint name 'b/0'"):
        a.add_address("b/0", "127.0.0.1:1")
    assert a._fabric._all == set()
    assert a._fabric.mailbox.num_states() == 0


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="mode 0o700"):
        Endpoint(tmp_path, "a", token="t")


def test_a_deep_directory_is_no_problem(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    with Endpoint(deep, "a", token="t") as a, Endpoint(deep, "b", token="t") as b:
        b.handle("echo", lambda request: request.args)
        assert a.request("b", "echo", "", 1) == 1
    assert list(deep.iterdir()) == []
    assert stat.S_IMODE(deep.stat().st_mode) == 0o700


def test_a_wrong_token_is_refused_and_logged(make_endpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    make_endpoint("a")
    stranger = make_endpoint("s", token="another")
    with pytest.raises(CommError, match="refuses this end: its token is not this run's"):
        stranger.request("a", "x", "")
    assert "refused a connection" in caplog.text
    assert "another" not in caplog.text


@pytest.mark.parametrize("token", ["", "Schlüssel", "two\nlines"])
def test_a_token_that_will_not_do_is_refused(run_dir: Path, token: str) -> None:
    with pytest.raises(ValueError, match=r"got a.* token.*, want a secret such as"):
        Endpoint(run_dir, "a", token=token)


def test_no_call_goes_out_ahead_of_the_hello(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("echo", lambda request: request.args)
    dialling, hello = threading.Event(), _handshake.Identity.hello

    def slow_hello(identity: _handshake.Identity) -> bytes:
        dialling.set()
        time.sleep(0.1)
        return hello(identity)

    monkeypatch.setattr(_handshake.Identity, "hello", slow_hello)
    answers: list[int] = []
    first = threading.Thread(target=lambda: answers.append(a.request("b", "echo", "", 1, timeout_s=10)))
    first.start()
    assert dialling.wait(10)
    assert a.request("b", "echo", "", 2, timeout_s=10) == 2
    first.join()
    assert answers == [1]


def test_another_version_is_refused_with_both_named(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    hello = a._fabric.identity.hello().replace(b"\x01" + _handshake.VERSION.encode(), b"\x01" + b"9", 1)
    monkeypatch.setattr(type(a._fabric.identity), "hello", lambda identity: hello)
    with pytest.raises(CommError, match=r"version 3.*speaks version '9' and this end '3'"):
        a.request("b", "x", "")
    assert b.name == "b"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 3,
        header(Kind.CALL, 1, 1) + b"x",
        header(Kind.HELLO, 0, 3) + b"\xff\xff\xff",
        b"\xff\xff\xff\xff\x01" + bytes(11),
        b"",
    ],
    ids=["http", "call first", "no message", "too long", "nothing"],
)
def test_strangers_harm_nobody(make_endpoint: Any, run_dir: Path, data: bytes) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("echo", lambda request: request.args)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(os.path.relpath(run_dir / "b.sock"))
        stranger.settimeout(10)
        stranger.sendall(data)
        if not data:
            stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    assert a.request("b", "echo", "", 7) == 7


def test_a_death_is_seen_by_those_who_wait_and_reported_once(make_endpoint: Any, peer: Any) -> None:
    a = make_endpoint("a")
    lost: list[str] = []
    seen = threading.Event()
    a.on_peer_lost(lambda name: (lost.append(name), seen.set()))
    victim = peer(
        "v",
        """
        endpoint.handle("never", lambda request: __import__("concurrent.futures").futures.Future())
        endpoint.request("a", "hello", "")
        time.sleep(60)
        """,
    )
    called = threading.Event()
    a.handle("hello", lambda request: called.set())
    assert called.wait(40)
    asked = a.request_async("v", "never", "")
    time.sleep(0.05)
    started = time.monotonic()
    victim.kill()
    with pytest.raises(PeerLostError, match="'v' is lost") as caught:
        asked.result(5)
    assert caught.value.peer == "v"
    assert time.monotonic() - started < 3
    assert seen.wait(20)
    time.sleep(0.05)
    assert lost == ["v"]


@pytest.fixture(params=["local", "unix", "grpc"])
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Endpoint, Endpoint, str]]:
    """Endpoints "a" and "b" that are linked each way there is; b takes payloads of 100 kB."""
    by_reference, remote = request.param == "local", request.param == "grpc"
    with (
        Endpoint(tmp_path / "a", "a", token="t", by_reference=by_reference) as a,
        Endpoint(
            tmp_path / ("b" if remote else "a"), "b", token="t", by_reference=by_reference, max_payload_bytes=100_000
        ) as b,
    ):
        if remote:
            a.add_address("b", b.listen("127.0.0.1:0"))
        yield a, b, request.param


def test_a_frame_that_this_end_fails_at_ends_the_connection_and_no_other_frame_waits(
    linked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, _ = linked
    b.handle("echo", lambda request: request.args)
    assert a.request("b", "echo", "", 1) == 1

    def fail(connection: Any, request_id: int, body: bytes) -> None:
        raise IndexError("our own defect")

    b._fabric._on_frame[Kind.CHANNEL] = fail
    connection = a._fabric.connection("b")
    with pytest.raises(PeerLostError):
        a.channel("q", host="b").stats()
    assert "IndexError: our own defect" in caplog.text
    assert a.request("b", "echo", "", 2, timeout_s=10) == 2
    assert a._fabric.connection("b") is not connection


def test_a_payload_above_the_limit_is_refused(linked: Any) -> None:
    a, b, link = linked
    b.handle("size", lambda request: len(request.args))
    assert a.request("b", "size", "", bytes(90_000)) == 90_000
    # Where it comes as a frame, the connection ends only for one that is longer than any message needs to be.
    with pytest.raises(RemoteError, match=r"got a payload of 150\d{3} bytes, want at most 100000"):
        a.request("b", "size", "", bytes(150_000), timeout_s=10)
    # Over gRPC before any of it is kept: there it is a frame.
    error, reason = (PeerLostError, "'b' is lost") if link == "grpc" else (RemoteError, "got .* want at most 100000")
    with pytest.raises(error, match=reason):
        a.request("b", "size", "", bytes(200_000), timeout_s=10)
    if link == "unix":
        with pytest.raises(error, match=reason):
            a.send("b", bytes(200_000), timeout_s=10)
    assert a.request("b", "size", "", bytes(90_000), timeout_s=10) == 90_000


@pytest.mark.parametrize("remote", [False, True], ids=["unix", "grpc"])
def test_an_answer_far_above_the_limit_ends_its_connection_where_it_comes_as_bytes(
    tmp_path: Path, remote: bool
) -> None:
    with (
        Endpoint(tmp_path / "a", "a", token="t", quota_bytes=1 << 16) as a,
        Endpoint(
            tmp_path / ("b" if remote else "a"), "b", token="t", by_reference=False, max_payload_bytes=100_000
        ) as b,
    ):
        if remote:
            a.add_address("b", b.listen("127.0.0.1:0"))
        a.handle("zeros", lambda request: bytes(request.args))
        b.handle("greet", lambda request: None)
        a.request("b", "greet", "", timeout_s=10)
        assert len(b.request("a", "zeros", "", 90_000, timeout_s=10)) == 90_000
        connection = a._fabric.connection("b")
        with pytest.raises(PayloadError, match=r"got a payload of 150\d{3} bytes, want at most 100000"):
            b.request("a", "zeros", "", 150_000, timeout_s=10)
        with pytest.raises(PeerLostError, match=r"'a' is lost: got a frame of 200\d{3} bytes, want at most 165536"):
            b.request("a", "zeros", "", 200_000, timeout_s=10)
        assert wait_until(lambda: connection._lost is not None)
        # Which connects it again.
        a.request("b", "greet", "", timeout_s=10)
        assert len(b.request("a", "zeros", "", 90_000, timeout_s=10)) == 90_000


def test_what_a_lost_connection_has_taken_back_may_be_taken_back_again(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("echo", lambda request: request.args)
    a.request("b", "echo", "")
    connection = a._fabric.connection("b")
    packed = connection.pack(encode(np.zeros(100_000)))
    b.close()
    assert wait_until(lambda: connection._lost is not None)
    connection.take_back([packed])
    assert a._fabric.pool._slabs == {} or not any(slab.slots_in_use for slab in a._fabric.pool._slabs.values())


def test_a_goodbye_is_no_death(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    lost: list[str] = []
    a.on_peer_lost(lost.append)
    b.handle("never", lambda request: Future())
    asked = a.request_async("b", "never", "")
    time.sleep(0.05)
    b.close()
    with pytest.raises(PeerLostError, match="closed its endpoint"):
        asked.result(5)
    assert lost == []


LIVES = """
import gc, os, sys, threading, time
from pathlib import Path
from types import FrameType
import numpy as np
from m2flow.comm import CommError, Endpoint

def state():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))

def live():
    with Endpoint(Path(sys.argv[1]), "a", token="t") as a, Endpoint(Path(sys.argv[1]), "b", token="t") as b:
        b.handle("echo", lambda request: request.args)
        a.request("b", "echo", "", np.zeros(100_000))
    try:
        a.request("b", "echo", "")
    except CommError as error:
        assert "is closed" in str(error)

live()  # what a process opens once, with its first endpoint, is not counted
gc.collect()
before = state()
for _ in range(3):
    live()
gc.collect()
deadline = time.monotonic() + 10
while not all(now <= then for now, then in zip(state(), before)) and time.monotonic() < deadline:
    time.sleep(0.01)
    gc.collect()  # a thread that ended meanwhile may have been the last to hold a circle
assert all(now <= then for now, then in zip(state(), before)), (state(), before)
"""


@pytest.mark.medium
def test_a_closed_endpoint_leaves_no_thread_socket_or_descriptor(run_dir: Path) -> None:
    """In a process of its own: what other tests leave to the collector is not counted."""
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(run_dir)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(run_dir.iterdir()) == []


def test_a_run_on_one_host_has_no_tcp_socket(peer: Any) -> None:
    host = peer(
        "host",
        """
        endpoint.host_channel("q", producers=["other"], consumers=["host"])
        endpoint.stage_weights("w", 1, {"x": np.ones(1 << 16)})
        say(endpoint.channel("q", host="host").get().item.size)
        sys.stdin.readline()
        say(endpoint.listen("127.0.0.1:0"))
        time.sleep(60)
        """,
    )
    other = peer(
        "other",
        """
        endpoint.channel("q", host="host").put(np.ones(1 << 16))
        say(endpoint.fetch_weights("host", "w", 1)["x"].size)
        time.sleep(60)
        """,
    )
    pids = [host.process.pid, other.process.pid]
    assert [host.line(), other.line()] == ["65536", "65536"]
    assert [_tcp_sockets(pid) for pid in pids] == [set(), set()]
    # What is looked for is found where there is one.
    host.process.stdin.write("\n")
    host.process.stdin.flush()
    assert host.line().startswith("127.0.0.1:")
    assert [len(_tcp_sockets(pid)) for pid in pids] == [1, 0]


def _tcp_sockets(pid: int) -> set[str]:
    """The descriptors of a process that are TCP sockets, by their inodes."""
    held = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    return held & {f"socket:[{line.split()[9]}]" for line in lines}


def test_a_forked_child_does_not_hide_its_parents_death(make_endpoint: Any, peer: Any) -> None:
    a = make_endpoint("a")
    seen = threading.Event()
    a.on_peer_lost(lambda name: seen.set())
    called = threading.Event()
    a.handle("hello", lambda request: called.set())
    parent = peer(
        "parent",
        """
        import os, warnings
        endpoint.request("a", "hello", "")
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        say("forked")
        time.sleep(60)
        """,
    )
    assert parent.line() == "forked"
    parent.kill()
    assert seen.wait(2.5)


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_sending_to_a_stopped_peer_waits_instead_of_growing(make_endpoint: Any, peer: Any) -> None:
    a = make_endpoint("a")
    stopped = peer("s", "import os, signal; say('up'); os.kill(os.getpid(), signal.SIGSTOP)")
    assert stopped.line() == "up"
    sent = 0
    done = threading.Event()

    def flood() -> None:
        nonlocal sent
        try:
            for _ in range(2000):
                a.request_async("s", "x", "", bytes(20_000))
                sent += 1
        except CommError:
            pass
        done.set()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    assert not done.wait(0.7)
    assert 300 < sent < 1000
    stopped.kill()
    assert done.wait(40)


def test_time_outs_hold_and_name_the_peer_while_the_quota_is_used_up(make_endpoint: Any) -> None:
    full, reader = make_endpoint("full", quota_bytes=3 << 20), make_endpoint("reader")
    array = np.zeros(1 << 17)
    kept = [full.isend("reader", array) for _ in range(2)]
    full.handle("poke", lambda _: full.isend("reader", array), prompt=True)
    with pytest.raises(TimeoutError_, match=r"'x\.y': waited 0\.\d+ s for reader, who reads .* to let go of"):
        full.request("reader", "x", "y", array, timeout_s=0.05)
    with pytest.raises(TimeoutError_, match=r"'send mail': waited 0\.\d+ s for reader, who reads"):
        full.send("reader", array, tag="mail", timeout_s=0.05)
    with pytest.raises(RemoteError, match="TimeoutError_"):
        reader.request("full", "poke", "", timeout_s=5)
    assert not any(sent.done() for sent in kept)


def test_a_call_that_no_message_can_name_costs_no_memory(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    with pytest.raises(ValueError, match=r"got 'm2flow\.mail' and 3 for 'b', want two strs"):
        a.send("b", np.zeros(1 << 17), tag=3)
    assert a._fabric.connection("b")._lent == {}
    assert b.name == "b"


def test_an_answer_finds_its_reader_however_soon_it_comes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, ready, woken = UnixLink._begin_waiting, UnixLink._ready, []

    def begin_late(link: UnixLink, awaited: Any) -> bool:
        time.sleep(0.02)
        return begin(link, awaited)

    def see(link: UnixLink, events: int) -> None:
        woken.append(link)
        ready(link, events)

    monkeypatch.setattr(UnixLink, "_ready", see)
    with (
        Endpoint(run_dir, "a", token="t", by_reference=False) as a,
        Endpoint(run_dir, "b", token="t", by_reference=False) as b,
    ):
        b.handle("echo", lambda request: request.args, prompt=True)
        a.request("b", "echo", "")
        woken.clear()
        monkeypatch.setattr(UnixLink, "_begin_waiting", begin_late)
        for number in range(5):
            assert a.request("b", "echo", "", number) == number
        assert woken
        assert a._fabric.connection("b").link not in woken, "an answer came before the thread that waits for it"


def test_a_keyboard_interrupt_at_any_line_leaves_a_socket_to_others(run_dir: Path) -> None:
    step, lines = 0, 0

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code is not UnixLink.read_until.__code__:
            return None
        if event == "line":
            lines += 1
            if lines == step:
                raise KeyboardInterrupt
        return interrupt

    def echo() -> None:
        assert a.request("b", "echo", "", 1, timeout_s=2) == 1

    with (
        Endpoint(run_dir, "a", token="t", by_reference=False) as a,
        Endpoint(run_dir, "b", token="t", by_reference=False) as b,
    ):
        b.handle("echo", lambda request: time.sleep(0.005) or request.args)
        echo()
        tracing = sys.gettrace()
        while lines == step:
            step, lines = step + 1, 0
            try:
                sys.settrace(interrupt)
                echo()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(tracing)
            echo()
    assert step > 5


@pytest.mark.parametrize("by_reference", [True, False], ids=["local", "socket"])
def test_an_answer_that_is_too_large_for_who_waits_no_longer_ends_nothing(run_dir: Path, by_reference: bool) -> None:
    answer: Future[Any] = Future()
    with (
        Endpoint(run_dir, "a", token="t", by_reference=by_reference, max_payload_bytes=1 << 17) as a,
        Endpoint(run_dir, "b", token="t", by_reference=by_reference) as b,
    ):
        b.handle("s", lambda request: answer if request.method == "late" else None)
        with pytest.raises(TimeoutError_):
            a.request("b", "s", "late", timeout_s=0.01)
        cancelled = a.request_async("b", "s", "late")
        assert cancelled.cancel()
        connection = a._fabric.connection("b")
        answer.set_result(np.zeros(1 << 18, np.uint8))
        deadline = time.monotonic() + 5
        while connection._calls and time.monotonic() < deadline:
            time.sleep(0.001)
        assert a.request("b", "s", "m", timeout_s=5) is None
        assert a._fabric.connection("b") is connection


def test_a_request_that_is_interrupted_gives_its_answers_memory_back(
    make_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(reply: Reply, timeout_s: float | None = None) -> bytes:
        reply._ask()
        raise KeyboardInterrupt

    a, b = make_endpoint("a"), make_endpoint("b")
    answer: Future[Any] = Future()
    b.handle("s", lambda request: answer)
    with monkeypatch.context() as patch:
        patch.setattr(Reply, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            a.request("b", "s", "m")
    answer.set_result(np.zeros(1 << 18, np.uint8))
    deadline = time.monotonic() + 5
    while a._fabric.connection("b")._calls and time.monotonic() < deadline:
        time.sleep(0.001)
    while (lent := [c._lent for c in b._fabric._all if c._lent]) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not lent


def test_who_has_said_no_hello_hears_no_goodbye(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        with Endpoint(run_dir, "a", token="t") as a:
            stranger.connect(str(next(run_dir.rglob("a*"))))
            deadline = time.monotonic() + 5
            while not a._fabric._all and time.monotonic() < deadline:
                time.sleep(0.001)
        assert stranger.recv(100) == b""


def test_who_closes_while_it_is_greeted_says_goodbye(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, closing = make_endpoint("caller"), make_endpoint("closing")
    lost: list[str] = []
    caller.on_peer_lost(lost.append)
    met, closed = threading.Event(), threading.Event()
    meet = closing._fabric._meet

    def meet_slowly(connection: Any, hello: bytes) -> None:
        meet(connection, hello)
        met.set()
        closed.wait(5)

    monkeypatch.setattr(closing._fabric, "_meet", meet_slowly)
    going = caller.request_async("closing", "service", "")
    assert met.wait(5)
    thread = threading.Thread(target=closing.close)
    thread.start()
    assert wait_until(lambda: closing._fabric._closed)
    time.sleep(0.05)
    closed.set()
    with pytest.raises(PeerLostError, match="it closed its endpoint"):
        going.result(5)
    thread.join(5)
    assert lost == []


def test_what_came_with_a_frame_that_an_interrupt_ends_is_dealt_with(make_endpoint: Any) -> None:
    waits, calls = make_endpoint("waits"), make_endpoint("calls")
    answers: list[Any] = []

    def interrupt(request: Any) -> None:
        raise KeyboardInterrupt

    def call_back(request: Any) -> Any:
        # Sent while the other end is busy with the first, so that it reads the last two at once.
        answers.append(calls.request_async("waits", "slow", ""))
        for service in ("interrupts", "third"):
            answers.append(calls.request_async("waits", service, ""))
        return Future()

    waits.handle("slow", lambda _: time.sleep(0.3), prompt=True)
    waits.handle("interrupts", interrupt, prompt=True)
    waits.handle("third", lambda _: 3, prompt=True)
    calls.handle("call back", call_back)
    calls.handle("greet", lambda _: None)
    # Only whom it knows does a thread that waits read from.
    waits.request("calls", "greet", "", timeout_s=5)
    with pytest.raises(KeyboardInterrupt):
        waits.request("calls", "call back", "", timeout_s=5)
    assert answers[2].result(2) == 3


def test_polling_for_an_answer_costs_it_nothing(make_endpoint: Any) -> None:
    asks, answers = make_endpoint("asks"), make_endpoint("answers")
    answers.handle("later", lambda _: Future())
    answer = asks.request_async("answers", "later", "")
    for _ in range(20):
        with pytest.raises(TimeoutError):
            answer.result(0.001)
    assert len(answer._done_callbacks) <= 2


class LeftByACtrlC(set[int]):
    """A set whose `discard` a KeyboardInterrupt follows, once."""

    armed = True

    def discard(self, value: int) -> None:
        super().discard(value)
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


def test_what_is_sent_after_an_interrupt_goes_out(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("echo", lambda request: request.args)
    assert a.request("b", "echo", "", 1) == 1
    a._fabric.loop.readers = LeftByACtrlC()
    with pytest.raises(KeyboardInterrupt):
        a.request("b", "echo", "", 2)
    came = b.irecv("a")
    a.isend("b", 3)
    assert wait_until(came.done)


def test_an_interrupt_that_comes_as_frames_go_out_sends_none_twice(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    calls: list[int] = []
    b.handle("count", lambda request: calls.append(request.args))
    a.request("b", "count", "", 1)
    connection = a._fabric.connection("b")
    taken = connection.link._taken

    def interrupted(sent: int) -> None:
        connection.link._taken = taken
        raise KeyboardInterrupt

    # It goes out by way of what was put off.
    connection.link._taken = interrupted
    connection.link._dealing_thread = threading.get_ident()
    asked = a.request_async("b", "count", "", 2)
    connection.link._dealing_thread = 0
    with pytest.raises(KeyboardInterrupt):
        connection.link._ready(WRITE)
    # Whether it was sent nobody knows.
    with contextlib.suppress(PeerLostError):
        asked.result(5)
    assert wait_until(lambda: connection._lost is not None)
    assert a.request("b", "count", "", 3, timeout_s=10) is None
    assert sorted(calls) in ([1, 2, 3], [1, 3])


def test_a_recv_that_is_interrupted_takes_no_message(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Handle, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            a.recv("b")
    sent = b.isend("a", 7)
    assert a.recv("b", timeout_s=5) == 7
    sent.result(5)


def test_a_closed_endpoint_leaves_nothing_to_the_cycle_collector(make_endpoint: Any) -> None:
    def use(number: int) -> None:
        a, b = make_endpoint(f"a{number}"), make_endpoint(f"b{number}")
        a.host_channel("c", producers=[b.name], consumers=[b.name])
        a.stage_weights("w", 1, {"x": np.ones(100_000)})
        weights = b.fetch_weights(a.name, "w", 1)
        for _ in range(2):
            b.channel("c", host=a.name).put(np.ones(100_000))
        lease = b.channel("c", host=a.name).get()
        assert lease.item.sum() == weights["x"].sum() == 100_000
        a.close()
        b.close()

    use(0)
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1, 4):
            use(number)
        # Soon: a handler's thread may be about to let go of a connection.
        assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        gc.enable()


def test_a_limit_below_what_may_come_in_a_message_is_refused(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="got max_payload_bytes 20000, want 32768 or more"):
        Endpoint(run_dir, "a", token="t", max_payload_bytes=20_000)
