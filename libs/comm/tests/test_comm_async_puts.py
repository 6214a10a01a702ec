"""Async puts of what is large: on threads that are the loop's no more than they keep a process from ending."""

import asyncio
import gc
import threading
import time
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.comm import TimeoutError_

ITEM = np.ones(2 << 20, np.uint8)


@pytest.mark.parametrize("item", [ITEM, ITEM[: 100 << 10]], ids=["large", "small"])
def test_puts_that_wait_for_memory_leave_the_loop_its_threads(make_endpoint: Any, item: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p", quota_bytes=4 * item.nbytes)
    host.host_channel("q", producers=["p"], consumers=["host"])
    puts, gets = producer.channel("q", host="host"), host.channel("q", host="host")

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        pending = [asyncio.create_task(puts.aput(item)) for _ in range(20)]
        for _ in pending:
            lease = await gets.aget(timeout_s=10)
            # Work that is done beside the loop, as what makes room is.
            assert await asyncio.wait_for(asyncio.to_thread(lambda item: int(item.sum()), lease.item), 10) == item.size
            gets.ack(lease)
            del lease
        await asyncio.gather(*pending)

    asyncio.run(main())


def test_a_small_put_that_finds_memory_starts_no_thread(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    puts, gets = producer.channel("q", host="host"), host.channel("q", host="host")
    puts.put("first")
    monkeypatch.setattr(threading.Thread, "start", None)
    asyncio.run(puts.aput(ITEM[: 100 << 10]))
    assert gets.get(timeout_s=10).item == "first"
    assert (gets.get(timeout_s=10).item == ITEM[: 100 << 10]).all()


def test_a_loop_that_has_ended_is_not_kept(make_endpoint: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    channel = producer.channel("q", host="host")

    async def main() -> "weakref.ref[asyncio.AbstractEventLoop]":
        await asyncio.gather(*[channel.aput(ITEM) for _ in range(12)])
        return weakref.ref(asyncio.get_running_loop())

    ended = asyncio.run(main())
    gc.collect()
    assert ended() is None


def test_a_put_that_waits_behind_others_for_memory_times_out(make_endpoint: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p", quota_bytes=2 * ITEM.nbytes)
    host.host_channel("q", producers=["p"], consumers=["host"])
    channel = producer.channel("q", host="host")
    channel.put(ITEM)

    async def main() -> None:
        pending = [asyncio.create_task(channel.aput(ITEM)) for _ in range(30)]
        await asyncio.sleep(0)
        with pytest.raises(
            TimeoutError_, match=r"channel 'q': waited .* for earlier puts, which wait for host or shared"
        ):
            await channel.aput(ITEM, timeout_s=0.2)
        names = [thread.name for thread in threading.enumerate()]
        assert 0 < names.count("m2flow-comm copies") <= 8
        for task in pending:
            task.cancel()
        for done in await asyncio.gather(*pending, return_exceptions=True):
            assert done is None or isinstance(done, asyncio.CancelledError)

    asyncio.run(main())


def test_a_put_whose_loop_is_closed_leaves_no_memory_lent(make_endpoint: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    channel, connection = producer.channel("q", host="host"), producer._fabric.connection("host")
    events = asyncio.new_event_loop()
    pending = events.create_task(channel.aput(np.zeros(8 << 20, np.uint8)))
    events.run_until_complete(asyncio.sleep(0))
    events.close()
    del pending, events
    deadline = time.monotonic() + 10
    # First it is lent, by a thread that keeps the task.
    while not connection._lent and time.monotonic() < deadline:
        time.sleep(0.001)
    while connection._lent and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert connection._lent == {}
    assert channel.stats().put == 0


def test_a_put_that_waits_for_memory_keeps_no_process_from_ending(make_endpoint: Any, peer: Any) -> None:
    make_endpoint("host").host_channel("q", producers=["p"], consumers=["host"])
    waiting = peer(
        "p",
        """
        import asyncio
        directory, token = Path(sys.argv[1]), sys.argv[3]
        endpoint.close()
        channel = Endpoint(directory, "p", token=token, quota_bytes=4 << 20).channel("q", host="host")
        channel.put(np.zeros(3 << 20, np.uint8))
        async def main():
            asyncio.get_running_loop().create_task(channel.aput(np.zeros(2 << 20, np.uint8)))
            await asyncio.sleep(0.1)
        events = asyncio.new_event_loop()
        events.run_until_complete(main())
        """,
    )
    assert waiting.finish() == 0


@pytest.mark.parametrize(
    "item",
    [np.ones((1 << 10, 1 << 10)).T, torch.ones((1 << 10, 1 << 10)).T, np.ones((1 << 10, 1 << 10))[::-1]],
    ids=["transposed", "tensor", "reversed"],
)
def test_what_is_not_contiguous_is_copied_beside_the_loop(
    make_endpoint: Any, item: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    copied: list[str] = []
    contiguous = torch.Tensor.contiguous

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(threading.current_thread().name)
        return contiguous(tensor)

    monkeypatch.setattr(torch.Tensor, "contiguous", watched)

    async def main() -> None:
        tracemalloc.start()
        try:
            await producer.channel("q", host="host").aput(item)
            # numpy counts there what it copies to.
            assert tracemalloc.get_traced_memory()[1] < item.nbytes / 2
        finally:
            tracemalloc.stop()

    asyncio.run(main())
    assert set(copied) <= {"m2flow-comm copies"}
    found = host.channel("q", host="host").get(timeout_s=10).item
    assert (found == item).all()
