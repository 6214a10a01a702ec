"""Channels through real endpoints: blocking and async forms, memory, and what a consumer sees."""

import asyncio
import contextlib
import gc
import re
import socket
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from m2flow.comm import (
    Channel,
    ChannelClosedError,
    ChannelFullError,
    CommError,
    Endpoint,
    IterationEnded,
    PayloadError,
    PeerLostError,
    Put,
    TimeoutError_,
    _asked,
)
from m2flow.comm._connection import Connection
from m2flow.comm._frames import HEADER, Kind
from m2flow.comm._replies import Reply
from m2flow.comm._unix import UnixLink


@pytest.fixture
def ends(make_endpoint: Any) -> tuple[Endpoint, Channel, Channel]:
    """A host, and a producer's and a consumer's client of a channel of capacity 4, each in its own endpoint."""
    host, producer, consumer = make_endpoint("host"), make_endpoint("p"), make_endpoint("c")
    host.host_channel("q", capacity=4, producers=["p", "p2"], consumers=["c", "c2"])
    return host, producer.channel("q", host="host"), consumer.channel("q", host="host")


def reads_nothing_until(end: Endpoint) -> threading.Event:
    """Stops an endpoint's io thread; it goes on once the event is set."""
    stopped, going_on = threading.Event(), threading.Event()
    end._fabric.loop.call(lambda: stopped.set() or going_on.wait(20))
    assert stopped.wait(10)
    return going_on


def test_items_arrive_in_order_with_what_they_were_put_with(ends: Any) -> None:
    _, producer, consumer = ends
    producer.put({"x": np.arange(3)}, id="a", iteration=2, weight=2.5, key="k")
    producer.put_tombstone(id="b", iteration=2, reason="too long")
    first, second = consumer.get(key="k"), consumer.get()
    assert (first.id, first.iteration, first.weight, first.key, first.producer) == ("a", 2, 2.5, "k", "p")
    assert first.item["x"].tolist() == [0, 1, 2]
    assert (second.id, second.tombstone, second.item) == ("b", "too long", None)
    consumer.ack([first, second])
    stats = consumer.stats()
    assert (stats.put, stats.acked, stats.tombstones, stats.queued, stats.leased) == (2, 2, 1, 0, 0)


