"""A program's own alarm, as a grader of proofs sets one: what its handler raises is what a blocking call ends with."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from m2flow.comm import Endpoint, RankGroup


class Alarm(TimeoutError):
    """The program's own."""


@contextmanager
def alarm_in(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Alarm("the grader's time is over")

    before = signal.signal(signal.SIGUSR1, ring)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


WAITS: dict[str, Callable[[Endpoint, float | None], Any]] = {
    "get": lambda worker, timeout_s: worker.channel("q", host="host").get(timeout_s=timeout_s),
    "put": lambda worker, timeout_s: worker.channel("full", host="host").put(2, timeout_s=timeout_s),
    "put for memory": lambda worker, timeout_s: worker.channel("large", host="host").put(
        np.zeros(3 << 20, np.uint8), timeout_s=timeout_s
    ),
    "request": lambda worker, timeout_s: worker.request("host", "slow", "", timeout_s=timeout_s),
    "request for memory": lambda worker, timeout_s: worker.request(
        "host", "slow", "", np.zeros(3 << 20, np.uint8), timeout_s=timeout_s
    ),
    "recv": lambda worker, timeout_s: worker.recv("host", timeout_s=timeout_s),
    "barrier": lambda worker, timeout_s: RankGroup(worker, "g", ["host", "worker"]).barrier(timeout_s=timeout_s).wait(),
    "fetch": lambda worker, timeout_s: worker.fetch_weights("host", "w", 1, timeout_s=timeout_s),
    "prepare": lambda worker, timeout_s: worker.weight_receiver("w", sources=["host"]).prepare(1, timeout_s=timeout_s),
}


@pytest.mark.parametrize("timeout_s", [None, 30.0], ids=["no time-out", "time-out"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_an_alarm_of_the_programs_own_ends_what_waits_as_itself(
    make_endpoint: Any, wait: Callable[[Endpoint, float | None], Any], timeout_s: float | None
) -> None:
    host, worker = make_endpoint("host"), make_endpoint("worker", quota_bytes=4 << 20)
    host.host_channel("q", producers=["host"], consumers=["worker"])
    for name, capacity in (("full", 1), ("large", 0)):
        host.host_channel(name, capacity=capacity, producers=["worker"], consumers=["host"])
    worker.channel("full", host="host").put(1)
    worker.channel("large", host="host").put(np.zeros(3 << 20, np.uint8))
    ended = threading.Event()
    host.handle("slow", lambda request: ended.wait(30))
    try:
        with alarm_in(0.2), pytest.raises(Alarm, match="the grader's time is over"):
            wait(worker, timeout_s)
    finally:
        ended.set()
    # Nothing is lost by it.
    host.channel("q", host="host").put("next")
    assert worker.channel("q", host="host").get(timeout_s=10).item == "next"
