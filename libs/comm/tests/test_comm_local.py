"""Endpoints of one process: who sends a frame deals with it, in the receiving endpoint's place."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import CommError, Endpoint, IterationEnded, PeerLostError, Put, RemoteError, Request, TimeoutError_

_NUM_SIDE = 8
_NUM_ITEMS = 50


@pytest.fixture
def make(run_dir: Path) -> Iterator[Any]:
    """Makes endpoints of one run in this process."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(Endpoint(run_dir, name, token="t"))


def test_a_call_that_is_answered_at_once_runs_on_the_thread_that_calls(make: Any) -> None:
    a, b = make("a"), make("b")
    b.handle("s", lambda request: threading.get_ident(), prompt=True)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: (a.request("b", "s", "m", timeout_s=5), threading.get_ident()))
    answered, asking = asked.result()
    assert answered == asking


def test_the_main_thread_deals_with_nothing_for_another(make: Any) -> None:
    """A KeyboardInterrupt, which it alone gets, may come at any place."""
    a, b = make("a"), make("b")
    b.handle("s", lambda request: threading.current_thread().name, prompt=True)
    assert a.request("b", "s", "m", timeout_s=5) == "m2flow-comm b"


def test_a_thread_works_for_another_endpoint_only_for_a_while(make: Any) -> None:
    loop = make("host")._fabric.loop
    made: Counter[int] = Counter()

    def more() -> None:
        made[threading.get_ident()] += 1
        if made.total() < 10_000:
            loop.work(more)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(loop.work, more).result()
        assert 0 < made[pool.submit(threading.get_ident).result()] < 1_000


def test_who_closes_its_endpoint_is_not_told_that_its_peer_is_lost(make: Any) -> None:
    a, b = make("a"), make("b")
    b.handle("s", lambda request: Future())
    answer = a.request_async("b", "s", "m")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(a.close).result()
    with pytest.raises(CommError, match="endpoint 'a' was closed"):
        answer.result(5)


def test_who_announces_a_segment_deals_with_nothing_that_wants_the_same_connection(make: Any) -> None:
    a, b = make("a"), make("b")
    b.handle("sum", lambda request: request.args.sum())
    connection = a._fabric.connection("b")
    b._fabric.loop._calls.append(partial(connection.answered, 0, b""))
    sums: list[float] = []
    asks = threading.Thread(target=lambda: sums.append(a.request("b", "sum", "", np.ones(100_000))), daemon=True)
    asks.start()
    asks.join(5)
    assert sums == [100_000]


@contextmanager
def much_sent(make: Any) -> Iterator[tuple[Any, Future[Any], threading.Event]]:
    """An endpoint whose thread sends 12 MB to one that deals with nothing until the event is set."""
    host, w = make("host"), make("w")
    host.handle("s", lambda request: None)
    assert w.request("host", "s", "m", timeout_s=5) is None
    holds, held = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        held.wait(5)

    host._fabric.loop.call(hold)
    # On its io thread: else who sends might find it to do, in that one's place.
    assert holds.wait(5)
    body = bytes(30_000)
    with ThreadPoolExecutor(1) as pool:
        yield w, pool.submit(lambda: [w.request_async("host", "s", "m", body) for _ in range(400)]), held


def test_who_sends_waits_while_much_waits_at_the_other_end(make: Any) -> None:
    with much_sent(make) as (_, sent, held):
        assert not wait([sent], 0.2).done, "12 MB wait for nobody"
        held.set()
        assert [answer.result(5) for answer in sent.result(5)] == [None] * 400


def test_who_sends_no_longer_waits_once_either_end_is_closed(make: Any) -> None:
    with much_sent(make) as (w, sent, held):
        assert not wait([sent], 0.1).done
        w._fabric.connection("host").link.close()
        sent.result(5)
        held.set()


def test_who_is_called_may_call_back_before_it_answers(make: Any) -> None:
    a, b = make("a"), make("b")
    a.handle("number", lambda request: 41, prompt=True)

    def ask_back(request: Request) -> "Future[Any]":
        answer: Future[Any] = Future()
        asked = b.request_async("a", "number", "get")
        asked.add_done_callback(lambda done: answer.set_result(done.result() + 1))
        return answer

    b.handle("s", ask_back, prompt=True)
    assert a.request("b", "s", "m", timeout_s=5) == 42


def test_a_handler_that_waits_for_another_call_is_refused(make: Any) -> None:
    a, b = make("a"), make("b")
    b.handle("s", lambda request: b.request("a", "s", "m"), prompt=True)
    with pytest.raises(RemoteError, match="must not wait"):
        a.request("b", "s", "m", timeout_s=5)


def test_many_threads_at_one_index_lose_and_double_nothing(make: Any) -> None:
    host = make("host")
    producers = [make(f"p{number}") for number in range(_NUM_SIDE)]
    consumers = [make(f"c{number}") for number in range(_NUM_SIDE)]
    names = [[one.name for one in side] for side in (producers, consumers)]
    host.host_channel("q", capacity=3, producers=names[0], consumers=names[1])
    taken: list[Counter[str]] = [Counter() for _ in consumers]

    def produce(end: Endpoint) -> None:
        channel = end.channel("q", host="host")
        for number in range(_NUM_ITEMS):
            channel.put_many([Put([number], f"{end.name}.{number}.{part}") for part in "ab"], timeout_s=20)
        channel.end(0)

    def consume(end: Endpoint, seen: Counter[str]) -> None:
        channel = end.channel("q", host="host")
        while True:
            try:
                leases = channel.get_batch(3, iteration=0, timeout_s=0.001)
            except TimeoutError_:
                continue
            except IterationEnded:
                return
            seen.update(lease.id for lease in leases)
            channel.ack(leases)

    jobs = [threading.Thread(target=produce, args=(end,)) for end in producers]
    jobs += [threading.Thread(target=consume, args=pair) for pair in zip(consumers, taken, strict=True)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(20)
    assert sum(taken, Counter[str]()) == Counter(
        f"p{side}.{number}.{part}" for side in range(_NUM_SIDE) for number in range(_NUM_ITEMS) for part in "ab"
    )
    assert host.channel("q", host="host").stats().acked == 2 * _NUM_SIDE * _NUM_ITEMS


def test_one_that_closes_is_gone_but_not_lost_and_its_name_is_reached_again(make: Any) -> None:
    a, b = make("a"), make("b")
    lost: list[str] = []
    a.on_peer_lost(lost.append)
    b.handle("s", lambda request: Future(), prompt=True)
    waiting = a.request_async("b", "s", "m")
    b.close()
    with pytest.raises(PeerLostError, match="b"):
        waiting.result(5)
    make("b").handle("s", lambda request: "again")
    assert a.request("b", "s", "m", timeout_s=5) == "again"
    assert lost == []
