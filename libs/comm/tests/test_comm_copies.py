"""What receivers of one host want of a source on another comes once, whoever dies, is stopped or interrupted."""

import fcntl
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import Box, CommError, Endpoint, PayloadError, RemoteError, Shard, _copies, weights
from m2flow.comm._ledger import Ledger, Record
from m2flow.comm.payload import encode

pytestmark = [pytest.mark.medium, pytest.mark.timeout(60)]


class Source(Endpoint):
    """A source in a directory of its own; what it is asked for waits while `gate` is closed."""

    def __init__(self, directory: Path, address: str = "127.0.0.1:0") -> None:
        super().__init__(directory, "t", token="token-of-this-run")
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []
        self.came = threading.Semaphore(0)
        self.at = self.listen(address)
        answer = self._calls._handlers["m2flow.weights"]

        def wait(request: Any) -> Any:
            if request.method == "slices":
                self.asked.append(request.peer)
                self.came.release()
                assert self.gate.wait(30)
            return answer(request)

        self._calls._handlers["m2flow.weights"] = wait


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with Source(tmp_path / "source") as found:
        yield found
        found.gate.set()


@pytest.fixture
def near(make_endpoint: Any, source: Source) -> Callable[..., Endpoint]:
    """Makes endpoints of one host, in this process, that reach the source over gRPC."""

    def make(name: str, **kwargs: Any) -> Endpoint:
        endpoint: Endpoint = make_endpoint(name, **kwargs)
        endpoint.add_address("t", source.at)
        return endpoint

    return make


@pytest.fixture
def receiver(peer: Any, source: Source) -> Callable[..., Any]:
    """Starts processes of one host, each with a receiver."""

    def start(name: str, text: str, **fields: Any) -> Any:
        prelude = f"""
    import gc, os, signal, threading
    from m2flow.comm import _copies
    endpoint.add_address("t", {source.at!r})
    receiver = endpoint.weight_receiver("w", sources=["t"], bucket_bytes=1 << 20)
    def get(version, timeout_s=30):
        prepared, got = receiver.prepare(version, timeout_s=timeout_s), dict()
        receiver.commit(got.update)
        assert all(array.min() == array.max() == version for array in got.values())
        return prepared.moved_bytes, got
    """
        return peer(name, prelude + text)

    return start


def go(process: Any) -> None:
    process.process.stdin.write("go\n")
    process.process.stdin.flush()


def full(version: int, size_bytes: int = 1 << 20, count: int = 4) -> dict[str, Any]:
    """Returns a version of weights, arrays that are filled with its number."""
    return {f"{index}": np.full(size_bytes, version, np.uint8) for index in range(count)}


MEASURED = """
    def pss():
        gc.collect()
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    def sample():
        while not done.wait(0.002):
            peaks.append(pss())
    get(0)
    say("up")
    sys.stdin.readline()
    before, done, peaks = pss(), threading.Event(), [0]
    sampler = threading.Thread(target=sample)
    sampler.start()
    moved, got = get(1)
    done.set()
    sampler.join()
    say(moved)
    say(max(peaks) - before)
    sys.stdin.readline()
    say(pss() - before)
    time.sleep(60)
"""


