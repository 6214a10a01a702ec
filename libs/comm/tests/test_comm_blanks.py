"""Arrays that are filled in shared memory: read where they lie, never changed under a reader, and given back."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.comm import ChannelFullError, CommError, Endpoint, PayloadError, RemoteError, TimeoutError_, payload
from m2flow.comm._blanks import _BEFORE_BYTES, Blanks
from m2flow.comm._deadline import Deadline
from m2flow.comm._mappings import Released
from m2flow.comm._segments import Pool
from m2flow.comm.channel import Channel
from m2flow.comm.payload import Tree, decode, encode

SIZE = 100_000

# What takes items and says the sum of each of their arrays, having waited for a line where it is told to.
READER = """
    endpoint.host_channel("q", capacity=4, producers=["p"], consumers=["c"])
    channel = endpoint.channel("q", host="c")
    say("ready")
    while True:
        lease = channel.get()
        item = lease.item
        sys.stdin.readline()
        arrays = item.values() if isinstance(item, dict) else [item]
        say(" ".join(str(int(np.asarray(array).sum())) for array in arrays))
        del item, arrays
        channel.ack(lease)
        del lease
"""


@pytest.fixture
def producer(make_endpoint: Any) -> Endpoint:
    return make_endpoint("p")


@pytest.fixture
def reader(peer: Any) -> Any:
    started = peer("c", READER)
    assert started.line() == "ready"
    return started


def reads(reader: Any) -> str:
    assert reader.process.stdin is not None
    reader.process.stdin.write("\n")
    reader.process.stdin.flush()
    return reader.line()


def channel_of(endpoint: Endpoint) -> Channel:
    return endpoint.channel("q", host="c")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "not within 10 s"
        time.sleep(0.01)


def slots_in_use(endpoint: Endpoint) -> int:
    pool = endpoint._fabric.pool
    return sum(slab.slots_in_use for slab in pool._slabs.values())


def test_it_is_read_where_it_was_filled_and_is_its_readers_from_then_on(producer: Endpoint, reader: Any) -> None:
    array = producer.empty(SIZE, np.uint8)
    early = array[:1]
    array[:] = 1
    channel_of(producer).put(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 5
    # What nobody may do shows that there is no copy.
    early[0] = 101
    assert reads(reader) == str(SIZE + 100)


def test_what_has_a_reader_is_copied(producer: Endpoint, reader: Any) -> None:
    array = producer.empty(SIZE, np.uint8)
    early = array[:1]
    array[:] = 1
    channel = channel_of(producer)
    channel.put(array)
    channel.put({"longer": np.arange(3), "array": array})
    early[0] = 101
    assert reads(reader) == str(SIZE + 100)
    assert reads(reader) == f"3 {SIZE}"


def test_the_last_array_of_a_tree_may_be_lent_and_a_tensor(producer: Endpoint, reader: Any) -> None:
    array = producer.empty((10, SIZE), np.float32)
    array[:] = 2
    early = array[:1, :1]
    tensor = torch.from_numpy(array)
    channel_of(producer).put({"small": np.arange(5), "large": tensor})
    early[0, 0] = 12
    assert reads(reader) == f"10 {20 * SIZE + 10}"


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(lambda array: {"array": array, "after": np.arange(4)}, id="not the last"),
        pytest.param(lambda array: array[1:], id="not from its beginning"),
        pytest.param(lambda array: array[::2], id="not in order"),
        pytest.param(lambda array: {"x" * _BEFORE_BYTES: array}, id="too much before it"),
        pytest.param(lambda array: {"array": array, "ids": list(range(600))}, id="too much beside it"),
    ],
)
def test_what_cannot_lie_there_is_copied_and_stays_the_producers(
    producer: Endpoint, reader: Any, tree: Callable[[Tree], Tree]
) -> None:
    array = producer.empty(SIZE, np.uint8)
    array[:] = 1
    item = tree(array)
    wanted = " ".join(str(int(np.sum(part))) for part in (item.values() if isinstance(item, dict) else [item]))
    channel_of(producer).put(item)
    array[:] = 0
    assert reads(reader) == wanted
    # It can still be put where it lies.
    early = array[:1]
    channel_of(producer).put(array)
    early[0] = 7
    assert reads(reader) == "7"


def test_a_part_from_the_beginning_is_read_in_place(producer: Endpoint, reader: Any) -> None:
    array = producer.empty(2 * SIZE, np.uint8)
    array[:] = 1
    channel_of(producer).put(array[:SIZE])
    array.base[0] = 3  # type: ignore[index]
    assert reads(reader) == str(SIZE + 2)


def test_memory_is_used_again_once_nobody_refers_to_it(producer: Endpoint, reader: Any) -> None:
    channel = channel_of(producer)
    for count in range(30):
        array = producer.empty(SIZE, np.uint8)
        array[:] = count % 5
        channel.put(array)
        assert reads(reader) == str(count % 5 * SIZE)
    # The one that is filled, the one that is read, and those whose word is on its way.
    assert producer._fabric.pool.size_bytes <= 10 * 128 * 1024
    del array
    until(lambda: not slots_in_use(producer))
    assert not producer._fabric.blanks._blanks


def test_what_is_never_put_goes_back(producer: Endpoint) -> None:
    arrays = [producer.empty(SIZE, np.uint8) for _ in range(5)]
    assert slots_in_use(producer) == 5
    view = arrays[2][10:20]
    arrays.clear()
    until(lambda: slots_in_use(producer) == 1)
    view[:] = 1
    del view
    until(lambda: not slots_in_use(producer))
    assert not producer._fabric.blanks._blanks


def test_the_reader_keeps_it_when_the_producer_lets_go(producer: Endpoint, reader: Any) -> None:
    channel = channel_of(producer)
    array = producer.empty(SIZE, np.uint8)
    array[:] = 1
    ((slot, _, _),) = producer._fabric.blanks._blanks.values()
    channel.put(array)
    assert slot.holds == 2
    del array
    until(lambda: slot.holds == 1)
    others = [producer.empty(SIZE, np.uint8) for _ in range(3)]
    for other in others:
        other[:] = 9
    assert reads(reader) == str(SIZE)


def test_a_killed_reader_takes_nothing_from_the_producer(producer: Endpoint, reader: Any) -> None:
    array = producer.empty(SIZE, np.uint8)
    array[:] = 1
    channel_of(producer).put(array)
    (slab,) = producer._fabric.pool._slabs.values()
    reader.kill()
    until(lambda: slab.abandoned)
    for _ in range(3):
        producer.empty(SIZE, np.uint8)[:] = 9
    assert int(array.sum()) == SIZE
    del array
    until(lambda: not slab.slots_in_use)


def test_a_refused_put_loses_nothing_and_the_next_is_in_place_again(make_endpoint: Any, reader: Any) -> None:
    # Too little for a copy beside it.
    producer = make_endpoint("p", quota_bytes=12 << 20)
    channel = channel_of(producer)
    for count in range(5):
        # The first is with the reader, who waits for its line.
        channel.put(count)
        until(lambda: channel.stats().leased == 1)
    array = producer.empty(7 << 20, np.uint8)
    early = array[:1]
    array[:] = 1
    with pytest.raises(ChannelFullError):
        channel.put_nowait(array)
    with pytest.raises(TimeoutError_):
        channel.put(array, timeout_s=0.05)
    assert [reads(reader) for _ in range(5)] == ["0", "1", "2", "3", "4"]
    channel.put(array, timeout_s=30)
    early[0] = 101
    assert reads(reader) == str((7 << 20) + 100)


def test_one_of_a_segment_of_its_own(producer: Endpoint, reader: Any) -> None:
    array = producer.empty((5, 1 << 20), np.uint32)
    array[:] = 1
    channel_of(producer).put({"before": np.arange(7), "array": array})
    assert reads(reader) == f"21 {5 << 20}"


def test_what_lies_in_place_is_not_copied_onto_itself(producer: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    monkeypatch.setattr(payload, "copier", lambda size_bytes: lambda to, start, size: copied.append(size))
    for array in (producer.empty(SIZE, np.uint8), torch.from_numpy(producer.empty(SIZE, np.uint8))):
        encoded = encode({"small": np.arange(3, dtype=np.uint8), "array": array})
        blank = producer._fabric.blanks.under(encoded)
        assert blank is not None
        encoded.write_into(blank.slot.view(encoded.size_bytes, blank.start))
    assert copied == [3, 3]


def test_of_threads_that_put_the_same_one_is_in_place_and_all_arrive(producer: Endpoint, reader: Any) -> None:
    channel = channel_of(producer)
    for _ in range(10):
        array = producer.empty(SIZE, np.uint8)
        early = array[:1]
        array[:] = 1
        items = [{"of": np.arange(count), "array": array} for count in (2, 3, 4)]
        threads = [threading.Thread(target=channel.put, args=(item,)) for item in items]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        early[0] = 101
        sums = sorted(tuple(map(int, reads(reader).split())) for _ in threads)
        assert [of for of, _ in sums] == [1, 3, 6]
        assert sorted(found for _, found in sums) == [SIZE, SIZE, SIZE + 100]


def test_of_several_peers_the_first_reads_in_place(make_endpoint: Any) -> None:
    near, others = make_endpoint("near"), [make_endpoint(f"far{rank}") for rank in range(3)]
    array = near.empty(SIZE, np.uint8)
    early = array[:1]
    array[:] = 1
    for other in others:
        near.isend(other.name, array)
    early[0] = 101
    assert [int(other.recv("near", timeout_s=30).sum()) for other in others] == [SIZE + 100, SIZE, SIZE]


def test_another_endpoint_copies_it(make_endpoint: Any, reader: Any) -> None:
    other, producer = make_endpoint("other"), make_endpoint("p")
    array = other.empty(SIZE, np.uint8)
    array[:] = 1
    channel_of(producer).put(array)
    array[:] = 2
    assert reads(reader) == str(SIZE)


def test_a_put_that_waits_for_a_copys_memory_goes_on_once_it_may_be_in_place(make_endpoint: Any) -> None:
    near, far = make_endpoint("near", quota_bytes=12 << 20), make_endpoint("far")
    array = near.empty(7 << 20, np.uint8)
    array[:] = 1
    near.isend("far", array)
    first = far.recv("near", timeout_s=30)
    again = threading.Thread(target=near.isend, args=("far", array))
    again.start()
    again.join(0.1)
    assert again.is_alive(), "there is no room for a copy beside it"
    del first
    again.join(30)
    assert not again.is_alive()
    assert int(far.recv("near", timeout_s=30).sum()) == 7 << 20


def test_calls_and_their_answers_are_read_in_place(make_endpoint: Any) -> None:
    near, far = make_endpoint("near"), make_endpoint("far")
    answers: list[Tree] = []
    written = threading.Event()

    def double(request: Tree) -> Tree:
        assert written.wait(30)
        answers.append(far.empty(SIZE, np.int64))
        np.multiply(request.args, 2, out=answers[-1])
        return answers[-1]

    far.handle("s", double)
    array = near.empty(SIZE, np.int64)
    early = array[:1]
    array[:] = 4
    asked = near.request_async("far", "s", "double", array)
    early[0] = 5
    written.set()
    answer = asked.result(30)
    assert answer[0] == 10
    assert (answer[1:] == 8).all()
    with pytest.raises(ValueError, match="read-only"):
        answers[-1][0] = 0


def test_a_prompt_handler_may_not_wait_for_one(make_endpoint: Any) -> None:
    near, far = make_endpoint("near"), make_endpoint("far")
    far.handle("s", lambda request: far.empty(3, np.uint8), prompt=True)
    with pytest.raises(RemoteError, match="must not wait"):
        near.request("far", "s", "m", timeout_s=30)


def test_small_ones_are_copied_and_stay_writable(producer: Endpoint, reader: Any) -> None:
    array = producer.empty((3, 4), np.int64)
    array[:] = 1
    channel_of(producer).put(array)
    array[:] = 2
    assert reads(reader) == "12"


def test_over_grpc_it_is_copied(tmp_path: Path) -> None:
    directories = tmp_path / "a", tmp_path / "b"
    with (
        Endpoint(directories[0], "a", token="t") as near,
        Endpoint(directories[1], "b", token="t", by_reference=False) as far,
    ):
        near.add_address("b", far.listen("127.0.0.1:0"))
        far.host_channel("q", capacity=2, producers=["a"], consumers=["b"])
        array = near.empty(SIZE, np.uint8)
        array[:] = 1
        near.channel("q", host="b").put(array)
        array[:] = 2
        taken = far.channel("q", host="b")
        assert int(taken.get(timeout_s=30).item.sum()) == SIZE


def test_within_a_process_the_array_itself_is_handed_over(run_dir: Path) -> None:
    with Endpoint(run_dir, "p", token="t") as endpoint:
        endpoint.host_channel("q", capacity=2, producers=["p"], consumers=["p"])
        channel = endpoint.channel("q", host="p")
        array = endpoint.empty(SIZE, np.uint8)
        channel.put(array)
        assert channel.get().item is array


@pytest.mark.parametrize("shape", [0, 7, (3, 0), (2, 3), (), [4, 1], (1,) * 30])
@pytest.mark.parametrize("dtype", [np.uint8, "float16", np.complex128, ">i4", "M8[ns]", "S5", ("f4", (3, 2))])
def test_it_has_the_shape_and_dtype_that_were_asked_for(producer: Endpoint, shape: Tree, dtype: Tree) -> None:
    array, wanted = producer.empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
    assert encode(array).size_bytes > array.nbytes


def test_bad_input_is_refused_and_costs_nothing(make_endpoint: Any) -> None:
    endpoint = make_endpoint("p", quota_bytes=1 << 20)
    with pytest.raises(PayloadError, match="object"):
        endpoint.empty(10, object)
    with pytest.raises(ValueError, match="0 or more"):
        endpoint.empty(-1, np.uint8)
    with pytest.raises(TypeError):
        endpoint.empty(10, "no dtype")
    with pytest.raises(CommError, match="quota"):
        endpoint.empty(2 << 20, np.uint8)
    with pytest.raises(CommError, match="quota"):
        endpoint.empty((1 << 40, 1 << 40), np.uint8)
    for shape in ("12", None, {3, 4}, 2.0, (1, 2.0)):
        with pytest.raises(TypeError, match="integer"):
            endpoint.empty(shape, np.uint8)  # type: ignore[arg-type]
    assert endpoint._fabric.pool.size_bytes == 0


def test_it_waits_for_the_quota_and_says_so(make_endpoint: Any) -> None:
    endpoint = make_endpoint("p", quota_bytes=1 << 20)
    kept = [endpoint.empty(400_000, np.uint8) for _ in range(2)]
    with pytest.raises(TimeoutError_, match=r"'empty': waited 0\.\d+ s for this program to let go of shared memory"):
        endpoint.empty(400_000, np.uint8, timeout_s=0.05)
    kept.pop()
    endpoint.empty(400_000, np.uint8, timeout_s=30)


def test_a_closed_endpoint_lends_nothing_and_takes_nothing_back(run_dir: Path) -> None:
    endpoint = Endpoint(run_dir, "p", token="t")
    array = endpoint.empty(SIZE, np.uint8)
    endpoint.close()
    array[:] = 1
    assert int(array.sum()) == SIZE
    with pytest.raises(CommError, match="closed"):
        endpoint.empty(SIZE, np.uint8)


small = st.lists(st.integers(0, 300).map(lambda count: np.arange(count, dtype=np.int16)), max_size=4)


@given(small, st.integers(1, 5000), st.sampled_from(["uint8", "float64", "bool"]))
@settings(deadline=None)
def test_a_payload_around_it_is_that_of_any_array(before: list[Tree], count: int, dtype: str) -> None:
    pool = Pool(1 << 26, on_retire=lambda segment: None)
    blanks = Blanks(pool, Released(lambda: True))
    array = blanks.empty(count, dtype, Deadline(0.0))
    array[:] = np.arange(count) % 2
    tree = {"before": before, "array": array, "after": list(range(9))}
    encoded = encode(tree)
    wanted = encoded.to_bytes()
    blank = blanks.under(encoded)
    assert blank is not None
    place = blank.slot.view(encoded.size_bytes, blank.start)
    assert place.nbytes == encoded.size_bytes
    encoded.write_into(place)
    assert place.tobytes() == wanted
    np.testing.assert_array_equal(decode(place)["array"], array)
    assert pool.take(1, Deadline(0.0), or_hold=blank.slot) is blank.slot
    assert pool.take(1, Deadline(0.0), or_hold=blank.slot) is not blank.slot, "it has a reader"