def test_items_that_a_ctrl_c_keeps_from_their_consumer_go_back_in_order(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, producer, consumer = ends
    producer.put_many([Put(item=np.full(1 << 14, index), id=str(index)) for index in range(3)])
    opened = Connection.open

    def interrupted(connection: Connection, payload: Any) -> Any:
        monkeypatch.setattr(Connection, "open", opened)
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.get_batch(2.0)
    again = consumer.get_batch(3.0, timeout_s=5)
    assert [lease.id for lease in again] == ["0", "1", "2"]
    assert consumer.stats().leased == 3


@pytest.mark.parametrize("place", [(socket.socket, "recvmsg_into"), (_asked.Asked, "_parse")])
def test_an_answer_that_a_ctrl_c_ends_while_it_is_read_leaves_no_item_leased(
    ends: Any, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    _, producer, consumer = ends
    producer.put_many([Put(item=index, id=str(index)) for index in range(3)])
    consumer.stats()  # from now on whoever waits reads
    undisturbed = getattr(*place)

    def interrupted(*args: Any) -> Any:
        found = undisturbed(*args)
        if threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(*place, undisturbed)
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(*place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.get_batch(2.0)
    with contextlib.suppress(PeerLostError):
        consumer.stats()  # the connection may have ended
    again = consumer.get_batch(3.0, timeout_s=5)
    assert [lease.id for lease in again] == ["0", "1", "2"]
    assert consumer.stats().leased == 3


def test_leases_are_committed_by_the_request_that_names_them(ends: Any) -> None:
    _, producer, consumer = ends
    producer.put_many([Put(item=index, id=str(index)) for index in range(3)])
    first = consumer.get()
    (second,) = consumer.get_batch(1.0, ack=[first])
    third = consumer.get(ack=[second])
    stats = consumer.stats()
    assert (stats.acked, stats.leased) == (2, 1)
    with pytest.raises(TimeoutError_):
        consumer.get(ack=[third], timeout_s=0.05)  # also where no item comes
    stats = consumer.stats()
    assert (stats.acked, stats.leased, stats.regiven) == (3, 0, 0)


def test_large_items_come_in_shared_memory_and_the_memory_is_used_again(make_endpoint: Any) -> None:
    host, producer, consumer = make_endpoint("host"), make_endpoint("p"), make_endpoint("c")
    host.host_channel("q", capacity=4, producers=["p"], consumers=["c"])
    puts, gets = producer.channel("q", host="host"), consumer.channel("q", host="host")
    for index in range(50):
        puts.put(np.full(1 << 18, index, np.float32), id=str(index))
        lease = gets.get()
        assert lease.item[-1] == index
        gets.ack(lease)
        del lease
    assert producer._fabric.pool.size_bytes < 25 << 20


def test_memory_is_not_used_again_while_any_view_of_it_is_kept(ends: Any) -> None:
    _, producer, consumer = ends
    producer.put({"x": np.zeros(100_000)}, id="kept")
    lease = consumer.get()
    view = lease.item["x"][10:20:3]
    consumer.ack(lease)
    del lease
    for index in range(1, 30):
        producer.put({"x": np.full(100_000, index)}, id=str(index))
        consumer.ack(consumer.get())
    assert view.tolist() == [0, 0, 0, 0]


def test_what_a_closed_reader_keeps_is_not_used_again(make_endpoint: Any) -> None:
    host, producer, reader = make_endpoint("host"), make_endpoint("p"), make_endpoint("c")
    host.host_channel("q", capacity=4, producers=["p"], consumers=["c", "host"])
    puts, gets = producer.channel("q", host="host"), host.channel("q", host="host")
    puts.put(np.full(100_000, -1), id="kept")
    kept = reader.channel("q", host="host").get().item
    reader.close()
    for index in range(30):
        puts.put(np.full(100_000, index), id=str(index))
        gets.ack(gets.get())
    assert (kept == -1).all()


def test_data_goes_from_producer_to_consumer_directly(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host, producer, consumer = ends
    sent_bytes = []
    send = UnixLink.send

    def count(link: UnixLink, kind: Kind, request_id: int, body: bytes, *more: Any, **how: Any) -> None:
        sent_bytes.append(HEADER.size + len(body))
        send(link, kind, request_id, body, *more, **how)

    monkeypatch.setattr(UnixLink, "send", count)
    array = np.arange(1 << 20)
    producer.put(array)
    assert np.array_equal(consumer.get().item, array)
    assert host._fabric.pool.size_bytes == 0
    assert 0 < sum(sent_bytes) < 2_000, "bytes of all three ends' frames, for 8 MiB"


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"id": 5}, "got id 5, want a str: give it '5'"),
        ({"key": "\ud800"}, "got key '.ud800', want one that UTF-8 can spell"),
        ({"iteration": -1}, "got iteration -1, want 0 or more"),
        ({"iteration": 0.5}, "got iteration 0.5, want an int"),
        ({"weight": float("inf")}, "got weight inf, want a number from 0 to"),
        ({"weight": float("nan")}, "got weight nan"),
        ({"weight": -1.0}, r"got weight -1\.0"),
        ({"weight": "1"}, "got weight '1'"),
    ],
    ids=str,
)
def test_what_an_item_cannot_be_put_with_costs_no_memory(ends: Any, given: dict[str, Any], fault: str) -> None:
    _, producer, _ = ends
    with pytest.raises(ValueError, match=f"put: {fault}"):
        producer.put(np.zeros(100_000), **given)
    assert producer._connect("host")._lent == {}


