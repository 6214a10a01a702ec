"""Messages that nobody receives: they cost no more than the receiver's quota, and fail when it closes."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from m2flow.comm import CommError, Endpoint, PeerLostError
from m2flow.comm._mailbox import _MESSAGE_BYTES

Ends = tuple[Endpoint, Endpoint]


@pytest.fixture(params=[True, False], ids=["by reference", "encoded"])
def ends(request: pytest.FixtureRequest, run_dir: Path) -> Iterator[Ends]:
    """Endpoints "a" and "b", of which each takes mail of 64 KiB."""
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(
                Endpoint(run_dir, name, token="t", quota_bytes=64 << 10, by_reference=bool(request.param))
            )
            for name in ("a", "b")
        )
        yield a, b


def test_a_full_mailbox_refuses_more_until_some_of_it_is_received(ends: Ends) -> None:
    a, b = ends
    fitting = (64 << 10) // (_MESSAGE_BYTES + (0 if b.address_of("a") == b.address else 100))
    sent = [a.isend("b", number, tag="t") for number in range(33)]
    with pytest.raises(
        CommError, match=r"message of 'a', tag 't', beside \d+ bytes .* want at most the quota of 65536"
    ):
        sent[-1].result(10)
    refused = [number for number, future in enumerate(sent) if future.done() and future.exception() is not None]
    assert refused == list(range(refused[0], 33))
    assert fitting <= refused[0] <= 32
    assert [b.recv("a", tag="t", timeout_s=10) for _ in range(refused[0])] == list(range(refused[0]))
    again = a.isend("b", "again", tag="t")
    assert b.recv("a", tag="t", timeout_s=10) == "again"
    again.result(10)


def test_a_message_that_somebody_waits_for_is_never_too_much(ends: Ends) -> None:
    a, b = ends
    sent = [a.isend("b", 0, tag="t") for _ in range(33)]
    assert isinstance(sent[-1].exception(10), CommError)
    waiting = b.irecv("a", tag="u")
    a.send("b", bytes(30_000), tag="u", timeout_s=10)
    assert len(waiting.result(10)) == 30_000


def test_what_lies_in_its_senders_shared_memory_is_not_counted_again(ends: Ends) -> None:
    a, b = ends
    sent = [a.isend("b", bytes(size), tag="t") for size in (60_000, 20_000)]
    assert [len(b.recv("a", tag="t", timeout_s=10)) for _ in sent] == [60_000, 20_000]


def test_what_an_endpoint_has_not_received_fails_when_it_closes(ends: Ends) -> None:
    a, b = ends
    sent = [a.isend("b", number) for number in range(3)]
    assert b.recv("a", timeout_s=10) == 0
    b.close()
    for future in sent[1:]:
        with pytest.raises(PeerLostError, match="peer 'b' is lost: it closed its endpoint"):
            future.result(10)


def test_a_mailbox_that_was_closed_meanwhile_fails_what_comes(ends: Any) -> None:
    a, b = ends
    b._fabric.mailbox.close(PeerLostError("b", "it closed its endpoint"))
    with pytest.raises(CommError, match="it closed its endpoint"):
        a.isend("b", 1).result(10)
