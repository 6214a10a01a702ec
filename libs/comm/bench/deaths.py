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


def victim(endpoint: Endpoint) -> None:
    leases = endpoint.channel("q", host="host").get_batch(64)
    endpoint.request("host", "took", "", os.getpid())
    assert len(leases) == 64
    time.sleep(60)


def kill_one() -> tuple[float, float]:
    """Returns the seconds until all leases were given out again, and until their memory was free."""
    with Cast(__file__) as cast, Endpoint(cast.directory, "host", token="bench") as host:
        host.host_channel("q", producers=["host"], consumers=["v", "host"])
        channel = host.channel("q", host="host")
        took: Queue[int] = Queue()
        ended: Queue[float] = Queue()
        host.handle("took", lambda request: took.put(request.args))
        channel.put_many([Put(item=np.ones(20_000), id=str(index)) for index in range(64)])
        cast.start("victim", "v")
        pid = took.get(timeout=30)

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


def measure() -> Iterator[dict[str, Any]]:
    given, freed = zip(*(kill_one() for _ in range(5)), strict=True)
    name = "64 leases of a killed consumer given out again"
    yield row(name, statistics.median(given) * 1000, "ms", target=10, at_least=False)
    yield row("its shared memory free", statistics.median(freed), "s", target=1, at_least=False)


if __name__ == "__main__":
    main(__file__, measure, {"victim": victim})
