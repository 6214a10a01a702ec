"""Items in a loop: each committed by going on to the next, and some ahead of it."""

import asyncio
import contextlib
import gc
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import Channel, CommError, Endpoint, PayloadError, PeerLostError, Put, Stats, TimeoutError_, _asked
from m2flow.comm._connection import Connection
from m2flow.comm._frames import Kind
from m2flow.comm._replies import Reply


@pytest.fixture(params=["apart", "within"])
def ends(request: Any, run_dir: Path) -> Iterator[tuple[Channel, Channel]]:
    """A producer's and a consumer's client of a channel without a bound, through sockets or within the process."""
    with contextlib.ExitStack() as stack:
        host, producer, consumer, _ = (
            stack.enter_context(Endpoint(run_dir, name, token="t", by_reference=request.param == "within"))
            for name in ("host", "p", "c", "c2")
        )
        host.host_channel("q", producers=["p"], consumers=["c", "c2"])
        yield producer.channel("q", host="host"), consumer.channel("q", host="host")


def fill(producer: Channel, count: int, iteration: int = 0) -> None:
    producer.put_many([Put(item=index, id=str(index), iteration=iteration) for index in range(count)])


def settled(channel: Channel, want: Callable[[Stats], bool]) -> Stats:
    """Returns the channel's counts once they are as wanted; what is withdrawn or acknowledged waits for nobody."""
    until = time.monotonic() + 10
    while not want(stats := channel.stats()):
        assert time.monotonic() < until, stats
        time.sleep(0.01)
    return stats


async def in_a_thread(channel: Channel, **options: Any) -> AsyncIterator[Any]:
    """The sync form, driven as the async one is."""
    leases = channel.leases(**options)
    try:
        while (lease := await asyncio.to_thread(next, leases, None)) is not None:
            yield lease
    finally:
        leases.close()


FORMS: Any = pytest.mark.parametrize("form", [in_a_thread, Channel.aleases], ids=["sync", "async"])
AHEAD: Any = pytest.mark.parametrize("ahead", [0, 2])


@FORMS
@AHEAD
def test_a_loop_takes_all_in_order_and_commits_each_by_going_on(ends: Any, form: Any, ahead: int) -> None:
    producer, consumer = ends
    fill(producer, 10)
    producer.close()

    async def loop() -> list[int]:
        found: list[int] = []
        async for lease in form(consumer, ahead=ahead):
            stats = settled(consumer, lambda stats: stats.acked == len(found))
            assert stats.leased == min(1 + ahead, 10 - len(found))
            found.append(lease.item)
        return found

    assert asyncio.run(loop()) == list(range(10))
    assert consumer.stats().acked == 10


@FORMS
@AHEAD
def test_a_loop_that_is_left_keeps_its_last_one_and_gives_back_those_ahead(ends: Any, form: Any, ahead: int) -> None:
    producer, consumer = ends
    fill(producer, 6)

    async def loop() -> Any:
        async with contextlib.aclosing(form(consumer, ahead=ahead)) as leases:
            async for lease in leases:
                if lease.item == 1:
                    break
        return lease

    last = asyncio.run(loop())
    stats = settled(consumer, lambda stats: stats.leased == 1)
    assert (stats.acked, stats.queued, stats.waiting_consumers) == (1, 4, 0)
    consumer.ack(last)
    assert [lease.item for lease in consumer.get_batch(4)] == [2, 3, 4, 5]


@FORMS
def test_who_leaves_a_loop_finds_what_was_ahead_before_all_that_is_later(ends: Any, form: Any) -> None:
    producer, consumer = ends
    fill(producer, 200)

    async def first() -> Any:
        async with contextlib.aclosing(form(consumer, ahead=3, timeout_s=10)) as leases:
            return await anext(leases)

    for index in range(200):
        lease = asyncio.run(first())
        assert lease.item == index
        consumer.ack(lease)


def test_what_is_asked_ahead_of_items_is_withdrawn_with_the_loop(ends: Any) -> None:
    producer, consumer = ends
    fill(producer, 1)
    leases = consumer.leases(ahead=2)
    consumer.ack(next(leases))
    settled(consumer, lambda stats: stats.waiting_consumers == 2)
    del leases
    settled(consumer, lambda stats: stats.waiting_consumers == 0)
    producer.put("late", id="late")
    assert consumer.get(timeout_s=10).item == "late"