@pytest.mark.parametrize("count", [2, 3])
def test_one_copy_comes_over_the_network_and_lies_in_memory(
    source: Source, receiver: Callable[..., Any], count: int
) -> None:
    size = 64 << 20
    source.stage_weights("w", 0, full(0, 1 << 10, 64))
    processes = [receiver(f"r{rank}", MEASURED) for rank in range(count)]
    assert [process.line() for process in processes] == ["up"] * count
    source.stage_weights("w", 1, full(1, 1 << 20, 64))
    for process in processes:
        go(process)
    found = [(int(process.line()), int(process.line())) for process in processes]
    assert sorted(moved for moved, _ in found) == [0] * (count - 1) + [size]
    assert max(peak for _, peak in found) < 1.3 * size
    for process in processes:
        go(process)
    assert 0.9 * size < sum(int(process.line()) for process in processes) < 1.5 * size


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is checked of the copies that others have fetched."""
    found: list[Any] = []

    def digest(array: Any) -> int:
        found.append(array)
        return weights.digest(array)

    monkeypatch.setattr(_copies, "digest", digest)
    return found


def test_each_element_comes_once_however_the_boxes_overlap(
    source: Source, near: Callable[..., Endpoint], checked: list[Any]
) -> None:
    rows = np.arange(1200, dtype=np.int64).reshape(12, 100)
    source.stage_weights("w", 1, {"x": rows, "y": Shard(rows[3:7], (3, 0), (12, 100))})
    boxes = [Box((0, 0), (6, 100)), Box((4, 0), (6, 100)), Box((2, 50), (9, 50)), Box((11, 0), (1, 100))]
    moved = []
    for rank, box in enumerate(boxes):
        wanted = {"x": box, "y": Box((3, 0), (4, 100))}
        receiver = near(f"r{rank}").weight_receiver("w", sources=["t"], wanted=wanted)
        prepared = receiver.prepare(1, timeout_s=10)
        got: dict[str, Any] = {}
        receiver.commit(got.update)
        np.testing.assert_array_equal(got["x"], rows[box.slices(Box((0, 0), (12, 100)))])
        np.testing.assert_array_equal(got["y"], rows[3:7])
        moved.append(prepared.moved_bytes // 8)
    # Row 10 has a half that the third wants; of the last nobody has anything.
    assert moved == [600 + 400, 400, 50, 100]
    # Nobody holds or checks what it does not want: the last has "y" alone of others.
    assert len(checked) == 0 + 2 + 3 + 1


def test_a_receiver_that_is_killed_or_interrupted_as_it_fetches_is_followed_by_the_next(
    source: Source, receiver: Callable[..., Any]
) -> None:
    source.stage_weights("w", 1, full(1))
    source.gate.clear()
    waits = """
    say("up")
    sys.stdin.readline()
    say(get(1)[0])
    time.sleep(60)
    """
    interrupted = receiver(
        "r0",
        """
    try:
        get(1)
    except KeyboardInterrupt:
        say("interrupted")
    say(get(1)[0])
    time.sleep(60)
    """,
    )
    assert source.came.acquire(timeout=20)
    killed, third = receiver("r1", waits), receiver("r2", waits)
    for process in (killed, third):
        assert process.line() == "up"
    go(killed)
    time.sleep(0.2)
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.line() == "interrupted"
    go(third)
    # One of those that waited fetches, until it is killed.
    while {*source.asked} == {"r0"}:
        assert source.came.acquire(timeout=20)
    killed.kill()
    source.gate.set()
    assert sorted([int(interrupted.line()), int(third.line())]) == [0, 1 << 22]


def test_a_stopped_receiver_is_named_and_after_a_while_left_alone(source: Source, receiver: Callable[..., Any]) -> None:
    source.stage_weights("w", 1, full(1))
    source.gate.clear()
    stopped = receiver("r0", "say(get(1)[0])\n    time.sleep(60)")
    assert source.came.acquire(timeout=20)
    stopped.process.send_signal(signal.SIGSTOP)
    waits = receiver(
        "r1",
        """
    try:
        get(1, timeout_s=0.5)
    except TimeoutError_ as error:
        say(error.peer)
        say(0.4 < error.elapsed_s < 5)
    _copies._PATIENCE_S = 0.5
    say(get(1, timeout_s=None)[0])
    time.sleep(60)
    """,
    )
    assert (waits.line(), waits.line()) == ("r0", "True")
    source.gate.set()
    assert waits.line() == str(1 << 22)
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.line() == str(1 << 22)
    assert receiver("r2", "say(get(1)[0])").line() == "0"


def test_those_that_wait_for_a_stopped_one_follow_one_of_them(source: Source, receiver: Callable[..., Any]) -> None:
    source.stage_weights("w", 1, full(1))
    source.gate.clear()
    stopped = receiver("r0", "say(get(1)[0])\n    time.sleep(60)")
    assert source.came.acquire(timeout=20)
    stopped.process.send_signal(signal.SIGSTOP)
    text = """
    _copies._PATIENCE_S = 0.5
    say("up")
    sys.stdin.readline()
    say(get(1)[0])
    time.sleep(60)
    """
    waiting = [receiver(f"r{rank}", text) for rank in (1, 2, 3)]
    assert [process.line() for process in waiting] == ["up"] * 3
    for process in waiting:
        # One by one, so that each finds it stopped when the one before is fetching already.
        go(process)
        time.sleep(0.1)
    assert source.came.acquire(timeout=20)
    time.sleep(0.5)
    source.gate.set()
    assert sorted(int(process.line()) for process in waiting) == [0, 0, 1 << 22]


def test_receivers_that_prepare_on_all_threads_of_an_endpoint_wait_for_none(
    source: Source, near: Callable[..., Endpoint]
) -> None:
    source.stage_weights("w", 1, full(1))
    endpoint, caller = near("r0"), near("r1")
    receivers = [endpoint.weight_receiver("w", sources=["t"]) for _ in range(8)]
    together = threading.Barrier(8)

    def prepare(request: Any) -> int:
        together.wait(10)
        return receivers[int(request.method)].prepare(1, timeout_s=20).moved_bytes

    since = time.monotonic()
    for rank in range(8):
        endpoint.handle(f"prepare {rank}", prepare)
    asked = [caller.request_async("r0", f"prepare {rank}", f"{rank}") for rank in range(8)]
    assert sorted(each.result(20) for each in asked) == [0] * 7 + [1 << 22]
    assert time.monotonic() - since < 5


def test_what_was_mapped_outlives_whoever_fetched_it(source: Source, receiver: Callable[..., Any]) -> None:
    source.stage_weights("w", 1, full(1))
    fetched = receiver("r0", "say(get(1)[0])\n    time.sleep(60)")
    assert fetched.line() == str(1 << 22)
    text = """
    moved, got = get(1)
    say(moved)
    sys.stdin.readline()
    say(sum(int(array.sum()) for array in got.values()))
    say(get(1)[0])
    """
    maps = receiver("r1", text)
    assert maps.line() == "0"
    fetched.kill()
    since = time.monotonic()
    go(maps)
    assert (maps.line(), maps.line()) == (str(1 << 22), str(1 << 22))
    # It waits for nobody to appear.
    assert time.monotonic() - since < 5


def the_copy(endpoint: Endpoint) -> Any:
    """Returns the one copy that an endpoint keeps."""
    ((_, (kept,)),) = endpoint._copies._kept.values()
    return kept


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_version_that_is_withdrawn_meanwhile_keeps_nobody_waiting_and_no_memory(
    source: Source, near: Callable[..., Endpoint]
) -> None:
    source.stage_weights("w", 0, full(0))
    endpoints = [near("r0"), near("r1")]
    endpoints[0].fetch_weights("t", "w", 0, timeout_s=10)
    slot = the_copy(endpoints[0]).slot
    wait_until(lambda: slot.holds == 1)
    source.stage_weights("w", 1, full(1))
    source.gate.clear()
    errors: list[RemoteError] = []

    def prepare(endpoint: Endpoint) -> None:
        try:
            endpoint.weight_receiver("w", sources=["t"], bucket_bytes=1 << 20).prepare(1, timeout_s=20)
        except RemoteError as error:
            errors.append(error)

    threads = [threading.Thread(target=prepare, args=(endpoint,)) for endpoint in endpoints]
    threads[0].start()
    while not source.asked[1:]:
        assert source.came.acquire(timeout=10)
    threads[1].start()
    assert slot.holds == 1  # its memory is used again
    source.release_weights("w", 1)
    source.gate.set()
    for thread in threads:
        thread.join(20)
    assert ["withdrawn" in str(error) for error in errors] == [True, True]
    assert slot.holds == 0


def test_nobody_waits_for_one_that_is_closed_or_on_another_host(source: Source, near: Callable[..., Endpoint]) -> None:
    source.stage_weights("w", 1, full(1))
    closed, far = near("r0"), near("r1")
    closed.fetch_weights("t", "w", 1, timeout_s=10)
    slot = the_copy(closed).slot
    wait_until(lambda: slot.holds == 1)
    closed.close()
    assert slot.holds == 0
    since = time.monotonic()
    far.fetch_weights("t", "w", 1, timeout_s=10)
    last = near("r2")
    last.add_address("r1", "127.0.0.1:1")
    last.fetch_weights("t", "w", 1, timeout_s=10)
    assert time.monotonic() - since < 4
    assert {*source.asked} == {"r0", "r1", "r2"}


@pytest.mark.parametrize("data", [b"", bytes(100), encode(("r0", 1)).to_bytes(), encode(5).to_bytes()])
def test_a_file_that_says_something_else_says_nothing(
    source: Source, near: Callable[..., Endpoint], run_dir: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(_copies, "_PATIENCE_S", 0.2)
    source.stage_weights("w", 1, full(1))
    near("r0").fetch_weights("t", "w", 1, timeout_s=10)
    (path,) = run_dir.glob("*.weights")
    path.write_bytes(data)
    near("r1").fetch_weights("t", "w", 1, timeout_s=10)
    path.write_bytes(data)
    with path.open() as file:
        # Who has locked it cannot be asked.
        fcntl.flock(file, fcntl.LOCK_EX)
        near("r2").fetch_weights("t", "w", 1, timeout_s=10)
    assert source.asked == ["r0", "r1", "r2"]


def test_who_waits_for_its_turn_ends_with_its_endpoint(source: Source, near: Callable[..., Endpoint]) -> None:
    source.stage_weights("w", 1, full(1))
    source.gate.clear()
    endpoints = [near("r0"), near("r1")]
    errors: list[str] = []

    def prepare(endpoint: Endpoint) -> None:
        try:
            endpoint.weight_receiver("w", sources=["t"]).prepare(1, timeout_s=20)
        except CommError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=prepare, args=(endpoint,)) for endpoint in endpoints]
    threads[0].start()
    assert source.came.acquire(timeout=10)
    threads[1].start()
    time.sleep(0.2)
    endpoints[1].close()
    threads[1].join(2)
    assert errors == ["endpoint 'r1' is closed"]
    source.gate.set()
    threads[0].join(10)
    assert len(errors) == 1


def test_a_file_that_was_taken_away_as_it_was_locked_is_not_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "file", fcntl.flock

    def taken_away(file: Any, operation: int) -> None:
        path.unlink()
        flock(file, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", taken_away)
        assert Ledger(path).try_lock() == ""
    first = Ledger(path)
    assert first.try_lock() is None
    assert Ledger(path).try_lock() == ""
    first.write(Record("r0"))
    assert Ledger(path).try_lock() == "r0"
    first.unlock()


@pytest.mark.parametrize("why", ["quota", "payload", "file", "long names"])
def test_without_room_or_a_file_each_receiver_fetches_for_itself(
    source: Source, near: Callable[..., Endpoint], run_dir: Path, why: str
) -> None:
    stem = "n" * (2000 if why == "long names" else 1)
    source.stage_weights("w", 1, {stem + name: array for name, array in full(1).items()})
    if why == "file":
        with near("before") as before:
            before.fetch_weights("t", "w", 1, timeout_s=10)
        (path,) = run_dir.glob("*.weights")
        path.unlink()
        path.mkdir()
    limits: dict[str, Any] = {"quota": {"quota_bytes": 1 << 20}, "payload": {"max_payload_bytes": 2 << 20}}
    for name in ("r0", "r1"):
        with Endpoint(run_dir, name, token="token-of-this-run", **limits.get(why, {})) as endpoint:
            endpoint.add_address("t", source.at)
            receiver = endpoint.weight_receiver("w", sources=["t"], bucket_bytes=1 << 20)
            assert receiver.prepare(1, timeout_s=10).moved_bytes == 1 << 22
            got: dict[str, Any] = {}
            receiver.commit(got.update)
            assert all(array.min() == array.max() == 1 for array in got.values())


def test_another_version_takes_the_place_of_a_copy_whoever_fetches_it(
    source: Source, near: Callable[..., Endpoint]
) -> None:
    endpoints = [near("r0"), near("r1")]
    receivers = [endpoint.weight_receiver("w", sources=["t"]) for endpoint in endpoints]
    segments: list[int] = []
    got: dict[str, Any] = {}
    for version, first in enumerate((0, 0, 1, 1, 0)):
        source.stage_weights("w", version, full(version))
        got.clear()
        for rank in (first, 1 - first):
            assert receivers[rank].prepare(version, timeout_s=10).moved_bytes == (rank == first) << 22
            # The other is told, and need not come for it.
            wait_until(lambda last=1 - first: not endpoints[last]._copies._kept)
            receivers[rank].commit(got.update)
            assert all(array.min() == array.max() == version for array in got.values())
        slot = the_copy(endpoints[first]).slot
        segments.append(slot.segment.id)
        got.clear()
        wait_until(lambda slot=slot: slot.holds == 1)
    # Its memory is used again by whoever fetched last.
    assert (segments[0] == segments[1], segments[2] == segments[3], len(set(segments))) == (True, True, 3)
    (file,) = endpoints[0]._copies._kept
    with pytest.raises(RemoteError, match="is not kept here any more"):
        endpoints[1].request("r0", _copies.SERVICE, "copy", (file, 1, 0), timeout_s=10)


def test_who_was_not_told_lets_go_of_its_copy_when_it_comes(source: Source, near: Callable[..., Endpoint]) -> None:
    endpoints = [near("r0"), near("r1")]
    source.stage_weights("w", 0, full(0))
    endpoints[0].fetch_weights("t", "w", 0, timeout_s=10)
    slot = the_copy(endpoints[0]).slot
    endpoints[0]._calls._handlers[_copies.SERVICE] = lambda request: None
    source.stage_weights("w", 1, full(1))
    for endpoint in reversed(endpoints):
        endpoint.fetch_weights("t", "w", 1, timeout_s=10)
    wait_until(lambda: slot.holds == 0)


def test_receivers_with_delta_move_only_what_changed_whoever_fetches(
    source: Source, near: Callable[..., Endpoint]
) -> None:
    endpoints = [near(f"r{rank}") for rank in range(3)]
    boxes = [Box((0,), (6000,)), Box((4000,), (6000,)), Box((0,), (10_000,))]
    receivers = [
        endpoint.weight_receiver("w", sources=["t"], wanted={"x": box, "e": Box((0,), (0,))}, delta=True)
        for endpoint, box in zip(endpoints, boxes, strict=True)
    ]
    array = np.arange(10_000.0)
    for version in range(6):
        array = array.copy()
        array[version * 100 :: 1000] *= -1.5
        source.stage_weights("w", version, {"x": array, "e": np.empty(0)})
        moved = 0
        for rank in np.roll(range(3), version):
            if version == 5 and rank == 2:
                # It may have what the others map.
                endpoints[2].close()
                continue
            moved += receivers[rank].prepare(version, timeout_s=10).moved_bytes
            got: dict[str, Any] = {}
            receivers[rank].commit(got.update)
            np.testing.assert_array_equal(got["x"], array[boxes[rank].offset[0] :][: boxes[rank].shape[0]])
        assert moved == (12 * 10 if version else 80_000)


def test_a_copy_is_checked_whole_at_first_and_an_eighth_of_it_later(
    source: Source, near: Callable[..., Endpoint], checked: list[Any]
) -> None:
    first, second = (near(name).weight_receiver("w", sources=["t"]) for name in ("r0", "r1"))
    for version in range(3):
        source.stage_weights("w", version, {f"{index}": np.full(10, version) for index in range(16)})
        first.prepare(version, timeout_s=10)
        second.prepare(version, timeout_s=10)
    assert len(checked) == 16 + 2 + 2


def test_a_copy_that_was_altered_is_refused_and_fetched_anew(source: Source, near: Callable[..., Endpoint]) -> None:
    source.stage_weights("w", 1, full(1))
    first, second = near("r0"), near("r1")
    first.fetch_weights("t", "w", 1, timeout_s=10)
    kept = the_copy(first)
    kept.slot.view(kept.size_bytes)[-1] += 1
    with pytest.raises(PayloadError, match="weights 'w' of 't' from 'r0': '3' has another digest"):
        second.fetch_weights("t", "w", 1, timeout_s=10)
    assert second.fetch_weights("t", "w", 1, timeout_s=10)["3"][-1] == 1
    assert source.asked == ["r0", "r1"]


def test_a_copy_of_another_life_of_the_source_is_no_copy(tmp_path: Path, make_endpoint: Any) -> None:
    receivers = [make_endpoint(name) for name in ("r0", "r1")]
    for life, order in enumerate(((0, 1), (1, 0))):
        with Source(tmp_path / "source") as source:
            source.stage_weights("w", 5, full(life))
            for rank in order:
                receivers[rank].add_address("t", source.at)
                found = receivers[rank].fetch_weights("t", "w", 5, timeout_s=10)
                assert all(array.min() == array.max() == life for array in found.values())
            assert source.asked == [f"r{order[0]}"]


@pytest.mark.parametrize("way", ["prepare", "stream"])
def test_a_version_is_of_one_life_of_its_source(
    tmp_path: Path, make_endpoint: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    lives = [Source(tmp_path / "source")]
    lives[0].stage_weights("w", 5, full(0))
    endpoint = make_endpoint("r0")
    endpoint.add_address("t", lives[0].at)
    receiver = endpoint.weight_receiver("w", sources=["t"], bucket_bytes=1 << 20)
    plan = receiver._plan

    def restart_after(*args: Any) -> Any:
        planned = plan(*args)
        if len(lives) == 1:
            lives[0].close()
            lives.append(Source(tmp_path / "source", lives[0].at))
            lives[1].stage_weights("w", 5, full(1))
        return planned

    def get() -> None:
        if way == "prepare":
            receiver.prepare(5, timeout_s=10)
        else:
            receiver.stream(5, lambda bucket: None, timeout_s=10)

    monkeypatch.setattr(receiver, "_plan", restart_after)
    try:
        with pytest.raises(RemoteError, match="staged anew"):
            get()
        get()
    finally:
        for source in lives:
            source.close()
