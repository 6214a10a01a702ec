"""Channels whose ends are all in one process: the object itself is handed over, leased and given out again."""

import gc
import re
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import ChannelFullError, CommError, Endpoint, PayloadError, Put, TimeoutError_, _references
from m2flow.comm._deadline import Deadline

Ends = tuple[Endpoint, ...]


@pytest.fixture
def ends(run_dir: Path) -> Iterator[Ends]:
    """Endpoints "host", "p", "c" and "d" of this process, and a channel "q" of capacity 4 from "p" to "c" and "d"."""
    with ExitStack() as stack:
        made = tuple(
            stack.enter_context(Endpoint(run_dir, name, token="token-of-this-run")) for name in ("host", "p", "c", "d")
        )
        made[0].host_channel("q", capacity=4, producers=["p"], consumers=["c", "d"])
        yield made


def tell(far: Any, line: str) -> None:
    far.process.stdin.write(line + "\n")
    far.process.stdin.flush()


def test_the_item_itself_arrives_and_nothing_of_it_is_kept(ends: Ends) -> None:
    host, p, c, _ = ends
    array = np.zeros(100_000)
    kept = weakref.ref(array)
    item = {"x": array}
    p.channel("q", host="host").put(item, id="1")
    channel = c.channel("q", host="host")
    lease = channel.get(timeout_s=5)
    assert lease.item is item
    assert p._fabric.pool.size_bytes == 0
    channel.ack(lease)
    assert channel.stats().acked == 1
    del lease, item, array
    gc.collect()
    assert kept() is None
    assert host.name == "host"


def test_one_endpoint_may_be_all_of_the_ends(run_dir: Path) -> None:
    with Endpoint(run_dir, "a", token="t") as a:
        a.host_channel("q", producers=["a"], consumers=["a"])
        channel = a.channel("q", host="a")
        channel.put_many([Put(item=[index]) for index in range(3)])
        channel.put_tombstone(id="4", iteration=0, reason="skipped")
        assert [lease.item for lease in channel.get_batch(4, timeout_s=5)] == [[0], [1], [2], None]


def test_it_is_given_out_again_when_its_consumer_leaves_and_its_producer_has_left(ends: Ends) -> None:
    _, p, c, d = ends
    item = {"x": np.ones(3)}
    p.channel("q", host="host").put(item)
    p.close()
    taken = c.channel("q", host="host").get(timeout_s=5)
    assert taken.item is item
    del taken
    c.close()
    again = d.channel("q", host="host").get(timeout_s=5)
    assert again.item is item


def test_what_has_no_encoding_is_refused_here_as_anywhere(ends: Ends) -> None:
    channel = ends[1].channel("q", host="host")
    with pytest.raises(PayloadError):
        channel.put({"x": object()})
    assert channel.stats().put == 0


def test_what_is_refused_or_times_out_is_not_kept(ends: Ends) -> None:
    channel = ends[1].channel("q", host="host")
    channel.put_many([Put(item=index) for index in range(4)])
    arrays = [np.zeros(10), np.zeros(10)]
    kept = [weakref.ref(array) for array in arrays]
    with pytest.raises(ChannelFullError):
        channel.put_nowait(arrays[0])
    with pytest.raises(TimeoutError_):
        channel.put(arrays[1], timeout_s=0.05)
    del arrays
    gc.collect()
    assert [found() for found in kept] == [None, None]


def test_an_object_that_is_gone_fails_its_put_and_not_the_connection(ends: Ends) -> None:
    host, p, *_ = ends
    channel, held, puts = p.channel("q", host="host"), threading.Event(), [Put(item=np.zeros(10))]
    channel.stats()
    connection = p._fabric.connection("host")
    host._fabric.loop.call(lambda: bool(held.wait(5)))
    channel._ask_put(puts, channel._encoded(puts), Deadline(), wait=True)  # given up at once, as by Ctrl-C
    held.set()
    assert channel.stats().put == 0
    assert p._fabric.connection("host") is connection


def test_a_consumer_elsewhere_makes_items_leave_as_bytes(ends: Ends) -> None:
    host, p, c, _ = ends
    host.host_channel("w", producers=["p"], consumers=["c", "elsewhere"])
    item = {"x": np.arange(5)}
    p.channel("w", host="host").put(item)
    arrived = c.channel("w", host="host").get(timeout_s=5).item
    assert arrived is not item
    assert not np.shares_memory(arrived["x"], item["x"])


def test_a_consumer_that_comes_back_elsewhere_gets_what_was_put_before(ends: Ends, peer: Any) -> None:
    _, p, _, d = ends
    p.channel("q", host="host").put({"x": np.arange(50_000)})
    d.close()
    late = peer("d", "say(endpoint.channel('q', host='host').get(timeout_s=10).item['x'].sum())")
    assert late.line() == str(np.arange(50_000).sum())


