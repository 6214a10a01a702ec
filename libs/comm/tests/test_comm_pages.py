"""Shared memory on large pages: the same bytes as on small ones, no more of them than were asked for, and never theirs
who are beside it.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.comm import CommError, _pages
from m2flow.comm._deadline import Deadline
from m2flow.comm._pages import give_back, large_page_bytes, mapped, put_on_large_pages
from m2flow.comm._segments import Pool, Slot

MIB = 1 << 20
# Of the processors that the tests run on; where it is another, or none, there is nothing to see below.
LARGE = 2 * MIB


@pytest.fixture
def fd() -> Iterator[int]:
    opened = os.memfd_create("m2flow-pages-test")
    os.ftruncate(opened, 8 * LARGE)
    yield opened
    os.close(opened)


@pytest.fixture
def pool() -> Pool:
    return Pool(256 * MIB, on_retire=lambda segment: None)


def kib(fields: list[str], address: int) -> int:
    """Returns what the kernel says of the mapping that begins at an address."""
    found: int | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split("-")[0] == f"{address:x}":
            found = 0
        elif found is not None and line.split(":")[0] in fields:
            found += int(line.split()[1])
        elif found is not None and line.startswith("VmFlags"):
            return found
    return -1


def large_kib(array: np.ndarray[Any, Any]) -> int:
    return kib(["ShmemPmdMapped"], array.ctypes.data)


def num_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:m2flow-")


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def has_large_pages() -> None:
    """Asks the kernel itself, with none of the code at test but the mapping."""
    fd = os.memfd_create("m2flow-pages-probe")
    try:
        os.ftruncate(fd, 2 * LARGE)
        probe = mapped(fd, 2 * LARGE)
        start = -probe.ctypes.data % LARGE
        probe[start] = 1
        refused = _pages._madvise(probe.ctypes.data + start, LARGE, _pages._MADV_COLLAPSE)
    finally:
        os.close(fd)
    if refused or large_page_bytes() != LARGE:
        pytest.skip("kernel: it gives shared memory no large pages, or of another size")


def test_two_mappings_of_a_file_are_the_same_bytes(fd: int) -> None:
    one, two = mapped(fd, 3 * LARGE + 5), mapped(fd, 3 * LARGE + 5)
    put_on_large_pages(one, one.size)
    one[:] = np.arange(one.size, dtype=np.uint8)
    np.testing.assert_array_equal(two, np.arange(two.size, dtype=np.uint8))
    two[-1] = 77
    assert one[-1] == 77
    assert (one.dtype, one.shape) == (np.uint8, (3 * LARGE + 5,))


def test_a_mapping_goes_with_its_last_view_and_keeps_no_descriptor(fd: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    whole = mapped(fd, 2 * LARGE)
    part = whole[LARGE:]
    part[0] = 3
    assert len(os.listdir("/proc/self/fd")) == before
    del whole
    assert part[0] == 3
    assert "m2flow-pages-test" in Path("/proc/self/maps").read_text()
    del part
    gc.collect()
    assert "m2flow-pages-test" not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_is_the_systems_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        mapped(-1, LARGE)


def test_what_is_as_large_as_a_large_page_begins_where_one_can(fd: int) -> None:
    if large := large_page_bytes():
        held = [mapped(fd, size) for size in (large, large + 1, 3 * large)]
        assert [array.ctypes.data % large for array in held] == [0, 0, 0]


@pytest.mark.usefixtures("has_large_pages")
def test_a_slot_lies_on_large_pages_for_its_writer_and_its_reader(pool: Pool) -> None:
    slot = pool.take(34 * MIB)
    slot.view(34 * MIB)[:] = 5
    assert large_kib(slot.segment.bytes) == 34 * 1024
    reader = mapped(slot.segment.fd, slot.segment.size_bytes)
    assert reader[: 34 * MIB].min() == 5
    assert large_kib(reader) == 34 * 1024
    beside = pool.beside_quota(2 * LARGE + 1)
    assert large_kib(beside.segment.bytes) == 2 * LARGE // 1024


@pytest.mark.usefixtures("has_large_pages")
def test_large_pages_cost_less_than_one_more_than_is_written(pool: Pool) -> None:
    slot = pool.take(64 * MIB + 64)
    assert slot.size_bytes > 64 * MIB + LARGE
    assert allocated_bytes(slot.segment.fd) == 64 * MIB + LARGE
    small = pool.take(LARGE // 2)
    assert allocated_bytes(small.segment.fd) == 0
    small.view(1)[:] = 1
    assert allocated_bytes(small.segment.fd) <= LARGE
    give_back(slot.view(slot.size_bytes))
    assert allocated_bytes(slot.segment.fd) == 0


@pytest.mark.usefixtures("has_large_pages")
@given(st.lists(st.sampled_from([64 << 10, MIB, 3 * MIB, 5 * MIB + 7, 9 * MIB]), min_size=2, max_size=12))
def test_whoever_is_beside_a_fresh_slot_keeps_its_bytes(sizes: list[int]) -> None:
    pool = Pool(256 * MIB, on_retire=lambda segment: None)
    slots: list[tuple[Slot, int]] = []
    for number, size in enumerate(sizes, 1):
        slot = pool.take(size, Deadline(0.0))
        slot.view(slot.size_bytes)[:] = number
        slots.append((slot, number))
        if not number % 3:
            # One that comes back and loses its memory, and is cut again.
            pool.let_go(slots.pop(0)[0])
            with pool._lock:
                pool._drop_unused(0)
    for slot, number in slots:
        assert (slot.view(slot.size_bytes) == number).all()


@pytest.mark.parametrize("want", ["none there", "refused"])
def test_without_large_pages_small_ones_do(pool: Pool, monkeypatch: pytest.MonkeyPatch, want: str) -> None:
    if want == "none there":
        monkeypatch.setattr(_pages, "large_page_bytes", lambda: 0)
    else:
        monkeypatch.setattr(_pages, "_madvise", lambda *asked: -1)
    slot = pool.take(34 * MIB)
    slot.view(34 * MIB)[:] = 5
    assert large_kib(slot.segment.bytes) == 0
    assert mapped(slot.segment.fd, 34 * MIB).min() == 5


def test_a_system_that_tells_no_size_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "_LARGE_PAGE_FILE", tmp_path / "none")
    assert large_page_bytes.__wrapped__() == 0


def test_who_is_interrupted_while_pages_are_made_leaves_the_slot(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*asked: object) -> int:
        raise KeyboardInterrupt

    before = num_segments()
    with monkeypatch.context() as patched:
        patched.setattr(_pages, "_madvise", interrupt)
        patched.setattr(_pages, "large_page_bytes", lambda: LARGE)
        for take in (pool.take, pool.beside_quota):
            with pytest.raises(KeyboardInterrupt):
                take(100 * MIB)
    gc.collect()
    # That of the pool, free again.
    assert num_segments() == before + 1
    held = pool.take(200 * MIB, Deadline(0.0))
    assert num_segments() == before + 1, held


def test_a_slot_that_goes_cold_gives_all_its_memory_back(pool: Pool) -> None:
    # Each begins elsewhere in a large page.
    first, second, third = [pool.take(9 * MIB) for _ in range(3)]
    for number, slot in enumerate((first, second, third), 1):
        slot.view(slot.size_bytes)[:] = number
    assert first.segment is second.segment is third.segment
    assert allocated_bytes(first.segment.fd) == 3 * 9 * MIB
    pool.let_go(second)
    with pool._lock:
        pool._drop_unused(0)
    assert allocated_bytes(first.segment.fd) == 2 * 9 * MIB
    assert (first.view(9 * MIB) == 1).all()
    assert (third.view(9 * MIB) == 3).all()
    assert not second.view(9 * MIB).any()


def test_a_pool_says_what_the_system_does_not_map(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "_mmap", lambda *asked: _pages._FAILED)
    with pytest.raises(CommError, match="cannot make shared memory"):
        pool.take(MIB)
    assert pool.size_bytes == 0
