"""A time-out may be as long as a float: what is too long for the system is waited for in parts."""

import math
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from m2flow.comm import RankGroup, _loop, _unix
from m2flow.comm._deadline import Deadline
from m2flow.comm._loop import Loop

# A month is more than poll takes, the others more than a lock.
LONG = [30 * 86_400.0, 1e10, math.inf]


@pytest.mark.parametrize("timeout_s", LONG)
def test_what_waits_takes_a_long_time_out(make_endpoint: Any, timeout_s: float) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    a.handle("s", lambda request: request.args)
    assert b.request("a", "s", "", 1, timeout_s=timeout_s) == 1
    assert b.request_async("a", "s", "", 2, timeout_s=timeout_s).result(timeout_s) == 2
    a.host_channel("q", capacity=2, producers=["b"], consumers=["b"])
    channel = b.channel("q", host="a")
    channel.put("item", timeout_s=timeout_s)
    lease = channel.get(timeout_s=timeout_s)
    assert lease.item == "item"
    sent = threading.Timer(0.1, a.send, ["b", 3])
    sent.start()
    assert b.recv("a", timeout_s=timeout_s) == 3
    sent.join(10)
    a.stage_weights("w", 1, {"x": np.ones(4)}, timeout_s=timeout_s)
    assert b.fetch_weights("a", "w", 1, timeout_s=timeout_s)["x"].sum() == 4
    groups = [RankGroup(end, "g", ["a", "b"]) for end in (a, b)]
    waiting = [group.all_gather(rank, timeout_s=timeout_s) for rank, group in enumerate(groups)]
    assert [each.wait(timeout_s) for each in waiting] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("timeout_s", LONG)
def test_what_is_due_in_a_long_time_keeps_the_io_thread_from_nothing(timeout_s: float) -> None:
    loop = Loop("l", before_sleep=lambda: None)
    loop.start()
    loop.call_later(timeout_s, lambda: None)
    time.sleep(0.1)
    called = threading.Event()
    loop.call(called.set)
    assert called.wait(10)
    loop.stop()


def test_who_waits_for_longer_than_the_system_takes_looks_again(
    make_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_unix, _loop):
        monkeypatch.setattr(module, "LONGEST_SLEEP_S", 0.01)
    a, b = make_endpoint("a"), make_endpoint("b")
    later: list[Future[Any]] = []

    def handle(request: Any) -> Any:
        later.append(Future())
        threading.Timer(0.2, later[-1].set_result, [request.args]).start()
        return later[-1]

    a.handle("s", handle)
    for number in range(2):
        assert b.request("a", "s", "", number, timeout_s=10) == number


def test_what_is_left_is_no_more_than_a_lock_waits_for() -> None:
    left_s = Deadline(math.inf).left_s
    assert left_s is not None
    assert threading.Lock().acquire(timeout=left_s)
    assert left_s > 1e9