def test_what_comes_from_elsewhere_is_read_where_the_host_has_it(ends: Ends, peer: Any) -> None:
    """In the one mapping of this process, and the producer's memory is free once the last reader has let go."""

    def mappings() -> Counter[str]:
        return Counter(re.findall(r"memfd:m2flow-[0-9a-f]{4,}", Path("/proc/self/maps").read_text()))

    before = mappings()
    host, _, c, d = ends
    host.host_channel("from", producers=["e"], consumers=["c", "d"])
    far = peer(
        "e",
        """
        channel = endpoint.channel("from", host="host")
        for index in range(3):
            channel.put({"x": np.full(50_000, index)}, id=str(index))
        say("put")
        pool = endpoint._fabric.pool
        def wait_until_free(count):
            deadline = time.monotonic() + 10
            while sum(slab.slots_in_use for slab in pool._slabs.values()) > count:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        sys.stdin.readline()
        wait_until_free(1)
        say("one is held")
        sys.stdin.readline()
        wait_until_free(0)
        say("free")
        sys.stdin.readline()
        """,
    )
    assert far.line() == "put"
    channel, other = c.channel("from", host="host"), d.channel("from", host="host")
    first, second = channel.get_batch(2, timeout_s=5)
    # Each keeps its own: what one has read and another gives back, and what is acknowledged first.
    third = other.get(timeout_s=5)
    other.give_back(third)
    again = channel.get(timeout_s=5)
    arrays = [lease.item["x"] for lease in (first, second, again, third)]
    assert [array[-1] for array in arrays] == [0, 1, 2, 2]
    assert np.shares_memory(arrays[2], arrays[3])
    assert not arrays[0].flags.writeable
    assert sorted((mappings() - before).values()) == [1]
    channel.ack([first, second, again])
    del first, second, again, third, arrays[1:3]
    gc.collect()
    tell(far, "go on")
    # The first and the third item of which two had an array.
    assert [array[-1] for array in arrays] == [0, 2]
    del arrays[0]
    gc.collect()
    assert far.line() == "one is held"
    arrays.clear()
    tell(far, "go on")
    assert far.line() == "free"


@pytest.mark.parametrize("known", [True, False], ids=["still known", "forgotten"])
def test_an_item_that_was_dropped_before_its_answer_was_read_is_not_read(ends: Ends, peer: Any, known: bool) -> None:
    """Its memory is another's by then."""
    before = set(_references._held)
    host, _, c, _ = ends
    host.host_channel("from", producers=["e"], consumers=["c"])
    far = peer("e", "endpoint.channel('from', host='host').put(np.ones(50_000)); say('put'); sys.stdin.readline()")
    assert far.line() == "put"
    channel = c.channel("from", host="host")
    asked = channel._ask_get(0.0, None, None, (), 5.0)
    response = asked.wait_response()
    kept = [thing for number, thing in _references._held.items() if number not in before] if known else []
    host.drop_channel("from")
    with pytest.raises(CommError, match="gone: its channel gave it to another reader or was dropped"):
        asked._leases(response)
    assert len(kept) == known


_PUT_AS_ASKED = """
    channel = endpoint.channel("from", host="host")
    for line in sys.stdin:
        try:
            channel.put(np.full(50_000, int(line)), timeout_s=5)
            say("put")
        except TimeoutError as error:
            say(str(error))
"""


def test_memory_goes_back_though_its_reader_has_closed_its_endpoint(ends: Ends, peer: Any, run_dir: Path) -> None:
    host = ends[0]
    host.host_channel("from", producers=["e"], consumers=["late"])
    far = peer("e", "\n    endpoint._fabric.pool.quota_bytes = 2 << 20" + _PUT_AS_ASKED)
    for index in range(12):
        tell(far, str(index))
        assert far.line() == "put"
        with Endpoint(run_dir, "late", token="token-of-this-run") as late:
            channel = late.channel("from", host="host")
            lease = channel.get(timeout_s=5)
            item = lease.item
            channel.ack(lease)
            channel.stats()
            del lease
        assert item.min() == item.max() == index
        del item
        gc.collect()


def test_an_item_has_one_number_however_often_it_is_given(ends: Ends, peer: Any) -> None:
    before = set(_references._held)
    host, _, c, _ = ends
    host.host_channel("from", producers=["e"], consumers=["c"])
    far = peer("e", _PUT_AS_ASKED)
    tell(far, "7")
    assert far.line() == "put"
    channel = c.channel("from", host="host")
    for _ in range(20):
        channel.give_back(channel.get(timeout_s=5))
    assert len(set(_references._held) - before) == 1
    channel.ack(channel.get(timeout_s=5))
    channel.stats()
    gc.collect()
    assert set(_references._held) <= before


def test_over_grpc_nobody_gets_a_number(ends: Ends, peer: Any) -> None:
    """A number means nothing on another host, and one who is told an address is reached as if there."""
    before = set(_references._held)
    host, _, c, _ = ends
    host.host_channel("from", producers=["e"], consumers=["c"])
    c.add_address("host", host.listen("127.0.0.1:0"))
    far = peer("e", _PUT_AS_ASKED)
    tell(far, "7")
    assert far.line() == "put"
    lease = c.channel("from", host="host").get(timeout_s=5)
    assert lease.item.min() == 7
    assert set(_references._held) <= before


def test_an_item_is_still_read_after_its_producer_has_died_and_its_host_has_closed(ends: Ends, peer: Any) -> None:
    host, _, c, _ = ends
    host.host_channel("from", producers=["e"], consumers=["c"])
    far = peer("e", "endpoint.channel('from', host='host').put(np.arange(50_000)); say('put'); sys.stdin.readline()")
    assert far.line() == "put"
    item = c.channel("from", host="host").get(timeout_s=5).item
    far.kill()
    host.close()
    gc.collect()
    np.testing.assert_array_equal(item, np.arange(50_000))