def test_a_put_has_one_deadline_for_memory_and_for_room(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", capacity=1, producers=["p"], consumers=["host"])
    channel = producer.channel("q", host="host")
    channel.put("first")
    take = producer._fabric.pool.take

    def late(*size: Any, **how: Any) -> Any:
        time.sleep(0.4)
        return take(*size, **how)

    monkeypatch.setattr(producer._fabric.pool, "take", late)
    with pytest.raises(TimeoutError_, match="channel 'q', key 'k': waited") as caught:
        channel.put(np.zeros(100_000), key="k", timeout_s=0.3)
    assert 0.4 <= caught.value.elapsed_s < 2


def test_put_waits_for_memory_and_says_so_when_it_does_not_come(make_endpoint: Any) -> None:
    host, producer, consumer = make_endpoint("host"), make_endpoint("p", quota_bytes=3 << 20), make_endpoint("c")
    host.host_channel("q", producers=["p"], consumers=["c"])
    puts, gets = producer.channel("q", host="host"), consumer.channel("q", host="host")
    array = np.zeros(1 << 17)
    puts.put(array)
    puts.put(array)
    with pytest.raises(TimeoutError_, match=r" s for host, who reads .* to let go of shared memory: 2\d+ bytes"):
        puts.put(array, timeout_s=0.1)
    thread = threading.Thread(target=puts.put, args=(array,), daemon=True)
    thread.start()
    gets.ack(gets.get())
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(CommError, match="want at most the quota"):
        puts.put(np.zeros(1 << 20))


def test_a_full_channel_makes_put_wait_and_put_nowait_raise(ends: Any) -> None:
    _, producer, consumer = ends
    for index in range(4):
        producer.put(index)
    with pytest.raises(ChannelFullError, match="'q' is full"):
        producer.put_nowait(4)
    with pytest.raises(
        TimeoutError_, match=r"channel 'q', key 'k': waited 0\.\d+ s for c, c2 to take an item: the channel is full$"
    ):
        producer.put(4, key="k", timeout_s=0.05)
    thread = threading.Thread(target=producer.put, args=(4,), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert producer.stats().waiting_producers == 1
    assert [consumer.get().item for _ in range(5)] == [0, 1, 2, 3, 4]
    thread.join(5)
    producer.put_nowait(5)


@pytest.mark.medium
def test_a_full_channel_is_full_for_its_host_and_for_a_worker(make_endpoint: Any, peer: Any) -> None:
    host = make_endpoint("host")
    host.host_channel("q", capacity=1, producers=["host", "w"], consumers=["host"])
    channel = host.channel("q", host="host")
    channel.put("first")
    worker = peer(
        "w",
        """
        channel = endpoint.channel("q", host="host")
        try:
            channel.put_nowait(1)
        except ChannelFullError as error:
            say(error)
        channel.put("of the worker")
        say("put")
        """,
    )
    assert "'q' is full" in worker.line()
    with pytest.raises(ChannelFullError):
        channel.put_nowait(2)
    while not channel.stats().waiting_producers:
        time.sleep(0.01)
    assert channel.get(timeout_s=5).item == "first"
    assert worker.line() == "put"
    assert channel.get(timeout_s=5).item == "of the worker"


@pytest.mark.medium
def test_waiting_spins_no_core(make_endpoint: Any, peer: Any) -> None:
    host = make_endpoint("host")
    host.host_channel("q", capacity=1, producers=["w"], consumers=["w"])
    worker = peer(
        "w",
        """
        import threading
        channel = endpoint.channel("q", host="host")
        channel.put(0)
        def wait(call, **more):
            try:
                call(timeout_s=1.5, **more)
            except TimeoutError_:
                pass
        calls = [
            lambda: wait(channel.get, key="none"),
            lambda: wait(channel.get_batch, weight=9, key="none"),
            lambda: wait(channel.put, item=1),
            lambda: wait(endpoint.recv, peer="host"),
        ]
        threads = [threading.Thread(target=call) for call in calls]
        before = time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        say(time.process_time() - before)
        """,
    )
    assert float(worker.line()) < 0.5, "seconds of processor time in 1.5 s of waiting, four times over"


def test_a_timeout_names_channel_key_and_who_was_waited_for(ends: Any) -> None:
    _, _, consumer = ends
    with pytest.raises(TimeoutError_, match=r"channel 'q', key 'k': waited 0\.\d+ s for p, p2") as caught:
        consumer.get(key="k", timeout_s=0.05)
    assert (caught.value.channel, caught.value.key, caught.value.peer) == ("q", "k", "p, p2")


@pytest.mark.medium
def test_whatever_waits_for_a_host_that_has_stopped_times_out_naming_it(
    make_endpoint: Any, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_asked, "_CANCEL_TIMEOUT_S", 0.1)
    stopped = peer(
        "host",
        """
        import os, signal
        endpoint.host_channel("q", capacity=1, producers=["p"], consumers=["p"])
        say("up")
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
    )
    assert stopped.line() == "up"
    channel = make_endpoint("p").channel("q", host="host")
    channel.stats(timeout_s=5)
    stopped.process.stdin.write("stop\n")
    stopped.process.stdin.flush()
    raised: list[TimeoutError_] = []

    def wait(call: Any) -> None:
        try:
            # What is asked before it has stopped is answered.
            while True:
                call(timeout_s=0.2)
        except TimeoutError_ as error:
            raised.append(error)

    calls = [channel.stats, partial(channel.end, 0), channel.close]
    threads = [threading.Thread(target=wait, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    with pytest.raises(TimeoutError_, match=r"channel 'q': waited \d\.\d+ s for host"):
        channel.put_nowait("item", timeout_s=0.1)
    assert [(error.channel, error.peer) for error in raised] == [("q", "host")] * 3


def test_a_sync_get_of_one_key_passes_a_pending_async_get_of_another(ends: Any) -> None:
    _, producer, consumer = ends

    async def main() -> tuple[Any, Any]:
        pending = asyncio.create_task(consumer.aget(key="a"))
        await asyncio.sleep(0.02)
        producer.put("of b", key="b")
        mine = consumer.get(key="b", timeout_s=5)
        producer.put("of a", key="a")
        return (await pending).item, mine.item

    assert asyncio.run(main()) == ("of a", "of b")


def test_a_cancelled_async_get_loses_no_item(ends: Any) -> None:
    _, producer, consumer = ends

    async def main() -> None:
        for index in range(20):
            pending = asyncio.create_task(consumer.aget())
            await asyncio.sleep(0)
            producer.put(index)
            pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending
            lease = await asyncio.wait_for(consumer.aget(), 5)
            assert lease.item == index
            consumer.ack(lease)

    asyncio.run(main())
    assert consumer.stats().queued == consumer.stats().leased == 0


def test_what_a_cancelled_async_get_was_given_comes_before_what_was_put_later(
    make_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, consumer = make_endpoint("host"), make_endpoint("c")
    host.host_channel("q", producers=["host"], consumers=["c"])
    source, channel = host.channel("q", host="host"), consumer.channel("q", host="host")
    returns = _asked.Asked._return

    def return_slowly(asked: Any, leases: Any) -> None:
        time.sleep(0.2)
        returns(asked, leases)

    monkeypatch.setattr(_asked.Asked, "_return", return_slowly)

    async def main() -> None:
        # Else the host has yet to appear, for all that is known, and is not waited for.
        await channel.astats()
        pending = asyncio.create_task(channel.aget())
        while not (await source.astats()).waiting_consumers:
            await asyncio.sleep(0.01)
        # The answer waits to be read until the request is withdrawn.
        withdrawn = reads_nothing_until(consumer)
        await source.aput_many([Put(item=0), Put(item=1)])
        asyncio.get_running_loop().call_later(0.1, withdrawn.set)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        assert (await channel.aget()).item == 0

    asyncio.run(main())


def test_a_get_that_a_ctrl_c_ends_is_not_overtaken(
    make_endpoint: Any, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, producer, _ = ends
    end = make_endpoint("c2")
    consumer = end.channel("q", host="host")
    consumer.stats()
    result, going_on = Reply.result, reads_nothing_until(end)
    timer = threading.Timer(0.1, going_on.set)

    def interrupted(reply: Reply, *_: Any) -> bytes:
        monkeypatch.setattr(Reply, "result", result)
        reply.ask()
        producer.put_many([Put(item=0), Put(item=1)])
        timer.start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Reply, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.get()
    assert [consumer.get(timeout_s=5).item for _ in range(2)] == [0, 1]
    timer.join()


def test_what_comes_for_a_loop_that_is_closed_is_for_whoever_asks_next(ends: Any) -> None:
    _, producer, consumer = ends
    events = asyncio.new_event_loop()
    pending = events.create_task(consumer.aget())
    events.run_until_complete(asyncio.sleep(0.05))
    assert consumer.stats().waiting_consumers == 1
    events.close()
    del pending, events
    gc.collect()
    producer.put("item")
    assert consumer.get(timeout_s=5).item == "item"


def test_what_came_for_a_loop_that_was_closed_then_is_for_whoever_asks_next(ends: Any) -> None:
    _, producer, consumer = ends
    events = asyncio.new_event_loop()
    pending = events.create_task(consumer.aget())
    events.run_until_complete(asyncio.sleep(0.05))
    producer.put("item")
    while consumer.stats().leased == 0:
        time.sleep(0.01)
    time.sleep(0.05)  # until the loop was told
    events.close()
    del pending, events
    gc.collect()
    assert consumer.get(timeout_s=5).item == "item"


def test_a_cancelled_async_put_has_no_later_effect(ends: Any) -> None:
    _, producer, consumer = ends
    producer.put_many([Put(item=index) for index in range(4)])

    async def main() -> None:
        for item in (np.zeros(8 << 20), "small"):
            for pause_s in (0.0, 0.001, 0.02):
                pending = asyncio.create_task(producer.aput(item))
                await asyncio.sleep(pause_s)
                pending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pending
                assert consumer.stats().waiting_producers == 0
        leases = [await consumer.aget() for _ in range(4)]
        assert [lease.item for lease in leases] == [0, 1, 2, 3]

    asyncio.run(main())
    assert consumer.stats().queued == 0
    while producer._connect("host")._lent:
        time.sleep(0.001)  # until its memory is back


def test_an_async_put_that_waits_for_memory_can_be_cancelled(make_endpoint: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p", quota_bytes=4 << 20)
    host.host_channel("q", producers=["p"], consumers=["host"])
    channel = producer.channel("q", host="host")
    channel.put(np.zeros(3 << 20, np.uint8))

    async def main() -> None:
        pending = asyncio.create_task(channel.aput(np.zeros(2 << 20, np.uint8)))
        await asyncio.sleep(0.05)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending

    asyncio.run(main())  # which ends when the thread does that waited
    assert host.channel("q", host="host").stats().put == 1


def test_a_batch_is_no_longer_than_its_reader_takes(make_endpoint: Any) -> None:
    host = make_endpoint("host", token="t")
    host.host_channel("q", producers=["host"], consumers=["c"])
    producer = host.channel("q", host="host")
    producer.put_many([Put(item=bytes(30_000), id=str(index)) for index in range(8)])
    with Endpoint(host.directory, "c", token="t", by_reference=False, max_payload_bytes=100_000) as reader:
        consumer = reader.channel("q", host="host")
        taken = [[lease.id for lease in consumer.get_batch(8, at_least=1)] for _ in range(3)]
    assert taken == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]


def test_what_no_message_can_hold_is_refused_in_words(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, producer, consumer = ends
    monkeypatch.setattr(_asked, "MAX_MESSAGE_BYTES", 100_000)
    items = [Put(item=bytes(30_000)), Put(item=bytes(100_000)), *[Put(item=bytes(30_000))] * 3]
    with pytest.raises(PayloadError, match=r"got a message of 120\d\d\d bytes, want at most 100000: put fewer items"):
        producer.put_many(items)
    assert producer._connect("host")._lent == {}
    assert consumer.stats().put == 0


def test_a_tombstone_says_why_where_nobody_has_said_it(ends: Any) -> None:
    _, producer, consumer = ends
    producer.put_tombstone(id="a", iteration=0, reason=str(AssertionError()))
    assert consumer.get().tombstone == "no reason given"
    assert consumer.stats().tombstones == 1


def test_nothing_is_put_with_an_empty_key(ends: Any) -> None:
    with pytest.raises(ValueError, match="get: got key '', want one that items are put with: None takes any"):
        ends[2].get(key="", timeout_s=1)


@pytest.mark.parametrize("key", [5, "\ud800"])
def test_nothing_is_got_by_a_key_that_no_item_can_have(ends: Any, key: Any) -> None:
    with pytest.raises(ValueError, match=f"get: got key {re.escape(repr(key))}, want a str that UTF-8 can spell"):
        ends[2].get(key=key, timeout_s=1)


def test_async_forms_put_and_take(ends: Any) -> None:
    _, producer, consumer = ends

    async def main() -> list[Any]:
        waiting = asyncio.create_task(consumer.aget_batch(3))
        await producer.aput("small")
        await producer.aput_many([Put(item=np.zeros(50_000)), Put(item="last")])
        return [lease.item for lease in await waiting]

    small, large, last = asyncio.run(main())
    assert (small, large.shape, last) == ("small", (50_000,), "last")


def test_async_forms_commit_end_and_close_and_their_timeouts_name_the_channel(make_endpoint: Any, ends: Any) -> None:
    _, producer, consumer = ends

    async def main() -> None:
        assert await consumer.aget_batch(4, at_least=0) == []
        await producer.aput_many([Put(item=index, iteration=1) for index in range(3)])
        leases = await consumer.aget_batch(4, at_least=1)
        with pytest.raises(TimeoutError_, match=r"channel 'q', key 'k': waited 0\.\d+ s for p, p2"):
            await consumer.aget(key="k", ack=leases, timeout_s=0.02)
        for _ in range(4):
            await producer.aput("fills it")
        with pytest.raises(
            TimeoutError_, match=r"channel 'q': waited 0\.\d+ s for c, c2 to take an item: the channel is full$"
        ):
            await producer.aput("one more", timeout_s=0.02)
        for client in (producer, make_endpoint("p2").channel("q", host="host")):
            await client.aend(2)
        with pytest.raises(IterationEnded):
            await consumer.aget(iteration=2)
        await producer.aclose()
        with pytest.raises(ChannelClosedError):
            await producer.aput("after close")
        stats = await consumer.astats()
        assert (stats.acked, stats.queued) == (3, 4)

    asyncio.run(main())


def test_an_item_that_cannot_be_encoded_harms_no_one(ends: Any) -> None:
    _, producer, consumer = ends
    with pytest.raises(PayloadError):
        producer.put_many([Put(item=np.zeros(100_000)), Put(item=object())])
    with pytest.raises(PayloadError):
        asyncio.run(producer.aput(object()))
    producer.put("good")
    assert consumer.get().item == "good"


def test_the_iteration_ends_for_every_consumer(make_endpoint: Any, ends: Any) -> None:
    _, producer, consumer = ends
    other = make_endpoint("p2").channel("q", host="host")
    second = make_endpoint("c2").channel("q", host="host")
    producer.put_many([Put(item=index, id=str(index), iteration=7) for index in range(3)])
    producer.end(7)
    other.end(7)
    assert [lease.item for lease in consumer.get_batch(2, iteration=7)] == [0, 1]
    assert [lease.item for lease in second.get_batch(2, iteration=7)] == [2]
    for client in (consumer, second):
        with pytest.raises(IterationEnded, match="iteration 7 has ended"):
            client.get_batch(2, iteration=7)


def test_a_batch_can_be_what_has_arrived(ends: Any) -> None:
    _, producer, consumer = ends
    assert consumer.get_batch(8, at_least=0) == []
    producer.put_many([Put(item=index) for index in range(3)])
    assert [lease.item for lease in consumer.get_batch(8, at_least=1)] == [0, 1, 2]
    with pytest.raises(ValueError, match="got at_least 9, want 0 to the weight 8"):
        consumer.get_batch(8, at_least=9)


def test_close_drains_and_then_refuses(make_endpoint: Any, ends: Any) -> None:
    _, producer, consumer = ends
    producer.put(1)
    producer.close()
    make_endpoint("p2").channel("q", host="host").close()
    assert consumer.get().item == 1
    with pytest.raises(ChannelClosedError, match="drained"):
        consumer.get()
    with pytest.raises(ChannelClosedError):
        producer.put(2)
    assert consumer.stats().closed


def test_a_channel_may_be_used_before_it_is_hosted(make_endpoint: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    early = threading.Thread(target=producer.channel("q", host="host").put, args=(1,), daemon=True)
    early.start()
    time.sleep(0.05)
    host.host_channel("q", producers=["p"], consumers=["host"])
    assert host.channel("q", host="host").get(timeout_s=5).item == 1
    early.join(5)
    assert not early.is_alive()


def test_what_was_asked_of_a_channel_that_is_not_hosted_yet_ends_with_who_asked(make_endpoint: Any, peer: Any) -> None:
    host, producer, consumer = make_endpoint("host"), make_endpoint("p"), make_endpoint("c")
    ask = """
    import asyncio
    async def main():
        asking = asyncio.create_task(endpoint.channel("q", host="host").%s)
        await asyncio.sleep(0)
        endpoint.request("host", "asked", "")
        # Else it is withdrawn, where the kill comes later than the end of this.
        await asking
    asyncio.run(main())
    """
    asked = threading.Semaphore(0)
    host.handle("asked", lambda _: asked.release())
    host.on_peer_lost(lambda _: asked.release())
    for name, call in (("v", "aget()"), ("p2", "aput(0)")):
        victim = peer(name, ask % call)
        assert asked.acquire(timeout=10)
        victim.kill()
        assert asked.acquire(timeout=10), "its death was not heard of"
    puts, gets = producer.channel("q", host="host"), consumer.channel("q", host="host")
    with pytest.raises(TimeoutError_, match=r"channel 'q': waited \d\.\d+ s for host"):
        puts.put("too late", timeout_s=0.05)
    host.host_channel("q", producers=["p", "p2"], consumers=["v", "c"])
    puts.put("in time")
    assert gets.get(timeout_s=5).item == "in time"
    with pytest.raises(PeerLostError, match="'p2' is lost"):
        gets.get(timeout_s=5)


def test_a_dropped_channel_frees_memory_and_tells_those_who_wait(ends: Any) -> None:
    host, producer, consumer = ends
    producer.put(np.zeros(100_000))
    failed: list[type] = []

    def wait() -> None:
        try:
            consumer.get(key="other")
        except CommError as error:
            failed.append(type(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)
    host.drop_channel("q")
    thread.join(5)
    assert failed == [ChannelClosedError]
    with pytest.raises(ValueError, match="not hosted here"):
        host.announce_successor("q", lost="p", successor="p3")


def test_a_producer_dead_without_a_successor_is_named(make_endpoint: Any, ends: Any, peer: Any) -> None:
    host, _, consumer = ends
    text = "endpoint.channel('q', host='host').put(np.full(100_000, 3.0), id='1'); say('put'); time.sleep(60)"
    victim = peer("p2", text)
    assert victim.line() == "put"
    victim.kill()
    lease = consumer.get(timeout_s=5)
    assert lease.item[-1] == 3.0
    with pytest.raises(PeerLostError, match="'p2' is lost: it was gone before it closed channel 'q'") as caught:
        consumer.get(timeout_s=5)
    assert caught.value.peer == "p2"
    host.announce_successor("q", lost="p2", successor="p3")
    successor = make_endpoint("p3").channel("q", host="host")
    successor.put("more")
    assert consumer.get(timeout_s=5).item == "more"


def test_a_consumer_killed_while_it_asks_for_more_keeps_what_it_has_acknowledged(ends: Any, peer: Any) -> None:
    _, producer, consumer = ends
    producer.put_many([Put(item=index, id=str(index)) for index in range(3)])
    text = """
    channel = endpoint.channel("q", host="host")
    first, *others = channel.get_batch(3)
    say([lease.id for lease in (first, *others)])
    channel.get(key="never", ack=[first])
    """
    victim = peer("c2", text)
    assert victim.line() == "['0', '1', '2']"
    while consumer.stats().waiting_consumers == 0:
        time.sleep(0.01)
    victim.kill()
    leases = consumer.get_batch(2, timeout_s=5)
    assert [(lease.id, lease.item) for lease in leases] == [("1", 1), ("2", 2)]
    with pytest.raises(TimeoutError_):
        consumer.get(ack=leases, timeout_s=0.1)
    stats = consumer.stats()
    assert (stats.acked, stats.regiven, stats.leased, stats.queued) == (3, 2, 0, 0)


def test_a_killed_consumers_leases_go_to_another_in_order(ends: Any, peer: Any, make_endpoint: Any) -> None:
    host, _, consumer = ends
    host.host_channel("w", producers=["p4"], consumers=["c", "v"])
    producer = make_endpoint("p4")
    producer.channel("w", host="host").put_many(
        [Put(item=np.full(20_000, index), id=str(index)) for index in range(64)]
    )
    victim = peer("v", "leases = endpoint.channel('w', host='host').get_batch(64); say(len(leases)); time.sleep(60)")
    assert victim.line() == "64"
    client = Channel("w", "host", consumer._connect, consumer._stays_here, consumer._check_may_wait)
    pending = threading.Thread(target=lambda: got.extend(client.get_batch(64, timeout_s=10)), daemon=True)
    got: list[Any] = []
    pending.start()
    time.sleep(0.05)
    victim.kill()
    pending.join(5)
    assert [int(lease.item[0]) for lease in got] == list(range(64))
    client.ack(got)
    got.clear()
    gc.collect()
    deadline = time.monotonic() + 5
    while producer._fabric.pool.size_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    # The dead reader's segments are never used again, so nothing is kept of them.
    assert producer._fabric.pool.size_bytes == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda channel, endpoint: channel.put(1),
        lambda channel, endpoint: channel.put_nowait(1),
        lambda channel, endpoint: channel.get(),
        lambda channel, endpoint: channel.get_batch(1),
        lambda channel, endpoint: channel.end(0),
        lambda channel, endpoint: channel.stats(),
        lambda channel, endpoint: channel.close(),
        lambda channel, endpoint: endpoint.request("host", "echo", ""),
        lambda channel, endpoint: endpoint.send("host", 1),
        lambda channel, endpoint: endpoint.recv("host"),
    ],
    ids=["put", "put_nowait", "get", "get_batch", "end", "stats", "close", "request", "send", "recv"],
)
def test_what_would_wait_in_a_callback_is_refused(make_endpoint: Any, wait: Any) -> None:
    host, client = make_endpoint("host"), make_endpoint("c")
    answer: Future[None] = Future()
    host.handle("echo", lambda request: answer)
    host.host_channel("q", producers=["c"], consumers=["c"])
    called: Future[None] = Future()

    def callback(answered: Any) -> None:
        try:
            wait(client.channel("q", host="host"), client)
        except Exception as error:
            called.set_exception(error)

    client.request_async("host", "echo", "").add_done_callback(callback)
    answer.set_result(None)
    with pytest.raises(CommError, match="which must not wait: call it elsewhere"):
        called.result(5)


def test_a_put_to_nobody_is_cancelled_at_once(make_endpoint: Any) -> None:
    channel = make_endpoint("p").channel("q", host="nobody")

    async def main() -> float:
        since = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.aput(1), 0.02)
        return time.monotonic() - since

    assert asyncio.run(main()) < 0.7
