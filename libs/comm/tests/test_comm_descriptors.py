"""A process that may open no more files says so, and does what needs none."""

import gc
import itertools
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from m2flow.comm import CommError, Endpoint, PeerLostError

NO_MORE = r"Too many open files: raise the limit of open files \(ulimit -n\)"


@contextmanager
def descriptors_left(num_left: int) -> Iterator[None]:
    """Lets this process open so many more files and sockets."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    # Of none but standard ones where none is left: what earlier tests have left behind may be closed meanwhile.
    limit = next(itertools.islice(_free(), num_left, None)) if num_left else 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _free() -> Iterator[int]:
    """The numbers that new files and sockets get."""
    for fd in itertools.count():
        try:
            os.fstat(fd)
        except OSError:
            yield fd


def test_a_peer_that_cannot_be_connected_to_is_not_called_lost(make_endpoint: Any) -> None:
    here, there = make_endpoint("here"), make_endpoint("there")
    there.handle("s", lambda request: request.args)
    with descriptors_left(0):
        failed = pytest.raises(CommError, match=f"cannot connect to 'there': {NO_MORE}")
        with failed as told:
            here.request("there", "s", "", timeout_s=10)
        received = here.irecv("there")
        with failed as also_told:
            received.result(10)
    assert not isinstance(told.value, PeerLostError)
    assert not isinstance(also_told.value, PeerLostError)
    assert here.request("there", "s", "", 1, timeout_s=10) == 1


def test_who_waits_over_a_connection_needs_no_descriptor_more(make_endpoint: Any) -> None:
    here, there = make_endpoint("here"), make_endpoint("there")
    there.handle("s", lambda request: request.args)
    there.host_channel("q", producers=["here"], consumers=["here"])
    connected = here.request_async("there", "s", "")
    end = time.monotonic() + 10
    # Nobody has waited yet.
    while not connected.done():
        assert time.monotonic() < end
        time.sleep(0.01)
    with descriptors_left(0):
        assert here.request("there", "s", "", 1, timeout_s=10) == 1
        channel = here.channel("q", host="there")
        channel.put("item", timeout_s=10)
        assert channel.get(timeout_s=10).item == "item"


def test_an_endpoint_that_cannot_be_made_says_so_and_leaves_nothing(run_dir: Path) -> None:
    before = _num_open()
    for num_left in range(20):
        with descriptors_left(num_left):
            try:
                made = Endpoint(run_dir, "e", token="t")
            except CommError as error:
                told = str(error)
            else:
                break
        assert told.endswith("Too many open files: raise the limit of open files (ulimit -n)")
        assert _num_open() <= before
        assert not list(run_dir.iterdir())
    made.close()
    # The directory, the listening socket, and two for the io thread.
    assert num_left == 4


def test_an_endpoint_that_cannot_have_grpc_says_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An event loop of CPython's that cannot be made complains of itself when it is thrown away.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    # It has been imported.
    with Endpoint(run_dir, "other", token="t") as other:
        other.listen("127.0.0.1:0")
    with Endpoint(run_dir, "e", token="t") as e:
        with descriptors_left(0):
            for call in (lambda: e.listen("127.0.0.1:0"), lambda: e.add_address("far", "127.0.0.1:1")):
                with pytest.raises(CommError, match=f"cannot start gRPC: {NO_MORE}"):
                    call()
        assert e.listen("127.0.0.1:0")


def _num_open() -> int:
    return len(os.listdir("/proc/self/fd"))