def test_an_error_in_the_loop_commits_nothing_that_it_did_not_go_on_from(ends: Any) -> None:
    producer, consumer = ends
    fill(producer, 4)
    lease = None
    with contextlib.suppress(ZeroDivisionError):
        for lease in consumer.leases(ahead=1):
            assert 1 / (1 - lease.item)
    stats = settled(consumer, lambda stats: stats.queued == 2)
    assert (stats.acked, stats.leased) == (1, 1)
    assert lease is not None
    consumer.give_back(lease)
    producer.close()
    assert [lease.item for lease in consumer.leases(timeout_s=10)] == [1, 2, 3]


@FORMS
@AHEAD
def test_the_end_of_an_iteration_ends_its_loop_alone(ends: Any, form: Any, ahead: int) -> None:
    producer, consumer = ends
    fill(producer, 3)
    producer.put("next", id="next", iteration=1)
    producer.end(0)

    async def loop() -> list[Any]:
        return [lease.item async for lease in form(consumer, iteration=0, ahead=ahead)]

    assert asyncio.run(loop()) == [0, 1, 2]
    stats = settled(consumer, lambda stats: stats.waiting_consumers == 0)
    assert (stats.acked, stats.leased, stats.queued) == (3, 0, 1)


@FORMS
@AHEAD
def test_each_item_has_its_own_time_out_and_one_that_is_over_loses_nothing(ends: Any, form: Any, ahead: int) -> None:
    producer, consumer = ends
    put = threading.Thread(target=lambda: [time.sleep(0.4) or producer.put(index, id=str(index)) for index in range(3)])
    put.start()
    found = []

    async def loop() -> None:
        async for lease in form(consumer, ahead=ahead, timeout_s=1.0):
            found.append(lease.item)

    with pytest.raises(TimeoutError_, match="'q'"):
        asyncio.run(loop())
    put.join()
    assert found == [0, 1, 2]
    settled(consumer, lambda stats: stats.waiting_consumers == 0)
    producer.put("late", id="late")
    assert consumer.get(timeout_s=10).item == "late"


@AHEAD
def test_a_cancelled_loop_gives_back_what_it_has_ahead(ends: Any, ahead: int) -> None:
    producer, consumer = ends
    fill(producer, 2)
    found = []

    async def loop() -> None:
        async with contextlib.aclosing(consumer.aleases(ahead=ahead)) as leases:
            async for lease in leases:
                found.append(lease.item)

    async def cancelled() -> None:
        task = asyncio.create_task(loop())
        while len(found) < 2 or consumer.stats().waiting_consumers <= ahead:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 20))
    settled(consumer, lambda stats: stats.waiting_consumers == 0)
    producer.put("late", id="late")
    assert consumer.get(timeout_s=10).item == "late"


@pytest.fixture
def withdraws_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    withdraw = _asked._withdraw

    def slowly(*asked: Any) -> None:
        time.sleep(0.1)
        withdraw(*asked)

    monkeypatch.setattr(_asked, "_withdraw", slowly)


@pytest.mark.usefixtures("withdraws_slowly")
def test_what_a_cancelled_loop_asked_for_is_withdrawn_when_it_ends(ends: Any) -> None:
    _, consumer = ends

    async def loop() -> None:
        async with contextlib.aclosing(consumer.aleases(ahead=2)) as leases:
            await anext(leases)

    async def cancelled() -> None:
        task = asyncio.create_task(loop())
        while consumer.stats().waiting_consumers < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 20))
    # Else it takes the first of what comes, and who asks next is given later ones.
    assert consumer.stats().waiting_consumers == 0


