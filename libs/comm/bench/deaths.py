"""What happens when a process is killed: how soon its leases are given out again, and its memory is free."""

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from _rows import Cast, main, row

from m2flow.comm import Endpoint, Put

Took = tuple[int, list[str]]


def victim(endpoint: Endpoint) -> None:
    leases = endpoint.channel("q", host="host").get_batch(64)
    endpoint.request("host", "took", "", (os.getpid(), [lease.id for lease in leases]))
    time.sleep(60)


def kill_one() -> tuple[float, float]:
    """Returns the seconds until all leases were given out again, and until their memory was free."""
    with Cast(__file__) as cast, Endpoint(cast.directory, "host", token="bench") as host:
        host.host_channel("q", producers=["host"], consumers=["v", "host"])
        channel = host.channel("q", host="host")
        took: Queue[Took] = Queue()
        ended: Queue[float] = Queue()
        host.handle("took", lambda request: took.put(request.args))
        channel.put_many([Put(item=np.ones(20_000), id=str(index)) for index in range(64)])
        cast.start("victim", "v")
        pid, _ = took.get(timeout=30)

        def take() -> None:
            leases = channel.get_batch(64, timeout_s=30)
            now = time.monotonic()
            assert [lease.id for lease in leases] == [str(index) for index in range(64)]
            channel.ack(leases)
            ended.put(now)

        threading.Thread(target=take, daemon=True).start()
        time.sleep(0.1)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        given_s = ended.get(timeout=30) - killed
        while host._fabric.pool.size_bytes and time.monotonic() - killed < 5:
            time.sleep(0.005)
        return given_s, time.monotonic() - killed


def kill_one_of_many_keys() -> float:
    """Returns the seconds until its leases were given out again to one who asks again and again, of 20,000 queued."""
    with Cast(__file__) as cast, Endpoint(cast.directory, "host", token="bench") as host:
        host.host_channel("q", producers=["host"], consumers=["v", "host"], route="by_key")
        channel = host.channel("q", host="host")
        took: Queue[Took] = Queue()
        host.handle("took", lambda request: took.put(request.args))
        channel.put_many([Put(item=index, id=str(index), key=str(index)) for index in range(40_000)])
        channel.get_batch(40_000, at_least=0)
        cast.start("victim", "v")
        pid, ids = took.get(timeout=30)
        assert channel.stats().queued > 19_000
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        while not (leases := channel.get_batch(64, at_least=0)):
            time.sleep(0.0005)
        given_s = time.monotonic() - killed
        assert [lease.id for lease in leases] == ids
        return given_s


def measure() -> Iterator[dict[str, Any]]:
    given, freed = zip(*(kill_one() for _ in range(5)), strict=True)
    name = "64 leases of a killed consumer given out again"
    yield row(name, statistics.median(given) * 1000, "ms", target=10, at_least=False)
    yield row("its shared memory free", statistics.median(freed), "s", target=1, at_least=False)
    many = [kill_one_of_many_keys() for _ in range(5)]
    yield row(f"{name}, of 20,000 queued by key", statistics.median(many) * 1000, "ms", target=10, at_least=False)


if __name__ == "__main__":
    main(__file__, measure, {"victim": victim})
