"""Peers that take nothing of what they are sent: time-outs hold, others are answered, and memory stays bounded."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from m2flow.comm import Endpoint, PeerLostError, Put, TimeoutError_, _asked, _connection, _fabric, _grpc
from m2flow.comm._connection import HIGH_WATER_BYTES
from m2flow.comm._deadline import Deadline
from m2flow.comm._line import Line
from m2flow.comm.collectives import RankGroup, move_rows

BODY = bytes(30_000)


@pytest.fixture
def stop() -> Iterator[Callable[[Endpoint], threading.Event]]:
    """Stops an endpoint's io thread until the event is set, or the test is over."""
    held: list[threading.Event] = []

    def stop_one(endpoint: Endpoint) -> threading.Event:
        event, stopped = threading.Event(), threading.Event()
        held.append(event)
        endpoint._fabric.loop.call(lambda: stopped.set() or event.wait(20))
        assert stopped.wait(5)
        return event

    yield stop_one
    for event in held:
        event.set()


@pytest.fixture(params=["local", "unix", "grpc"])
def behind(
    request: pytest.FixtureRequest, tmp_path: Path, stop: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Endpoint]:
    """An endpoint that has more than 8 MiB for "b", which hosts channel "q" and is stopped."""
    for module in (_fabric, _grpc):
        monkeypatch.setattr(module, "_GOODBYE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(_asked, "_CANCEL_TIMEOUT_S", 0.1)
    by_reference, remote = request.param == "local", request.param == "grpc"
    with ExitStack() as ends:
        a = Endpoint(tmp_path / "a", "a", token="t", by_reference=by_reference)
        b = Endpoint(tmp_path / ("b" if remote else "a"), "b", token="t", by_reference=by_reference)
        ends.callback(b.close)
        if remote:
            a.add_address("b", b.listen("127.0.0.1:0"))
        b.handle("s", lambda request: None, prompt=True)
        b.stage_weights("w", 1, {"x": np.ones(10)})
        b.host_channel("q", producers=["a"], consumers=["a"])
        a.request("b", "s", "m")
        ends.callback(stop(b).set)
        ends.callback(a.close)
        link = a._fabric.connection("b").link
        taken = -1
        while link.num_taken != taken:
            # The way to it takes some too, before it is full.
            taken = link.num_taken
            while link.unsent_bytes <= HIGH_WATER_BYTES:
                a.request_async("b", "s", "m", BODY)
            time.sleep(0.1)
        yield a


def test_time_outs_hold(behind: Endpoint) -> None:
    q, started = behind.channel("q", host="b"), time.monotonic()
    kept, lent = len(behind._fabric.connection("b")._calls), dict(behind._fabric.connection("b")._lent)
    with pytest.raises(TimeoutError_, match=r"'s\.m': waited 0\.\d+ s for b$"):
        behind.request("b", "s", "m", timeout_s=0.05)
    with pytest.raises(TimeoutError_, match=r"'send mail': waited 0\.\d+ s for b$"):
        behind.send("b", 1, tag="mail", timeout_s=0.05)
    if behind.address != behind.address_of("b"):
        assert len(behind._fabric.connection("b")._calls) == kept, "what was not asked is waited for"
        with pytest.raises(TimeoutError_, match=r"'send mail': waited 0\.\d+ s for b$"):
            behind.isend("b", 1, tag="mail", timeout_s=0.05)
    receiver = behind.weight_receiver("w", sources=["b"])
    for fetch in (
        lambda: behind.request_async("b", "s", "m", timeout_s=0.05),
        lambda: behind.fetch_weights("b", "w", 1, timeout_s=0.05),
        lambda: receiver.prepare(1, timeout_s=0.05),
        lambda: behind.weight_receiver("w", sources=["b"], delta=True).prepare(1, timeout_s=0.05),
        lambda: receiver.stream(1, dict, timeout_s=0.05),
    ):
        with pytest.raises(TimeoutError_, match=r"waited 0\.\d+ s for b$"):
            fetch()
    for item in (1, np.zeros(1 << 17)):
        with pytest.raises(TimeoutError_, match=r"'q', key 'k': waited 0\.\d+ s for b$"):
            q.put(item, key="k", timeout_s=0.05)
    assert behind._fabric.connection("b")._lent == lent, "memory is lent for what was not asked"
    # What is small and bounded by what it answers does not wait at all.
    q.ack([])
    behind.close()
    assert time.monotonic() - started < 3


def test_time_outs_of_collectives_hold(behind: Endpoint) -> None:
    group, started = RankGroup(behind, "g", ["a", "b"]), time.monotonic()
    for collective in (
        lambda: group.broadcast(1, root=0, timeout_s=0.05),
        lambda: group.scatter([1, 2], root=0, timeout_s=0.05),
        lambda: group.gather(1, root=1, timeout_s=0.05),
        lambda: group.all_gather(1, timeout_s=0.05),
        lambda: group.all_to_all([1, 2], timeout_s=0.05),
        lambda: group.barrier(timeout_s=0.05),
    ):
        with pytest.raises(TimeoutError_, match=r"'(send )?g/\w+/\d': waited 0\.\d+ s for b$"):
            collective().wait()
    with pytest.raises(TimeoutError_, match=r"'(send|move_rows) rows': waited 0\.\d+ s for b$"):
        move_rows(behind, np.ones(2), tag="rows", sources={"a": 2}, targets={"b": 2}, timeout_s=0.05).wait()
    assert time.monotonic() - started < 3


def test_an_event_loop_goes_on(behind: Endpoint) -> None:
    q = behind.channel("q", host="b")

    async def put_and_get() -> None:
        for asked in (q.aput(1), q.aput(np.zeros(1 << 17)), q.aget()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked, 0.05)

    done = threading.Thread(target=asyncio.run, args=(put_and_get(),), daemon=True)
    done.start()
    done.join(5)
    assert not done.is_alive()


def test_one_that_gives_up_in_a_line_for_room_lets_the_next_one_look() -> None:
    full, line, served = [True], Line(), list[str]()
    peer: Any = SimpleNamespace(has_room=lambda: not full[0])

    async def wait(name: str, timeout_s: float | None = None) -> bool:
        came = await line.room(peer, Deadline(timeout_s))
        served.append(name)
        return came

    async def stand() -> None:
        first, second, third, fourth = (asyncio.ensure_future(wait(name)) for name in "abcd")
        assert not await wait("e", 0.01)
        second.cancel()
        first.cancel()
        await asyncio.sleep(0.01)
        full[0] = False
        assert await asyncio.gather(third, fourth, wait("f")) == [True] * 3

    asyncio.run(stand())
    assert served == ["e", "c", "d", "f"]


def test_a_put_to_a_host_that_is_not_there_takes_no_longer_than_its_time_out(make_endpoint: Any) -> None:
    q, started = make_endpoint("a").channel("q", host="nobody"), time.monotonic()
    for _ in range(3):
        with pytest.raises(TimeoutError_, match=r"waited 0\.\d+ s for nobody"):
            q.put_many([Put(item=BODY, id=str(number)) for number in range(300)], timeout_s=0.05)
    assert time.monotonic() - started < 0.9


@pytest.mark.parametrize("by_reference", [True, False], ids=["local", "unix"])
def test_one_that_takes_no_answers_harms_no_other_and_is_given_up_beyond_the_quota(
    run_dir: Path, stop: Any, monkeypatch: pytest.MonkeyPatch, by_reference: bool
) -> None:
    monkeypatch.setattr(_connection, "_STALL_LOOK_S", 0.02)
    with ExitStack() as ends:
        server, slow, other = (
            ends.enter_context(Endpoint(run_dir, name, token="t", by_reference=by_reference, quota_bytes=16 << 20))
            for name in ("server", "slow", "other")
        )
        promised: list[Future[bytes]] = []
        lost = threading.Event()
        server.on_peer_lost(lambda name: lost.set())

        def later(request: Any) -> Future[bytes]:
            promised.append(Future())
            return promised[-1]

        server.handle("later", later, prompt=True)
        server.handle("s", lambda request: "answered")
        for _ in range(700):
            slow.request_async("server", "later", "m")
        while len(promised) < 700:
            time.sleep(0.01)
        asked = server.request_async("slow", "s", "m")
        held = stop(slow)
        for future in promised[:400]:
            future.set_result(BODY)
        assert other.request("server", "s", "m", timeout_s=5) == "answered"
        assert HIGH_WATER_BYTES < server._fabric.connection("slow").link.unsent_bytes < 16 << 20
        for future in promised[400:]:
            future.set_result(BODY)
        with pytest.raises(
            PeerLostError, match=r"it does not take what it is sent: \d+ bytes wait.* quota of 16777216"
        ):
            asked.result(5)
        assert lost.wait(5)
        assert other.request("server", "s", "m", timeout_s=5) == "answered"
        held.set()


def test_answers_beyond_the_quota_reach_a_peer_that_takes_them(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b", quota_bytes=2 << 20)
    b.handle("s", lambda request: np.ones(1 << 20, np.uint8))
    answers = [a.request_async("b", "s", "m") for _ in range(24)]
    assert sum(len(answer.result(10)) for answer in answers) == 24 << 20


def test_many_puts_of_an_event_loop_wait_for_room_in_order(make_endpoint: Any) -> None:
    host, client = make_endpoint("host"), make_endpoint("client", quota_bytes=16 << 20)
    host.host_channel("q", producers=["client"], consumers=["host"])
    q = client.channel("q", host="host")
    q.put([-1])
    link, most = client._fabric.connection("host").link, 0

    async def put(number: int) -> None:
        nonlocal most
        await q.aput([number, BODY])
        most = max(most, link.unsent_bytes)

    async def put_all() -> None:
        await asyncio.gather(*map(put, range(1000)))

    asyncio.run(put_all())
    assert most < HIGH_WATER_BYTES + 2 * len(BODY)
    taken = host.channel("q", host="host")
    assert [taken.get().item[0] for _ in range(1001)] == list(range(-1, 1000))
