"""Replies: what a waiting thread is told, whoever resolves them and whenever."""

import threading
from typing import Any

import pytest

from m2flow.comm._replies import Awaited, Reply


class Unread:
    """A link that somebody else reads."""

    def read_until(self, awaited: Awaited, timeout_s: float | None, ask: Any) -> None: ...
    def interrupt(self, awaited: Awaited) -> None: ...


def test_result_waits_for_another_thread() -> None:
    reply = Reply(Unread())
    threading.Timer(0.05, reply.resolve, (b"body",)).start()
    assert not reply.done()
    assert reply.result(10) == b"body"
    assert reply.done()
    assert reply.error() is None


def test_result_raises_what_went_wrong_and_times_out() -> None:
    reply = Reply(Unread())
    with pytest.raises(TimeoutError):
        reply.result(0.01)
    reply.resolve(b"", ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        reply.result()


def test_a_request_goes_out_once_when_its_reply_is_waited_for() -> None:
    class Reads(Unread):
        def read_until(self, awaited: Awaited, timeout_s: float | None, ask: Any) -> None:
            ask()

    asked: list[int] = []
    reply = Reply(Reads(), lambda: asked.append(1))
    assert not asked
    for _ in range(2):
        with pytest.raises(TimeoutError):
            reply.result(0.01)
        assert asked == [1]


def test_callbacks_run_once_however_they_race_with_the_end() -> None:
    for _ in range(200):
        reply, called = Reply(Unread()), []
        start = threading.Barrier(2)

        def resolve(reply: Any = reply, start: Any = start) -> None:
            start.wait()
            reply.resolve(b"")

        thread = threading.Thread(target=resolve)
        thread.start()
        start.wait()
        for number in range(5):
            reply.add_done_callback(lambda _, number=number, called=called: called.append(number))  # type: ignore[misc]
        thread.join()
        assert sorted(called) == list(range(5))


def test_calls_of_many_threads_over_one_connection_are_all_answered(make_endpoint: Any) -> None:
    server, client = make_endpoint("server"), make_endpoint("client")
    server.handle("echo", lambda request: request.args)
    wrong: list[int] = []

    def ask(base: int) -> None:
        for number in range(base, base + 50):
            if client.request("server", "echo", "", number, timeout_s=20) != number:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(base,)) for base in range(0, 400, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
