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

    def put(batch):
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

    def put(batch):
        (arrived if first.is_set() else first).set()

    def slow():
        yield items(2)[0]
        assert first.wait(5)
        yield items(2)[1]
        assert arrived.wait(5)

    Sender(executor, put).send(slow())


def test_a_message_that_fails_is_raised(executor):
    def put(batch):
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
