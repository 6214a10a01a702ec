"""Answers: every call is answered, whatever its handler raises and however little memory is left."""

import asyncio
import queue
import sys
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from m2flow.comm import RemoteError, TimeoutError_


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt(), Unspeakable()], ids=repr
)
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "on a thread"])
def test_whatever_a_handler_raises_its_caller_is_told_and_others_are_answered(
    make_endpoint: Any, error: BaseException, prompt: bool
) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")

    def fail(request: Any) -> None:
        raise error

    def fail_later(request: Any) -> "Future[None]":
        failed: Future[None] = Future()
        failed.set_exception(error)
        return failed

    b.handle("fine", lambda request: 1)
    for number in range(9):
        b.handle(f"fail{number}", fail_later if number == 8 else fail, prompt=prompt)
        with pytest.raises(RemoteError) as caught:
            a.request("b", f"fail{number}", "", timeout_s=5)
        assert caught.value.type_name == type(error).__name__
    assert a.request("b", "fine", "", timeout_s=5) == 1


def test_a_users_interrupt_of_a_handler_on_the_main_thread_is_the_users(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    asked: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    def interrupted(request: Any) -> None:
        raise KeyboardInterrupt

    def ask_back(request: Any) -> "Future[None]":
        # By then the main thread waits, and reads what comes.
        time.sleep(0.1)
        asked.put(b.request_async("a", "interrupted", ""))
        return Future()

    a.handle("interrupted", interrupted, prompt=True)
    b.handle("ask back", ask_back)
    b.handle("fine", lambda request: 1)
    assert a.request("b", "fine", "") == 1
    with pytest.raises(KeyboardInterrupt):
        a.request("b", "ask back", "", timeout_s=5)
    with pytest.raises(RemoteError, match="KeyboardInterrupt in 'a'"):
        asked.get(timeout=5).result(5)


def test_a_callback_that_exits_ends_no_thread_of_an_endpoint(
    make_endpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    promised: Future[int] = Future()
    b.handle("later", lambda request: promised)
    b.handle("fine", lambda request: 1)
    futures = [a.request_async("b", "later", ""), b.irecv("a", tag="x"), a.isend("b", 1, tag="y")]
    for future in futures:
        future.add_done_callback(lambda _: sys.exit(3))
    promised.set_result(2)
    sent, received = a.isend("b", 3, tag="x"), b.irecv("a", tag="y")
    assert [future.result(5) for future in (*futures, sent, received)] == [2, 3, None, None, 1]
    assert a.request("b", "fine", "", timeout_s=5) == b.request("b", "fine", "", timeout_s=5) == 1
    assert caplog.text.count("the callback of a future failed") == 3


def test_an_answer_goes_in_its_message_where_the_quota_is_used_up(make_endpoint: Any) -> None:
    a, b = make_endpoint("a", quota_bytes=3 << 20), make_endpoint("b")
    a.stage_weights("w", 1, {"x": np.ones(2 << 20, np.uint8)})
    a.handle("large", lambda request: np.arange(1 << 18))
    assert b.request("a", "large", "", timeout_s=5)[-1] == (1 << 18) - 1
    received: list[int] = []
    receiver = b.weight_receiver("w", sources=["a"])
    assert receiver.stream(1, lambda bucket: received.append(int(bucket["x"].sum())), timeout_s=5) == 1
    assert received == [2 << 20]
    assert b.newest_weights("a", "w", timeout_s=5) == 1
    with pytest.raises(TimeoutError_, match=r"'m2flow\.weights\.newest': waited 0\.\d+ s for nobody"):
        b.newest_weights("nobody", "w", timeout_s=0.05)
