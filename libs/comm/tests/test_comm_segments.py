"""Shared memory: what it costs, what a process that is out of descriptors does, and what a reader relies on."""

import errno
import gc
import mmap
import os
import resource
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import CommError, Endpoint, PayloadError, PeerLostError, RemoteError, _mappings, _segments
from m2flow.comm._deadline import Deadline
from m2flow.comm._mappings import Mapped
from m2flow.comm._receiver import Receiver
from m2flow.comm._segments import Pool, Slot

MIB = 1 << 20


@pytest.fixture
def pool() -> Pool:
    return Pool(100 * MIB, on_retire=lambda segment: None)


def written(pool: Pool, size_bytes: int) -> Slot:
    slot = pool.take(size_bytes, Deadline(0.0))
    slot.view(size_bytes)[:] = 1
    return slot


def allocated_bytes(slot: Slot) -> int:
    return os.fstat(slot.segment.fd).st_blocks * 512


def out_of_descriptors(*args: Any) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def out_of_memory(*args: Any) -> int:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def wait_until_unused(pool: Pool) -> None:
    deadline = time.monotonic() + 10
    while any(slab.slots_in_use for slab in pool._slabs.values()):
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def test_free_slots_beside_one_in_use_make_room_for_other_sizes(pool: Pool) -> None:
    held, *others = [written(pool, MIB) for _ in range(60)]
    for slot in others:
        pool.let_go(slot)
    large = pool.take(48 * MIB, Deadline(0.0))
    assert pool.size_bytes == 49 * MIB
    assert allocated_bytes(held) == MIB
    assert held.view(MIB).all()
    with pytest.raises(TimeoutError, match=f"^this program to let go of shared memory: {49 * MIB} bytes are"):
        pool.take(56 * MIB, Deadline(0.0))
    again = [written(pool, MIB) for _ in range(50)]
    assert {slot.segment for slot in again} == {held.segment}
    assert pool.size_bytes == 99 * MIB
    for slot in (held, large, *again):
        pool.let_go(slot)
    pool.trim()
    assert pool.size_bytes == 0
    assert not any(pool._cold.values())


def test_what_a_reader_left_behind_counts_for_as_long_as_it_is_there(pool: Pool) -> None:
    left, held, free = (written(pool, MIB) for _ in range(3))
    pool.let_go(free)
    pool.let_go(left, abandoned=True)
    assert pool.size_bytes == allocated_bytes(held) == 2 * MIB
    pool.let_go(held)
    assert pool.size_bytes == 0
    assert written(pool, MIB).segment is not held.segment


def test_a_pool_without_descriptors_says_so_and_counts_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", out_of_descriptors)
        for size in (MIB, 48 * MIB):
            with pytest.raises(CommError, match=r"cannot make shared memory: Too many open files: raise .*ulimit -n"):
                pool.take(size)
    assert pool.size_bytes == 0
    pool.take(96 * MIB, Deadline(0.0))


def test_a_put_without_a_descriptor_to_pass_fails_and_the_next_one_does_not(
    make_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    puts = producer.channel("q", host="host")
    puts.stats()
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", out_of_descriptors)
        with pytest.raises(CommError, match="cannot pass shared memory on: Too many open files"):
            puts.put(np.zeros(100_000))
    puts.put(np.ones(100_000))
    gets = host.channel("q", host="host")
    gets.ack(gets.get(timeout_s=5))
    wait_until_unused(producer._fabric.pool)


def test_who_lets_go_of_an_array_waits_for_no_other_thread(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a process ends, that thread may be gone for good.
    a, b = make_endpoint("a"), make_endpoint("b")
    a.handle("ones", lambda request: np.ones(request.args))
    array = b.request("a", "ones", "", 100_000)
    stuck, go_on, write = threading.Event(), threading.Event(), os.eventfd_write

    def stick(fd: int, value: int) -> None:
        if threading.current_thread() is waker:
            stuck.set()
            go_on.wait(10)
        write(fd, value)

    waker = threading.Thread(target=lambda: b._fabric.loop.wake())
    monkeypatch.setattr(os, "eventfd_write", stick)
    waker.start()
    assert stuck.wait(10)
    # As the io thread does when it has woken.
    b._fabric.loop._awake = False
    started = time.monotonic()
    del array
    assert time.monotonic() - started < 5
    go_on.set()
    waker.join(10)


def test_a_host_without_descriptors_passes_items_on_as_bytes(
    make_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, producer, consumer = make_endpoint("host"), make_endpoint("p"), make_endpoint("c")
    host.host_channel("q", producers=["p"], consumers=["c"])
    producer.channel("q", host="host").put(np.ones(100_000))
    gets = consumer.channel("q", host="host")
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", out_of_descriptors)
        lease = gets.get(timeout_s=5)
    assert lease.item.sum() == 100_000
    gets.ack(lease)
    del lease
    wait_until_unused(producer._fabric.pool)


def test_what_cannot_be_mapped_is_an_error_and_goes_back(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    host.handle("sum", lambda request: request.args.sum())
    puts, gets = producer.channel("q", host="host"), host.channel("q", host="host")
    puts.put(np.ones(100_000), id="1")
    puts.put(np.ones(200_000), id="2")
    with monkeypatch.context() as patched:
        patched.setattr(_mappings, "map_shared", out_of_memory)
        with pytest.raises(CommError, match="cannot map shared memory: Cannot allocate memory"):
            gets.get_batch(2, timeout_s=5)
        with pytest.raises(RemoteError, match="cannot map shared memory"):
            producer.request("host", "sum", "", np.ones(300_000))
    leases = gets.get_batch(2, timeout_s=5)
    assert [lease.id for lease in leases] == ["1", "2"]
    assert producer.request("host", "sum", "", np.ones(300_000)) == 300_000
    gets.ack(leases)
    del leases
    wait_until_unused(producer._fabric.pool)


@pytest.fixture
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_receiver_without_descriptors_says_so(request: pytest.FixtureRequest) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0]))])
        request.getfixturevalue("no_more_descriptors")
        with pytest.raises(CommError, match=r"cannot take its shared memory: Too many open files: raise .*ulimit -n"):
            Receiver().receive(here)


def test_a_refused_endpoint_leaves_no_descriptor(make_endpoint: Any, run_dir: Path) -> None:
    make_endpoint("a")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CommError, match="endpoint 'a' exists"):
            Endpoint(run_dir, "a", token="t")
    gc.collect()
    # The living endpoint has accepted whoever asked whether it lives, and closes that in its own time.
    deadline = time.monotonic() + 10
    while (left := len(os.listdir("/proc/self/fd"))) > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert left <= before


def test_nobody_can_cut_off_what_a_reader_maps(pool: Pool) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(pool.take(MIB).segment.fd, 0)


@pytest.mark.parametrize("fault", ["unsealed", "short", "no memory file"])
def test_a_segment_that_could_kill_its_reader_is_refused(tmp_path: Path, fault: str) -> None:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR) if fault == "no memory file" else os.memfd_create("x")
    os.ftruncate(fd, mmap.PAGESIZE)
    size = mmap.PAGESIZE + (fault == "short")
    with pytest.raises(PayloadError, match=f"of {mmap.PAGESIZE} bytes, want {size} or more that are sealed"):
        Mapped(1, fd, size, lambda segment: None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_peer_that_sends_an_unsealed_segment_is_hung_up_on(
    make_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    b.handle("sum", lambda request: request.args.sum())
    monkeypatch.setattr(_segments, "SEALS", 0)
    with pytest.raises(PeerLostError):
        a.request("b", "sum", "", np.ones(100_000), timeout_s=10)
