"""A generator's items go out in order, none left behind, and a failed message stops it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from m2flow.flow._sender import Sender
from m2flow.worker import Item


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def items(count):
    return [Item((number,), 0) for number in range(count)]


def test_every_item_is_put_once_in_order_and_those_that_wait_go_together(executor):
    batches = []

    def put(batch, timeout_s):
        batches.append(batch)
        time.sleep(0.002)

    sender = Sender(executor, put)
    sent = sender.send(items(200))
    sender.finish()
    assert [item for batch in batches for item in batch] == sent == items(200)
    assert len(batches) < 200


def test_an_item_goes_out_though_no_other_follows(executor):
    arrived = threading.Event()
    first = threading.Event()

    def put(batch, timeout_s):
        (arrived if first.is_set() else first).set()

    def slow():
        yield items(2)[0]
        assert first.wait(5)
        yield items(2)[1]
        assert arrived.wait(5)

    Sender(executor, put).send(slow())


def test_a_message_that_fails_is_raised(executor):
    def put(batch, timeout_s):
        raise ConnectionError("gone")

    sender = Sender(executor, put)

    def paced():
        for item in items(1000):
            yield item
            time.sleep(0.001)

    with pytest.raises(ConnectionError, match="gone"):
        sender.send(paced())
    with pytest.raises(ConnectionError, match="gone"):
        sender.finish()


def test_a_list_is_put_whole_by_the_thread_that_finishes_and_again_where_there_was_no_room(executor):
    put = []

    def full_at_first(batch, timeout_s):
        put.append((batch, timeout_s, threading.get_ident()))
        if timeout_s is not None:
            raise TimeoutError

    sender = Sender(executor, full_at_first)
    sender.keep(items(3))
    assert not put
    with pytest.raises(TimeoutError):
        sender.finish(0.01)
    sender.finish()
    sender.finish()
    assert put == [(items(3), 0.01, threading.get_ident()), (items(3), None, threading.get_ident())]
