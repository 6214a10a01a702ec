"""Across hosts, between two network namespaces of this machine: how much of a limited line the gRPC path fills, and how
many small items a second a loop takes over a slow one.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import network_of_two
from _rows import main, row

from m2flow.comm import ChannelClosedError, Endpoint, Put

MIB = 1 << 20
LINE_BYTES_PER_S = 25e6
NUM_ITEMS, WARM_ITEMS, ITEM_BYTES = 60, 20, 4 * MIB
NUM_SMALL, AHEAD = 200, 8


def takes(directory: str) -> None:
    """Takes items on host b, and prints the bytes a second between the warm ones and the last."""
    with Endpoint(Path(directory), "b", token="bench") as endpoint:
        endpoint.listen(f"{network_of_two.ADDRESSES['b']}:7000")
        endpoint.host_channel("q", capacity=4, producers=["a"], consumers=["b"])
        channel = endpoint.channel("q", host="b")
        print("up", flush=True)
        times: list[float] = []
        while True:
            try:
                channel.ack(channel.get())
            except ChannelClosedError:
                break
            times.append(time.perf_counter())
    print(json.dumps((NUM_ITEMS - WARM_ITEMS - 1) * ITEM_BYTES / (times[-1] - times[WARM_ITEMS])), flush=True)


def puts(directory: str, num_threads: str) -> None:
    """Puts items from host a, each thread one at a time."""
    with Endpoint(Path(directory), "a", token="bench", connect_timeout_s=30) as endpoint:
        endpoint.add_address("b", f"{network_of_two.ADDRESSES['b']}:7000")
        channel = endpoint.channel("q", host="b")
        item = np.ones(ITEM_BYTES, np.uint8)
        with ThreadPoolExecutor(int(num_threads)) as threads:
            list(threads.map(lambda index: channel.put(item, id=str(index)), range(NUM_ITEMS)))
        channel.close()


def fills(directory: str) -> None:
    """Hosts small items on host a, all of them there before the first is taken."""
    with Endpoint(Path(directory), "a", token="bench") as endpoint:
        endpoint.host_channel("q", producers=["a"], consumers=["b"])
        channel = endpoint.channel("q", host="a")
        channel.put_many([Put(item=bytes(1024), id=str(index)) for index in range(NUM_SMALL)])
        channel.close()
        endpoint.listen(f"{network_of_two.ADDRESSES['a']}:7000")
        print("up", flush=True)
        # Until the network ends it.
        time.sleep(120)


def loops(directory: str, ahead: str) -> None:
    """Takes them on host b in a loop; prints how many a second from the tenth on."""
    with Endpoint(Path(directory), "b", token="bench", connect_timeout_s=30) as endpoint:
        endpoint.add_address("a", f"{network_of_two.ADDRESSES['a']}:7000")
        times = [
            time.perf_counter() for lease in endpoint.channel("q", host="a").leases(ahead=int(ahead)) if lease.item
        ]
    print(json.dumps((NUM_SMALL - 10) / (times[-1] - times[9])), flush=True)


def small_items_a_second(ahead: int, delay_s: float) -> float:
    with tempfile.TemporaryDirectory(prefix="m2b") as directory, network_of_two.network(Path(directory)) as network:
        host = network.host("a", __file__, "--fills", f"{directory}/a")
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
        taker = network.host("b", __file__, "--loops", f"{directory}/b", str(ahead))
        network.set(delay_s=delay_s)
        assert taker.stdout is not None
        return float(json.loads(taker.stdout.readline()))


def over_a_line(num_threads: int, **fields: float) -> float:
    """Returns the bytes a second of items that threads put through a channel between two hosts whose line is so."""
    with tempfile.TemporaryDirectory(prefix="m2b") as directory, network_of_two.network(Path(directory)) as network:
        taker = network.host("b", __file__, "--takes", f"{directory}/b")
        assert taker.stdout is not None
        assert taker.stdout.readline() == "up\n"
        network.host("a", __file__, "--puts", f"{directory}/a", str(num_threads))
        network.set(bytes_per_s=LINE_BYTES_PER_S, **fields)
        return float(json.loads(taker.stdout.readline()))


def measure() -> Iterator[dict[str, Any]]:
    if why_not := network_of_two.why_not():
        print(f"no two hosts can be made here: {why_not}", file=sys.stderr)
        return
    line = LINE_BYTES_PER_S / 1e6
    for num_threads, delay_s in ((1, 0.0), (1, 0.01), (2, 0.01)):
        rate = over_a_line(num_threads, delay_s=delay_s) / 1e6
        name = f"4 MiB items, {num_threads} at a time, {1e3 * delay_s:.0f} ms each way"
        yield row(name, rate, "MB/s", peer="its limit", peer_value=line, target=0.8, at_least=True, on_ratio=True)
    one_by_one, ahead = (small_items_a_second(ahead, delay_s=0.01) for ahead in (0, AHEAD))
    yield row(
        f"1 KiB items in a loop with {AHEAD} ahead, 10 ms each way",
        ahead,
        "items/s",
        peer="none ahead",
        peer_value=one_by_one,
        target=AHEAD / 2,
        at_least=True,
        on_ratio=True,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--takes"]:
        takes(sys.argv[2])
    elif sys.argv[1:2] == ["--puts"]:
        puts(*sys.argv[2:])
    elif sys.argv[1:2] == ["--fills"]:
        fills(sys.argv[2])
    elif sys.argv[1:2] == ["--loops"]:
        loops(*sys.argv[2:])
    else:
        main(__file__, measure, {})
