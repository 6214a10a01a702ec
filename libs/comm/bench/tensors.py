"""Large tensors: bandwidth of a channel on one host beside a memcpy and gloo, and cost with size."""

import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import _ray_queue
from _ray_queue import read_all
from _rows import Cast, main, row, said

from m2flow.comm import ChannelClosedError, Endpoint, _pages
from m2flow.comm._copying import copier

MIB = 1 << 20
CAPACITY = 2
SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30]
# Of each size, the seconds that one item takes: measured once, for the row and the picture.
_times: dict[int, float] = {}


def memcpy_s(size: int, repeats: int = 10) -> float:
    """Returns the median seconds of copying warm memory once."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def producer(endpoint: Endpoint, size: str, count: str) -> dict[str, float]:
    """Puts an array that it has."""
    array = np.ones(int(size), np.uint8)
    return _put_all(endpoint, int(size), int(count), lambda index: array)


def producer_on_small_pages(endpoint: Endpoint, size: str, count: str) -> dict[str, float]:
    """The same where the system has no large pages."""
    _pages.large_page_bytes = lambda: 0  # type: ignore[assignment]
    return producer(endpoint, size, count)


def writer(endpoint: Endpoint, size: str, count: str) -> dict[str, float]:
    """Writes its array anew for each item."""
    array = np.ones(int(size), np.uint8)

    def written(index: int) -> Any:
        array[:] = index % 256
        return array

    return _put_all(endpoint, int(size), int(count), written)


def writer_in_place(endpoint: Endpoint, size: str, count: str) -> dict[str, float]:
    """Writes each item where it will be read."""

    def written(index: int) -> Any:
        array = endpoint.empty(int(size), np.uint8)
        array[:] = index % 256
        return array

    return _put_all(endpoint, int(size), int(count), written)


def _put_all(endpoint: Endpoint, size: int, count: int, make: Callable[[int], Any]) -> dict[str, float]:
    channel = endpoint.channel("q", host="consumer")
    times = [time.perf_counter()]
    for index in range(count):
        channel.put(make(index), id=str(index))
        times.append(time.perf_counter())
    channel.close()
    # The first one waits for the consumer to appear.
    fresh_s = times[2] - times[1]
    return {"arena": endpoint._fabric.pool.size_bytes, "memcpy_s": memcpy_s(size), "fresh_s": fresh_s}


def consumer(endpoint: Endpoint, warm: str) -> dict[str, float]:
    endpoint.host_channel("q", capacity=CAPACITY, producers=["producer"], consumers=["consumer"])
    channel = endpoint.channel("q", host="consumer")
    times: list[float] = []
    try:
        while True:
            lease = channel.get()
            read_all(lease.item)
            channel.ack(lease)
            del lease
            times.append(time.perf_counter())
    except ChannelClosedError:
        pass
    # Without the last ones: the producer was done, and the memory was the reader's alone.
    steady = np.diff(times)[int(warm) : -(CAPACITY + 1)]
    return {"median_s": float(np.median(steady)), "mean_s": float(np.mean(steady))}


def gloo_rank(endpoint: Endpoint, rank: str, port: str, count: str) -> float:
    """Sends or receives, and reads, 64 MiB as often; the receiver's median seconds count."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(port), 2, rank == "0", timeout=timedelta(seconds=60))
    group = dist.ProcessGroupGloo(store, int(rank), 2, timedelta(seconds=60))
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    times = []
    for _ in range(int(count)):
        if rank == "0":
            group.send([tensor], 1, 0).wait()
        else:
            group.recv([tensor], 0, 0).wait()
            read_all(tensor.numpy())
        times.append(time.perf_counter())
    return float(np.median(np.diff(times)[2:]))


def through_channel(size: int, count: int = 40, role: str = "producer") -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds an item takes in steady state, median and mean, and what the producer found."""
    with Cast(__file__) as cast:
        # Half to warm up: of 20 items sometimes the seventh is the last whose slot has never been written.
        taker = cast.start("consumer", "consumer", count // 2)
        maker = cast.start(role, "producer", size, count)
        return said(taker), said(maker)


def through_gloo(count: int = 12) -> float:
    with Cast(__file__) as cast:
        port = 20_000 + int(time.time()) % 20_000
        cast.start("gloo_rank", "g0", 0, port, count)
        return float(said(cast.start("gloo_rank", "g1", 1, port, count)))


def through_nothing(size: int, count: int = 40, num_slots: int = 3) -> float:
    """Returns the median seconds an item takes where one process copies it and another reads it, and that is all."""
    fork = multiprocessing.get_context("fork")
    slots = [_shared(size) for _ in range(num_slots)]
    written, free = fork.Semaphore(0), fork.Semaphore(num_slots)

    def write() -> None:
        source, copy = np.ones(size, np.uint8), copier(size)
        for index in range(count):
            free.acquire()
            copy(slots[index % num_slots].ctypes.data, source.ctypes.data, size)
            written.release()

    writer = fork.Process(target=write, daemon=True)
    writer.start()
    times = []
    for index in range(count):
        written.acquire()
        read_all(slots[index % num_slots])
        free.release()
        times.append(time.perf_counter())
    writer.join()
    return float(np.median(np.diff(times)[count // 4 :]))


def _shared(size: int) -> Any:
    """Returns memory for this process and those it forks, as a channel's."""
    fd = os.memfd_create("bench")
    try:
        os.ftruncate(fd, size)
        memory = _pages.map_shared(fd, size)
    finally:
        os.close(fd)
    _pages.put_on_large_pages(memory, size)
    return memory


