"""Shared memory on large pages: the same bytes as on small ones, no more of them than were asked for, and never theirs
who are beside it.
"""

import contextlib
import ctypes
import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.comm import CommError, _pages
from m2flow.comm._deadline import Deadline
from m2flow.comm._pages import give_back, large_page_bytes, map_shared, put_on_large_pages
from m2flow.comm._segments import Pool, Slot

MIB = 1 << 20
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


@pytest.fixture
def large_pages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the kernel is asked to put on large pages: (address, size). Skips where it does not give any."""
    # With no code of the package: that is what is tested.
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    opened = os.memfd_create("probe")
    os.ftruncate(opened, 2 * LARGE)
    address = libc.mmap(1 << 40, 2 * LARGE, 3, 1, opened, 0)
    ctypes.memset(address, 1, 1)
    refused = address % LARGE or libc.madvise(address, LARGE, 25)
    os.close(opened)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(2 * LARGE))
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    if refused or not size.exists() or int(size.read_text()) != LARGE:
        pytest.skip("kernel: it gives shared memory no large pages, or of another size")
    asked: list[tuple[int, int]] = []
    madvise = _pages._madvise

    def spy(start: int, size_bytes: int, advice: int) -> int:
        result = madvise(start, size_bytes, advice)
        if advice == 25:
            asked.append((start, size_bytes))
            if result:
                pytest.skip("kernel: it has no large pages left")
        return int(result)

    monkeypatch.setattr(_pages, "_madvise", spy)
    return asked


def large_kib(array: np.ndarray[Any, Any]) -> int:
    """Returns how much of the mapping that begins with an array the kernel has mapped by large pages."""
    smaps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{array.ctypes.data:x}-(?s:.*?)^ShmemPmdMapped: +(\d+) kB$", smaps, re.MULTILINE)
    assert found
    return int(found[1])


def segments() -> set[str]:
    gc.collect()
    return set(re.findall(r"memfd:m2flow-[0-9a-f]+", Path("/proc/self/maps").read_text()))


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_two_mappings_of_a_file_are_the_same_bytes(fd: int) -> None:
    one, two = map_shared(fd, 3 * LARGE + 5), map_shared(fd, 3 * LARGE + 5)
    put_on_large_pages(one, one.size)
    one[:] = np.arange(one.size, dtype=np.uint8)
    np.testing.assert_array_equal(two, np.arange(two.size, dtype=np.uint8))
    two[-1] = 77
    assert one[-1] == 77
    assert (one.dtype, one.shape) == (np.uint8, (3 * LARGE + 5,))


def test_a_mapping_goes_with_its_last_view_and_keeps_no_descriptor(fd: int) -> None:
    def same_file(number: str) -> bool:
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(FileNotFoundError):
            return "m2flow-pages-test" in os.readlink(f"/proc/self/fd/{number}")
        return False

    def maps() -> str:
        gc.collect()
        return Path("/proc/self/maps").read_text()

    whole = map_shared(fd, 2 * LARGE)
    part = whole[LARGE:]
    part[0] = 3
    assert sum(map(same_file, os.listdir("/proc/self/fd"))) == 1
    del whole
    assert part[0] == 3
    assert "m2flow-pages-test" in maps()
    del part
    assert "m2flow-pages-test" not in maps()


def test_what_cannot_be_mapped_is_the_systems_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_shared(-1, LARGE)


def test_a_pool_says_what_the_system_does_not_map(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "_mmap", lambda *asked: _pages._FAILED)
    monkeypatch.setattr(_pages, "_lost", [])
    monkeypatch.setattr(_pages, "large_page_bytes", lambda: LARGE)
    with pytest.raises(CommError, match="cannot make shared memory"):
        pool.take(MIB)
    assert pool.size_bytes == 0


@pytest.mark.usefixtures("large_pages")
def test_what_is_as_large_as_a_large_page_begins_where_one_can(fd: int) -> None:
    assert large_page_bytes() == LARGE
    held = [map_shared(fd, size) for size in (LARGE, LARGE + 1, 3 * LARGE)]
    assert [array.ctypes.data % LARGE for array in held] == [0, 0, 0]


def test_an_alarm_while_memory_is_mapped_or_unmapped_is_heard_and_loses_none(fd: int) -> None:
    class Alarm(Exception):
        pass

    def alarm(*_: object) -> None:
        raise Alarm

    def address_space_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    map_shared(fd, 8 * LARGE)
    before = address_space_bytes()
    old = signal.signal(signal.SIGALRM, alarm)
    rung, heard, array = 0, 0, None
    try:
        while rung < 300:
            rung += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, rung * 2e-6)
                while True:
                    array = map_shared(fd, 8 * LARGE)
                    array = None
            except Alarm:
                heard += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    del array
    assert heard == rung
    # Less than the rooms of six, and more than a thread of another test takes.
    assert address_space_bytes() < before + 100 * MIB


def test_a_room_that_is_not_mapped_over_is_left_as_it_is(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "large_page_bytes", lambda: LARGE)
    monkeypatch.setattr(_pages, "_lost", [])
    with open(f"/proc/self/fd/{fd}", "rb") as file, pytest.raises(OSError, match="Permission denied"):
        map_shared(file.fileno(), 2 * LARGE)
    (room,) = _pages._lost
    assert len(room) == 3 * LARGE


def test_a_slot_lies_on_large_pages_for_its_writer_and_its_reader(
    pool: Pool, large_pages: list[tuple[int, int]]
) -> None:
    slot = pool.take(34 * MIB)
    slot.view(34 * MIB)[:] = 5
    assert large_kib(slot.segment.bytes) == 34 * 1024
    reader = map_shared(slot.segment.fd, slot.segment.size_bytes)
    assert reader[: 34 * MIB].min() == 5
    assert large_kib(reader) == 34 * 1024
    beside = pool.beside_quota(2 * LARGE + 1)
    assert large_kib(beside.segment.bytes) == 2 * LARGE // 1024
    assert len(large_pages) == 2


def test_a_slot_that_has_its_memory_is_not_put_on_large_pages_again(
    pool: Pool, large_pages: list[tuple[int, int]]
) -> None:
    slot = pool.take(34 * MIB)
    slot.view(34 * MIB)[:] = 5
    pool.let_go(slot)
    again = pool.take(34 * MIB)
    assert again is slot
    assert again.view(34 * MIB).min() == 5
    assert len(large_pages) == 1


@pytest.mark.usefixtures("large_pages")
def test_the_pool_serves_others_while_the_kernel_makes_pages(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[Slot] = []
    madvise = _pages._madvise

    def meanwhile(*asked: int) -> int:
        if not others:
            # As another thread would; the lock is reentrant for this one.
            assert not pool._lock._is_owned()  # type: ignore[attr-defined]
            others.append(pool.take(MIB))
        return int(madvise(*asked))

    monkeypatch.setattr(_pages, "_madvise", meanwhile)
    pool.take(34 * MIB)
    assert others


@pytest.mark.usefixtures("large_pages")
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
            pool.trim()
    for slot, number in slots:
        assert (slot.view(slot.size_bytes) == number).all()


def test_a_slot_that_goes_cold_gives_all_its_memory_back(pool: Pool) -> None:
    # Each begins elsewhere in a large page.
    first, second, third = [pool.take(9 * MIB) for _ in range(3)]
    for number, slot in enumerate((first, second, third), 1):
        slot.view(slot.size_bytes)[:] = number
    assert first.segment is second.segment is third.segment
    assert allocated_bytes(first.segment.fd) == 3 * 9 * MIB
    pool.let_go(second)
    pool.trim()
    assert allocated_bytes(first.segment.fd) == 2 * 9 * MIB
    assert (first.view(9 * MIB) == 1).all()
    assert (third.view(9 * MIB) == 3).all()
    assert not second.view(9 * MIB).any()


def test_memory_is_given_back_by_whole_pages_and_not_around_them(fd: int) -> None:
    whole = map_shared(fd, LARGE)
    whole[:] = 9
    give_back(whole[100 : 3 * 4096 - 100])
    assert whole[:4096].min() == whole[2 * 4096 :].min() == 9
    assert whole[4096 : 2 * 4096].max() == 0
    give_back(whole[100:4000])
    assert whole[:4096].min() == 9


def test_what_the_system_does_not_take_back_is_its_error() -> None:
    # No part of shared memory.
    with pytest.raises(OSError, match="Invalid argument"):
        give_back(np.ones(LARGE, np.uint8))


@pytest.mark.parametrize("want", ["none there", "refused"])
def test_without_large_pages_small_ones_do(pool: Pool, monkeypatch: pytest.MonkeyPatch, want: str) -> None:
    if want == "none there":
        monkeypatch.setattr(_pages, "large_page_bytes", lambda: 0)
    else:
        monkeypatch.setattr(_pages, "_madvise", lambda *asked: -1)
    slot = pool.take(34 * MIB)
    slot.view(34 * MIB)[:] = 5
    assert map_shared(slot.segment.fd, 34 * MIB).min() == 5


@pytest.mark.parametrize("says", [None, "", "huge"])
def test_a_system_that_tells_no_size_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str | None
) -> None:
    file = tmp_path / "hpage_pmd_size"
    if says is not None:
        file.write_text(says)
    monkeypatch.setattr(_pages, "_LARGE_PAGE_FILE", file)
    assert large_page_bytes.__wrapped__() == 0


def test_who_is_interrupted_while_pages_are_made_leaves_the_slot(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*asked: object) -> int:
        raise KeyboardInterrupt

    before = segments()
    with monkeypatch.context() as patched:
        patched.setattr(_pages, "_madvise", interrupt)
        patched.setattr(_pages, "large_page_bytes", lambda: LARGE)
        for take in (pool.take, pool.beside_quota):
            with pytest.raises(KeyboardInterrupt):
                take(100 * MIB)
    # That of the pool alone, free again: there is room for as much once it makes way.
    assert len(segments() - before) == 1
    slot = pool.take(200 * MIB, Deadline(0.0))
    assert slot.size_bytes <= pool.size_bytes <= 256 * MIB
    assert len(segments() - before) == 1
