"""Small messages: the time of one, and how many a second."""

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import _ray_queue
from _rows import Cast, main, median_us, row, said

from m2flow.comm import ChannelClosedError, Endpoint, Lease, Put

BODY = b"x" * 1000


def mail_receiver(endpoint: Endpoint, count: str) -> float:
    delays = []
    for _ in range(int(count)):
        sent = endpoint.recv("sender")["t"]
        delays.append(time.monotonic_ns() - sent)
    return median_us(delays[int(count) // 10 :])


def mail_sender(endpoint: Endpoint, count: str) -> None:
    for _ in range(int(count)):
        endpoint.isend("receiver", {"t": time.monotonic_ns(), "n": 1, "s": "text"}).result(60)
        time.sleep(0.001)


def index(endpoint: Endpoint, producers: str, consumers: str) -> None:
    endpoint.host_channel("q", capacity=1024, producers=producers.split(","), consumers=consumers.split(","))
    over = threading.Event()
    endpoint.handle("over", lambda request: over.set())
    arrived: Queue[Future[None]] = Queue()

    def on_start(request: Any) -> Future[None]:
        future: Future[None] = Future()
        arrived.put(future)
        return future

    endpoint.handle("start", on_start)
    for future in [arrived.get(timeout=60) for _ in producers.split(",")]:
        future.set_result(None)
    assert over.wait(120)


def producer(endpoint: Endpoint, count: str, batch: str, pause_s: str) -> float:
    channel = endpoint.channel("q", host="index")
    # Together: a process that still imports takes processor time from those that run.
    endpoint.request("index", "start", "", None, timeout_s=60)
    started = time.monotonic()
    for start in range(0, int(count), int(batch)):
        items = [{"t": time.monotonic_ns(), "i": start + at, "b": BODY} for at in range(int(batch))]
        if int(batch) == 1:
            channel.put(items[0], id=f"{endpoint.name}{start}")
        else:
            channel.put_many([Put(item=item, id=f"{endpoint.name}{item['i']}") for item in items])
        if float(pause_s):
            time.sleep(float(pause_s))
    channel.close()
    return time.monotonic() - started


def consumer(endpoint: Endpoint, batch: str) -> dict[str, Any]:
    channel = endpoint.channel("q", host="index")
    delays: list[int] = []
    started = 0.0
    done: list[Lease] = []
    try:
        while True:
            done = [channel.get(ack=done)] if int(batch) == 1 else channel.get_batch(int(batch), ack=done)
            started = started or time.monotonic()
            now = time.monotonic_ns()
            delays += [now - lease.item["t"] for lease in done]
    except ChannelClosedError:
        pass
    return {"start": started, "end": time.monotonic(), "count": len(delays), "us": median_us(delays)}


def slow_consumer(endpoint: Endpoint, pause_s: str) -> list[float]:
    """Takes items one by one, each costing it `pause_s`; returns how many, and from when to when."""
    channel = endpoint.channel("q", host="index")
    times: list[float] = []
    try:
        while True:
            lease = channel.get()
            times.append(time.monotonic())
            time.sleep(float(pause_s))
            channel.ack(lease)
    except ChannelClosedError:
        return [len(times), times[0], time.monotonic()]


def balance(pause_s: float = 0.02, count: int = 300) -> float:
    """Returns the throughput of a consumer and one four times slower, as a share of the sum of both alone."""
    with Cast(__file__) as cast:
        cast.start("index", "index", "p0", "fast,slow")
        takers = [cast.start("slow_consumer", "fast", pause_s), cast.start("slow_consumer", "slow", 4 * pause_s)]
        time.sleep(1.5)
        maker = cast.start("producer", "p0", count, 1, 0)
        taken = [said(process) for process in takers]
        said(maker)
    seconds = max(end for _, _, end in taken) - min(start for _, start, _ in taken)
    return float(sum(number for number, _, _ in taken) / seconds / (1 / pause_s + 1 / (4 * pause_s)))


def mail_latency_us(count: int = 2000) -> float:
    with Cast(__file__) as cast:
        receiver = cast.start("mail_receiver", "receiver", count)
        cast.start("mail_sender", "sender", count)
        return float(said(receiver))


def channel_run(num_pairs: int, count: int, batch: int, pause_s: float = 0) -> tuple[float, float]:
    """Returns messages a second and the median delay in microseconds."""
    producers = [f"p{rank}" for rank in range(num_pairs)]
    consumers = [f"c{rank}" for rank in range(num_pairs)]
    with Cast(__file__) as cast:
        cast.start("index", "index", ",".join(producers), ",".join(consumers))
        takers = [cast.start("consumer", name, batch) for name in consumers]
        time.sleep(1.0 + 0.3 * num_pairs)
        makers = [cast.start("producer", name, count, batch, pause_s) for name in producers]
        taken = [said(process) for process in takers]
        for process in makers:
            said(process)
    seconds = max(one["end"] for one in taken) - min(one["start"] for one in taken if one["start"])
    return sum(one["count"] for one in taken) / seconds, taken[0]["us"]


def measure() -> Iterator[dict[str, Any]]:
    yield row("small dict, process to process, one way", mail_latency_us(), "us", target=100, at_least=False)
    delay_us = channel_run(1, 2000, 1, 0.001)[1]
    yield row("small dict, index in a third process, one way", delay_us, "us", target=200, at_least=False)
    rates = {}
    for name, num_pairs, count, batch, target in (
        ("1 KB one by one", 1, 20_000, 1, 5_000),
        ("1 KB in batches of 16", 1, 160_000, 16, 50_000),
        ("1 KB in batches of 16, 4 to 4", 4, 80_000, 16, 80_000),
    ):
        # Of three runs, of a few seconds each: a host may give the machine less for as long.
        rates[name] = statistics.median([channel_run(num_pairs, count, batch)[0] for _ in range(3)])
        yield row(f"{name}, through a channel", rates[name], "messages/s", target=target, at_least=True)
    name = "a consumer and one four times slower, of the sum of both"
    yield row(name, balance(), "of the sum", target=0.9, at_least=True)
    # Last, and with nothing of ours beside it: each has the machine to itself.
    with _ray_queue.cluster() as there:
        for name, count, batch, target in (("1 KB one by one", 2_000, 1, 10), ("1 KB in batches of 16", 32_000, 16, 5)):
            if there:
                theirs = statistics.median([_ray_queue.messages_a_second(count, batch) for _ in range(3)])
                about = {"peer": "ray.util.queue", "peer_value": theirs, "on_ratio": True}
                yield row(f"{name}, beside Ray", rates[name], "messages/s", target=target, at_least=True, **about)


ROLES = {
    "slow_consumer": slow_consumer,
    "mail_receiver": mail_receiver,
    "mail_sender": mail_sender,
    "index": index,
    "producer": producer,
    "consumer": consumer,
}

if __name__ == "__main__":
    main(__file__, measure, ROLES)