@pytest.mark.usefixtures("withdraws_slowly")
def test_what_a_loop_asked_for_that_a_ctrl_c_ends_is_withdrawn_by_then(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, consumer = ends
    consumer.stats()
    result = Reply.result

    def interrupted(*_: Any) -> bytes:
        monkeypatch.setattr(Reply, "result", result)
        raise KeyboardInterrupt

    monkeypatch.setattr(Reply, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(consumer.leases(ahead=2))
    assert consumer.stats().waiting_consumers == 0


def test_a_ctrl_c_while_it_waits_loses_nothing_that_is_ahead(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = ends
    fill(producer, 4)
    leases = consumer.leases(ahead=2)
    next(leases)
    settled(consumer, lambda stats: stats.leased == 3)
    sent = Connection.send

    def interrupted(self: Connection, kind: Kind, request_id: int, body: Any) -> None:
        monkeypatch.setattr(Connection, "send", sent)
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(leases)
    # Nobody has committed the first.
    stats = settled(consumer, lambda stats: stats.leased == 1)
    assert (stats.acked, stats.queued) == (0, 3)


def test_a_dead_consumers_items_ahead_are_given_out_again(run_dir: Path, make_endpoint: Any, peer: Any) -> None:
    host = make_endpoint("host")
    host.host_channel("q", producers=["host"], consumers=["dies", "c"])
    producer, consumer = host.channel("q", host="host"), make_endpoint("c").channel("q", host="host")
    fill(producer, 5)
    process = peer(
        "dies",
        """
        for lease in endpoint.channel("q", host="host").leases(ahead=2):
            if lease.item == 1:
                say("at work")
                time.sleep(60)
        """,
    )
    assert process.line() == "at work"
    settled(producer, lambda stats: (stats.acked, stats.leased) == (1, 3))
    process.kill()
    producer.close()
    assert [lease.item for lease in consumer.leases(timeout_s=10)] == [1, 2, 3, 4]
    assert producer.stats().regiven == 3


@AHEAD
def test_a_producer_that_dies_ends_the_loop_by_name_after_what_it_had_put(
    make_endpoint: Any, peer: Any, ahead: int
) -> None:
    host = make_endpoint("host")
    host.host_channel("q", producers=["dies"], consumers=["host"])
    process = peer("dies", 'c = endpoint.channel("q", host="host"); c.put(0); c.put(1); say("put"); time.sleep(60)')
    assert process.line() == "put"
    process.kill()
    leases = host.channel("q", host="host").leases(ahead=ahead, timeout_s=10)
    assert [next(leases).item, next(leases).item] == [0, 1]
    with pytest.raises(PeerLostError, match="dies"):
        next(leases)


def test_large_items_are_read_in_place_and_their_memory_comes_back_as_the_loop_lets_go(make_endpoint: Any) -> None:
    host, producer = make_endpoint("c"), make_endpoint("p")
    host.host_channel("q", capacity=1, producers=["p"], consumers=["c"])
    size = 1 << 20

    def put() -> None:
        channel = producer.channel("q", host="c")
        for index in range(40):
            channel.put(np.full(size, index, np.uint8), id=str(index))
        channel.close()

    thread = threading.Thread(target=put)
    thread.start()
    sums = []
    for lease in host.channel("q", host="c").leases(ahead=1):
        sums.append(int(lease.item[0]) if (lease.item == lease.item[0]).all() else None)
        del lease
    thread.join()
    assert sums == list(range(40))
    gc.collect()
    # One is written, one waits, one is ahead, one is read, and one is on its way back.
    assert producer._fabric.pool.size_bytes <= 6 * size * 1.13


def test_a_loop_refuses_what_it_cannot_do(ends: Any) -> None:
    _, consumer = ends
    with pytest.raises(ValueError, match="got ahead -1, want 0 or more"):
        next(consumer.leases(ahead=-1))
    with pytest.raises(ValueError, match="got key ''"):
        next(consumer.leases(key=""))


def test_a_loop_does_not_run_where_none_may_wait(make_endpoint: Any) -> None:
    host, other = make_endpoint("host"), make_endpoint("other")
    host.host_channel("q", producers=["other"], consumers=["host"])
    channel, raised = host.channel("q", host="host"), []

    def wait(request: Any) -> None:
        try:
            next(channel.leases())
        except CommError as error:
            raised.append(str(error))

    host.handle("prompt", wait, prompt=True)
    other.request("host", "prompt", "", timeout_s=10)
    assert "must not wait" in raised[0]


@AHEAD
def test_an_item_that_is_too_large_here_ends_the_loop_and_no_more(run_dir: Path, ahead: int) -> None:
    with (
        Endpoint(run_dir, "host", token="t", by_reference=False) as host,
        Endpoint(run_dir, "c", token="t", by_reference=False, max_payload_bytes=32 << 10) as small,
    ):
        host.host_channel("q", producers=["host"], consumers=["c", "host"])
        host.channel("q", host="host").put(np.zeros(1 << 20, np.uint8))
        channel = small.channel("q", host="host")
        connection = small._fabric.connection("host")
        with pytest.raises(PayloadError, match="want at most"):
            next(channel.leases(ahead=ahead))
        settled(channel, lambda stats: stats.leased == 0)
        assert small._fabric.connection("host") is connection
        assert host.channel("q", host="host").get(timeout_s=5).item.nbytes == 1 << 20


@FORMS
@AHEAD
def test_a_loop_ends_after_what_was_queued_again_while_it_had_more_asked(
    make_endpoint: Any, peer: Any, form: Any, ahead: int
) -> None:
    host = make_endpoint("host")
    host.host_channel("q", producers=["host"], consumers=["dies", "host"])
    channel = host.channel("q", host="host")
    fill(channel, 4)
    process = peer("dies", 'endpoint.channel("q", host="host").get(); say("got"); time.sleep(60)')
    assert process.line() == "got"
    channel.close()

    async def loop() -> list[int]:
        found = []
        async for lease in form(host.channel("q", host="host"), ahead=ahead):
            found.append(lease.item)
            if len(found) == 3:
                process.kill()
                settled(channel, lambda stats: stats.regiven == 1)
        return found

    assert asyncio.run(loop()) == [1, 2, 3, 0]


def test_a_loop_that_the_cycle_collector_ends_takes_no_lock(make_endpoint: Any) -> None:
    host, other = make_endpoint("host"), make_endpoint("c")
    host.host_channel("q", producers=["host"], consumers=["c"])
    fill(host.channel("q", host="host"), 3)
    channel = other.channel("q", host="host")
    leases = channel.leases(ahead=1)
    channel.ack(next(leases))
    with other._fabric.connection("host").link._lock:
        started = time.monotonic()
        leases.close()
        assert time.monotonic() - started < 5
    assert settled(channel, lambda stats: stats.queued == 2).leased == 0


def test_a_get_that_is_cancelled_twice_is_not_overtaken(ends: Any) -> None:
    producer, consumer = ends
    # Else the host has yet to appear, for all that is known, and is not waited for.
    consumer.stats()

    async def race(index: int) -> Any:
        task = asyncio.create_task(consumer.aget())
        await asyncio.sleep(0)
        await asyncio.to_thread(producer.put_many, [Put(item=2 * index), Put(item=2 * index + 1)])
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            return await task
        return await consumer.aget(timeout_s=5)

    async def races() -> None:
        for index in range(150):
            found = [await race(index), await consumer.aget(timeout_s=5)]
            assert [lease.item for lease in found] == [2 * index, 2 * index + 1]
            consumer.ack(found)

    asyncio.run(asyncio.wait_for(races(), 50))


@FORMS
def test_a_loop_on_a_host_that_has_stopped_ends_as_a_get_does(make_endpoint: Any, peer: Any, form: Any) -> None:
    consumer = make_endpoint("c")
    process = peer("host", 'endpoint.host_channel("q", producers=["host"], consumers=["c"]); say("up"); time.sleep(60)')
    assert process.line() == "up"
    channel = consumer.channel("q", host="host")
    channel.stats()
    process.process.send_signal(signal.SIGSTOP)

    async def loop() -> None:
        async for _ in form(channel, ahead=3, timeout_s=0.5):
            pass

    started = time.monotonic()
    with pytest.raises(TimeoutError_):
        asyncio.run(loop())
    assert time.monotonic() - started < 2.5
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(anext(channel.aleases(ahead=3)), 0.5))
    assert time.monotonic() - started < 2.5
