"""Ray's queue as a peer: the same items from one process to another, one by one, in its batched form, and large."""

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

BODY = b"x" * 1000
MIB = 1 << 20


def read_all(array: Any) -> None:
    """Reads every byte of an array of uint8."""
    array.max()


@contextlib.contextmanager
def cluster() -> Iterator[bool]:
    """Starts a local cluster of two processors for as long as the block runs; says whether Ray is there at all."""
    if importlib.util.find_spec("ray") is None:
        print("ray is not installed: its queue is left out as a peer", file=sys.stderr)
        yield False
        return
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=2 << 30,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    # Its workers need not find this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        yield True
    finally:
        ray.shutdown()


def messages_a_second(count: int, batch: int) -> float:
    """Returns how many messages of 1 KB a second pass; in batches through `put_nowait_batch` and its counterpart."""
    times = _run(_put_messages, _get_messages, maxsize=1024 if batch == 1 else 0, count=count, batch=batch)
    return float((len(times) - 1) * batch / (times[-1] - times[0]))


def large_s(size: int, count: int = 10) -> float:
    """Returns the median seconds an array of `size` bytes takes, all read."""
    times = _run(_put_arrays, _get_arrays, maxsize=2, count=count, size=size)
    return float(np.median(np.diff(times)[2:]))


def _run(put: Any, get: Any, *, maxsize: int, **settings: int) -> list[float]:
    import ray
    from ray.util.queue import Queue

    queue = Queue(maxsize=maxsize, actor_options={"num_cpus": 0})
    taken = ray.remote(get).remote(queue, **settings)
    put_all = ray.remote(put).remote(queue, **settings)
    times: list[float] = ray.get(taken, timeout=100)
    ray.get(put_all, timeout=100)
    queue.shutdown()
    return times


def _put_messages(queue: Any, count: int, batch: int) -> None:
    for start in range(0, count, batch):
        items = [{"t": time.monotonic_ns(), "i": start + at, "b": BODY} for at in range(batch)]
        if batch == 1:
            queue.put(items[0])
        else:
            queue.put_nowait_batch(items)


def _get_messages(queue: Any, count: int, batch: int) -> list[float]:
    from ray.util.queue import Empty

    times: list[float] = []
    while len(times) * batch < count:
        if batch == 1:
            queue.get()
        else:
            try:
                queue.get_nowait_batch(batch)
            except Empty:
                # It has no form that waits for a batch.
                time.sleep(0.001)
                continue
        times.append(time.monotonic())
    return times


def _put_arrays(queue: Any, count: int, size: int) -> None:
    array = np.ones(size, np.uint8)
    for _ in range(count):
        queue.put(array)


def _get_arrays(queue: Any, count: int, size: int) -> list[float]:
    times = []
    for _ in range(count):
        read_all(queue.get())
        times.append(time.monotonic())
    return times