def measure() -> Iterator[dict[str, Any]]:
    found_ms: dict[str, list[float]] = defaultdict(list)
    # Over so many seconds a host may place the cores now so, now so.
    for _ in range(9):
        for role in ("writer", "writer_in_place", "producer_on_small_pages", "producer"):
            taken, made = through_channel(64 * MIB, role=role)
            found_ms[role].append(1e3 * taken["median_s"])
            found_ms[f"{role}, fresh"].append(1e3 * made["fresh_s"])
            found_ms["memcpy"].append(1e3 * made["memcpy_s"])
        found_ms["no channel"].append(1e3 * through_nothing(64 * MIB))
    print({name: [f"{ms:.2f} ms" for ms in times] for name, times in found_ms.items()}, file=sys.stderr)
    rates = {name: 1e3 * 64 / 1024 / statistics.median(times) for name, times in found_ms.items()}
    rate = rates["producer"]
    about = {"at_least": True, "on_ratio": True}
    beside = {"peer": "memcpy", "peer_value": rates["memcpy"], **about}
    yield row("64 MiB through a channel, all read", rate, "GiB/s", target=0.85, **beside)
    beside = {"peer": "on small pages", "peer_value": rates["producer_on_small_pages"], **about}
    yield row("64 MiB through a channel, all read", rate, "GiB/s", target=1, **beside)
    beside = {"peer": "on small pages", "peer_value": rates["producer_on_small_pages, fresh"], **about}
    yield row("64 MiB put in memory never used before", rates["producer, fresh"], "GiB/s", target=1, **beside)
    beside = {"peer": "written in private memory, and put", "peer_value": rates["writer"], **about}
    name = "64 MiB written in place for each item, all read"
    yield row(name, rates["writer_in_place"], "GiB/s", target=1, **beside)
    beside = {"peer": "memcpy", "peer_value": rates["memcpy"], **about}
    yield row(name, rates["writer_in_place"], "GiB/s", target=0.85, **beside)
    yield row(
        "64 MiB through a channel, all read",
        rate,
        "GiB/s",
        peer="gloo send/recv",
        peer_value=64 / 1024 / through_gloo(),
        target=3,
        **about,
    )
    arena = made["arena"] / (64 * MIB)
    yield row(f"arena after 40 items of 64 MiB, capacity {CAPACITY}", arena, "items", target=6, at_least=False)
    # Of each size the least of sixteen rounds, as in timeit: what else happens on a machine only ever adds. Of a round
    # the mean, as a pipeline's items come in bursts: neither a lucky item nor an unlucky one is its cost.
    rounds = [{size: through_channel(size, _count(size))[0]["mean_s"] for size in SIZES} for _ in range(16)]
    _times.update({size: min(found[size] for found in rounds) for size in SIZES})
    print({f"{size >> 10} KiB": f"{1e6 * found_s:.0f} us" for size, found_s in _times.items()}, file=sys.stderr)
    latency, slope = line_through(_times)
    residual = max(abs(latency + slope * size - found_s) / found_s for size, found_s in _times.items())
    yield row("cost with size, worst residual of the line", residual, "of the time", target=0.2, at_least=False)
    with _ray_queue.cluster() as there:
        if there:
            theirs = 64 / 1024 / statistics.median([_ray_queue.large_s(64 * MIB) for _ in range(5)])
            name = "64 MiB through a channel, all read"
            yield row(name, rate, "GiB/s", peer="ray.util.queue", peer_value=theirs, target=5, **about)


def _count(size: int) -> int:
    return 200 if size < 1 << 26 else 40 if size < 1 << 28 else 20


def line_through(times: dict[int, float]) -> tuple[float, float]:
    """Returns the latency in seconds and the seconds a byte whose worst relative error is the least (Lawson 1961)."""
    sizes, seconds = np.array(list(times), float), np.array(list(times.values()))
    weights = np.ones(len(times))
    for _ in range(1000):
        slope, latency = np.polyfit(sizes, seconds, 1, w=np.sqrt(weights) / seconds)
        weights *= np.abs(latency + slope * sizes - seconds) / seconds
        weights /= weights.sum()
    return float(latency), float(slope)


def plot(file: Path) -> None:
    """Draws the time of an item by its size, and the line of latency plus bytes over bandwidth."""
    from matplotlib import pyplot

    latency, slope = line_through(_times)
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.loglog(list(_times), [1e3 * found_s for found_s in _times.values()], "o", label="measured, steady state")
    label = f"{latency * 1e6:.0f} us + bytes / {1 / slope / 2**30:.2g} GiB/s"
    axes.loglog(SIZES, [1e3 * (latency + slope * size) for size in SIZES], "-", label=label)
    axes.set(xlabel="bytes of an item", ylabel="ms an item", title="One channel, two processes, every byte read")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


ROLES = {
    "producer": producer,
    "producer_on_small_pages": producer_on_small_pages,
    "writer": writer,
    "writer_in_place": writer_in_place,
    "consumer": consumer,
    "gloo_rank": gloo_rank,
}

if __name__ == "__main__":
    main(__file__, measure, ROLES, plot)
