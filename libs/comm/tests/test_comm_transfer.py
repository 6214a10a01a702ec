"""Weights from n ranks to m, cut in any way at both ends: every element arrives once, checked, at the safe point."""

import gc
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.comm import (
    Box,
    CommError,
    Endpoint,
    PayloadError,
    PeerLostError,
    RemoteError,
    Shard,
    TimeoutError_,
    transfer,
)
from m2flow.comm._layouts import packed_layout, read_layout
from m2flow.comm.resharding import cover, overlap, run, subtract

boxes = st.integers(1, 3).flatmap(
    lambda ndim: st.tuples(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=ndim, max_size=ndim),
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=ndim, max_size=ndim),
    )
)


def cells(box: Box) -> np.ndarray[Any, Any]:
    grid = np.zeros((10,) * len(box.shape), int)
    grid[box.slices(Box((0,) * len(box.shape), grid.shape))] = 1
    return grid


@given(boxes)
def test_subtract_and_overlap_part_a_box(pair: Any) -> None:
    a, b = (Box(tuple(start for start, _ in dims), tuple(size for _, size in dims)) for dims in pair)
    shared = overlap(a, b)
    total = sum((cells(part) for part in subtract(a, b)), np.zeros_like(cells(a)))
    if shared is not None:
        total = total + cells(shared)
    assert np.array_equal(total, cells(a))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data()
)
@settings(deadline=None)
def test_cover_takes_every_element_once(rows: list[int], columns: list[int], data: st.DataObject) -> None:
    shape = (sum(rows), sum(columns))
    by_rows = [Box((sum(rows[:at]), 0), (size, shape[1])) for at, size in enumerate(rows)]
    by_columns = [Box((0, sum(columns[:at])), (shape[0], size)) for at, size in enumerate(columns)]
    shards = [(f"s{at}", box) for at, box in enumerate(data.draw(st.permutations(by_rows + by_columns)))]
    wanted = data.draw(st.sampled_from([*by_rows, *by_columns, Box((0, 0), shape)]))
    count = np.zeros(shape, int)
    for piece in cover(wanted, shards):
        count[piece.box.slices(Box((0, 0), shape))] += 1
        assert overlap(piece.box, dict(shards)[piece.source]) == piece.box
    expected = np.zeros(shape, int)
    expected[wanted.slices(Box((0, 0), shape))] = 1
    assert np.array_equal(count, expected)


@given(boxes)
def test_a_run_is_where_all_elements_of_a_box_follow_one_another(pair: Any) -> None:
    inside, other = (Box(tuple(start for start, _ in dims), tuple(size for _, size in dims)) for dims in pair)
    box = overlap(inside, other)
    if box is None:
        return
    lies = np.arange(inside.num_elements()).reshape(inside.shape)[box.slices(inside)].ravel()
    follows = np.array_equal(lies, np.arange(lies[0], lies[0] + lies.size))
    assert run(box, inside) == ((lies[0], lies.size) if follows else None)


def test_what_nobody_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"nobody has offset \(2,\) shape \(2,\)"):
        cover(Box((0,), (4,)), [("a", Box((0,), (2,)))])
    with pytest.raises(ValueError, match="want it inside"):
        Shard(np.zeros((3, 3)), (0, 1), (3, 3))


FULL = {
    "rows": torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6).to(torch.bfloat16),
    "columns": np.arange(6 * 9, dtype=np.float32).reshape(6, 9),
    "copied": torch.randn(5),
    "scalar": np.array(3.0),
}


def split(size: int, count: int, rank: int) -> tuple[int, int]:
    """Returns start and length of a rank's uneven share."""
    bounds = np.linspace(0, size, count + 1).astype(int)
    return int(bounds[rank]), int(bounds[rank + 1] - bounds[rank])


def sharded(rank: int, count: int) -> dict[str, Any]:
    """Returns a trainer rank's shards of FULL."""
    row, num_rows = split(7, count, rank)
    column, num_columns = split(9, count, rank)
    return {
        "rows": Shard(FULL["rows"][row : row + num_rows], (row, 0), (7, 6)),
        "columns": Shard(FULL["columns"][:, column : column + num_columns], (0, column), (6, 9)),
        "copied": FULL["copied"],
        "scalar": FULL["scalar"],
    }


def wanted(rank: int, count: int) -> dict[str, Box]:
    """Returns what a rollout rank wants: cut the other way round."""
    column, num_columns = split(6, count, rank)
    row, num_rows = split(6, count, rank)
    return {
        "rows": Box((0, column), (7, num_columns)),
        "columns": Box((row, 0), (num_rows, 9)),
        "copied": Box((0,), (5,)),
        "scalar": Box((), ()),
    }


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 1), (2, 1), (1, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("way", ["memory", "grpc", "grpc to one host"])
def test_any_n_to_any_m(tmp_path: Path, num_sources: int, num_targets: int, way: str) -> None:
    def directory(name: str) -> Path:
        return tmp_path / {"memory": "run", "grpc": name, "grpc to one host": name[0]}[way]

    sources = [Endpoint(directory(f"t{rank}"), f"t{rank}", token="t") for rank in range(num_sources)]
    targets = [Endpoint(directory(f"r{rank}"), f"r{rank}", token="t") for rank in range(num_targets)]
    try:
        for source in sources if way != "memory" else ():
            address = source.listen("127.0.0.1:0")
            for target in targets:
                target.add_address(source.name, address)
        for rank, source in enumerate(sources):
            source.stage_weights("policy", 4, sharded(rank, num_sources))
            source.offer_weights("policy", 5, sharded(rank, num_sources))
        for rank, target in enumerate(targets):
            boxes = wanted(rank, num_targets)
            names = [source.name for source in sources]
            receiver = target.weight_receiver("policy", sources=names, wanted=boxes, bucket_bytes=64, first_source=rank)
            prepared = receiver.prepare(4, timeout_s=20)
            assert receiver.version is None
            loaded: dict[str, Any] = {}
            assert receiver.commit(loaded.update) == receiver.version == prepared.version == 4
            for name, box in boxes.items():
                whole = Box((0,) * len(box.shape), tuple(FULL[name].shape))
                expected = FULL[name][box.slices(whole)]
                assert loaded[name].dtype == expected.dtype
                assert tuple(loaded[name].shape) == box.shape
                assert bool((loaded[name] == expected).all())
            own = {
                name: expected.clone() if torch.is_tensor(expected) else expected.copy()
                for name, expected in loaded.items()
            }
            for value in own.values():
                value[...] = 0
            receiver.prepare(4, timeout_s=20)
            receiver.commit_into(own)
            assert all(bool((own[name] == loaded[name]).all()) for name in boxes)
            for version in (4, 5):  # staged, and merely offered
                streamed: dict[str, Any] = {}
                assert receiver.stream(version, streamed.update, timeout_s=20) == receiver.version == version
                assert streamed.keys() == loaded.keys()
                assert all(bool((streamed[name] == loaded[name]).all()) for name in boxes)
    finally:
        for endpoint in [*targets, *sources]:
            endpoint.close()


def test_a_failure_before_commit_leaves_the_old_version_and_one_during_it_none(make_endpoint: Any, peer: Any) -> None:
    rollout = make_endpoint("rollout")
    trainer = peer(
        "trainer",
        """
        for version in (1, 2):
            endpoint.stage_weights("policy", version, {"x": np.full(100_000, version)})
            say("staged")
            sys.stdin.readline()
        time.sleep(60)
        """,
    )
    assert trainer.line() == "staged"
    receiver = rollout.weight_receiver("policy", sources=["trainer"])
    loaded: dict[str, Any] = {}
    receiver.prepare(1, timeout_s=10)
    receiver.commit(loaded.update)
    trainer.process.stdin.write("go\n")
    trainer.process.stdin.flush()
    receiver.prepare(2, timeout_s=10)
    with pytest.raises(CommError, match=r"waited 0\.\d+ s for trainer"):
        receiver.prepare(3, timeout_s=0.1)
    assert receiver.version == 1

    def fail(bucket: Any) -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        receiver.commit(fail)
    assert receiver.version is None
    trainer.kill()
    with pytest.raises(PeerLostError):
        receiver.prepare(3, timeout_s=10)
    # What was prepared is held here: its trainer's death does not take it.
    receiver.commit(loaded.update)
    assert receiver.version == 2
    assert loaded["x"].max() == loaded["x"].min() == 2
    with pytest.raises(CommError, match="nothing is prepared"):
        receiver.commit(loaded.update)


def test_a_commit_makes_two_buckets_at_most(make_endpoint: Any) -> None:
    bucket = 1 << 20
    sources = [make_endpoint(f"t{rank}") for rank in range(2)]
    rollout = make_endpoint("rollout")
    for rank, source in enumerate(sources):
        halves = {f"w{index}": Shard(np.ones((128, 256)), (128 * rank, 0), (256, 256)) for index in range(32)}
        source.stage_weights("policy", 1, halves)
    receiver = rollout.weight_receiver("policy", sources=["t0", "t1"], bucket_bytes=bucket)
    receiver.prepare(1, timeout_s=10)
    tracemalloc.start()
    try:
        receiver.commit(lambda loaded: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bucket < peak < 2.2 * bucket
    # On the host: the staged shards, once, whoever reads them.
    assert sum(source._fabric.pool.size_bytes for source in sources) < 1.3 * 32 * 256 * 256 * 8


ROLLOUT = """
    receiver = endpoint.weight_receiver("policy", sources=["trainer"], bucket_bytes=1)
    say(receiver.version)
    def load(bucket):
        if sys.stdin.readline() != "go\\n":
            say("loading " + ",".join(bucket))
            time.sleep(60)
        loaded.update(bucket)
    loaded = {}
    say(receiver.prepare(1, timeout_s=20).version)
    say(receiver.commit(load))
    say(sorted((name, int(value.sum())) for name, value in loaded.items()))
"""


@pytest.mark.medium
def test_a_rank_killed_while_it_commits_serves_nothing_until_it_has_loaded_the_stage(
    make_endpoint: Any, peer: Any
) -> None:
    trainer = make_endpoint("trainer")
    trainer.stage_weights("policy", 1, {name: np.ones(100_000) for name in "ab"})

    def told(process: Any, *lines: str) -> None:
        for line in lines:
            process.process.stdin.write(f"{line}\n")
            process.process.stdin.flush()

    victim = peer("rollout", ROLLOUT)
    assert (victim.line(), victim.line()) == ("None", "1")
    told(victim, "go", "stop")
    assert victim.line() == "loading b"
    victim.kill()
    again = peer("rollout", ROLLOUT)
    assert (again.line(), again.line()) == ("None", "1")
    told(again, "go", "go")
    assert (again.line(), again.line()) == ("1", "[('a', 100000), ('b', 100000)]")


def test_a_target_of_another_shape_is_refused(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("policy", 1, {"x": np.zeros((2, 3))})
    receiver = rollout.weight_receiver("policy", sources=["trainer"])
    receiver.prepare(1, timeout_s=5)
    with pytest.raises(ValueError, match=r"'x' has shape \(3, 2\), want \(2, 3\)"):
        receiver.commit_into({"x": np.zeros((3, 2))})


def test_targets_of_every_kind_are_copied_into(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    large = torch.arange(3_000_001, dtype=torch.float32)
    weights = {
        "large": large,
        "across": torch.arange(20.0).reshape(4, 5),
        "wider": np.arange(7, dtype=np.float32),
        "conjugate": torch.arange(6).to(torch.complex64) * 1j,
        "scalar": torch.tensor(3.0),
        "empty": np.zeros((0, 3)),
    }
    trainer.stage_weights("policy", 1, weights)
    receiver = rollout.weight_receiver("policy", sources=["trainer"])
    receiver.prepare(1, timeout_s=20)
    own = {
        "large": torch.zeros(3_000_001),
        "across": torch.zeros(5, 4).T,
        "wider": np.zeros(7, np.float64),
        "conjugate": torch.zeros(6, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(0.0),
        "empty": np.zeros((0, 3)),
    }
    before = own["large"]._version
    assert receiver.commit_into(own) == 1
    assert all(bool((own[name] == weights[name]).all()) for name in own)
    # Autograd knows that what it may have saved for a backward pass has changed.
    assert own["large"]._version > before


@pytest.mark.parametrize("way", ["memory", "grpc"])
@pytest.mark.parametrize("dtype", [torch.int4, torch.uint7, torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.bool])
def test_elements_of_a_byte_and_less_are_put_together(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    """Of integers of less than a byte torch copies none: a commit failed, and nothing was served."""
    whole = (torch.arange(12, dtype=torch.uint8) % 2).view(dtype).reshape(3, 4)
    with ExitStack() as ends:
        rollout = ends.enter_context(Endpoint(tmp_path / "r", "r", token="t"))
        for name, column in (("t0", 0), ("t1", 2)):
            trainer = Endpoint(tmp_path / ("r" if way == "memory" else name), name, token="t")
            ends.enter_context(trainer)
            if way == "grpc":
                rollout.add_address(name, trainer.listen("127.0.0.1:0"))
            shard = Shard(whole[:, column : column + 2], (0, column), (3, 4))
            trainer.stage_weights("policy", 1, {"x": shard, "whole": whole})
        receiver = rollout.weight_receiver("policy", sources=["t0", "t1"])
        receiver.prepare(1, timeout_s=20)
        own = {name: torch.empty(3, 4, dtype=dtype) for name in ("x", "whole")}
        loads: list[dict[str, Any]] = [own, {}, {}]
        receiver.commit_into(own)
        receiver.prepare(1, timeout_s=20)
        receiver.commit(loads[1].update)
        receiver.stream(1, loads[2].update, timeout_s=20)
        for loaded in loads:
            assert all(torch.equal(loaded[name].view(torch.uint8), whole.view(torch.uint8)) for name in own)


def test_a_read_only_target_is_refused(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("policy", 1, {"x": np.ones(3)})
    receiver = rollout.weight_receiver("policy", sources=["trainer"])
    receiver.prepare(1, timeout_s=5)
    target = np.zeros(3)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        receiver.commit_into({"x": target})
    assert receiver.version is None


def test_kinds_that_would_cut_numbers_short_are_refused(make_endpoint: Any) -> None:
    trainers, rollout = [make_endpoint("t0"), make_endpoint("t1")], make_endpoint("rollout")
    receiver = rollout.weight_receiver("policy", sources=["t0", "t1"])
    for version, dtypes in ((1, [torch.float32] * 2), (2, [torch.bfloat16, torch.float32])):
        for rank, trainer in enumerate(trainers):
            shard = Shard(torch.full((1, 4), 1 / 3, dtype=dtypes[rank]), (rank, 0), (2, 4))
            trainer.stage_weights("policy", version, {"x": shard})
    loaded: dict[str, Any] = {}
    message = r"tensor 'x': got shards of dtypes torch\.bfloat16, torch\.float32"
    with pytest.raises(ValueError, match=message):
        receiver.prepare(2, timeout_s=5)
    with pytest.raises(ValueError, match=message):
        receiver.stream(2, loaded.update, timeout_s=5)
    for trainer, row in zip(trainers, (0, 1), strict=True):
        trainer.stage_weights("policy", 3, {"x": Shard(torch.full((1, 4), 1.75), (row, 0), (2, 4))})
    receiver.prepare(3, timeout_s=5)
    assert receiver.commit(loaded.update) == 3
    receiver.prepare(3, timeout_s=5)
    for target in (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.bool), np.zeros((2, 4))):
        with pytest.raises(ValueError, match=rf"'x' is of {target.dtype}, want torch\.float32"):
            receiver.commit_into({"x": target})
    assert receiver.version == 3
    for dtype in (torch.bfloat16, torch.float64):
        target = torch.zeros(2, 4, dtype=dtype)
        receiver.prepare(3, timeout_s=5)
        receiver.commit_into({"x": target})
        assert bool((target == 1.75).all())


@pytest.mark.parametrize("way", ["memory", "grpc"])
def test_empty_tensors_are_of_their_kind_on_every_path(tmp_path: Path, way: str) -> None:
    empty = torch.empty(0, 5, dtype=torch.bfloat16)
    weights = {
        "e": empty,
        "n": np.empty((3, 0), np.int32),
        "s": Shard(torch.ones(2, 3, dtype=torch.bfloat16), (2, 0), (4, 3)),
    }
    wanted = {"e": Box((0, 0), (0, 5)), "n": Box((0, 0), (3, 0)), "s": Box((1, 0), (0, 3))}
    with (
        Endpoint(tmp_path / "t", "t", token="t") as trainer,
        Endpoint(tmp_path / ("t" if way == "memory" else "r"), "r", token="t") as rollout,
    ):
        if way == "grpc":
            rollout.add_address("t", trainer.listen("127.0.0.1:0"))
        trainer.stage_weights("policy", 1, weights)
        receiver = rollout.weight_receiver("policy", sources=["t"], wanted=wanted)
        loads: list[dict[str, Any]] = [{}, {}]
        receiver.prepare(1, timeout_s=20)
        receiver.commit(loads[0].update)
        receiver.stream(1, loads[1].update, timeout_s=20)
        del weights["s"]
        trainer.stage_weights("policy", 2, weights)
        loads.append(dict(rollout.fetch_weights("t", "policy", 2, timeout_s=20)))
        for loaded in loads:
            found = {name: (type(value), value.dtype, tuple(value.shape)) for name, value in loaded.items()}
            assert found.pop("s", None) in (None, (torch.Tensor, torch.bfloat16, (0, 3)))
            assert found == {
                "e": (torch.Tensor, torch.bfloat16, (0, 5)),
                "n": (np.ndarray, np.dtype(np.int32), (3, 0)),
            }


def answer_slowly(source: Endpoint, seconds: float) -> None:
    """Makes a source take so long for each answer about weights."""
    answer = source._calls._handlers["m2flow.weights"]

    def slowly(request: Any) -> Any:
        time.sleep(seconds)
        return answer(request)

    source._calls._handlers["m2flow.weights"] = slowly


def test_one_deadline_holds_for_all_buckets_of_a_stream(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.offer_weights("policy", 1, {f"t{index}": np.ones(8) for index in range(40)})
    answer_slowly(trainer, 0.03)
    receiver = rollout.weight_receiver("policy", sources=["trainer"], bucket_bytes=1)
    with pytest.raises(TimeoutError_, match=r"'m2flow\.weights\.slices': waited 0\.\d+ s for trainer"):
        receiver.stream(1, lambda bucket: None, timeout_s=0.2)
    assert receiver.version is None


def test_a_time_out_says_how_long_all_of_it_has_taken(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("policy", 1, {f"t{index}": np.ones(8) for index in range(40)})
    answer_slowly(trainer, 0.2)
    receiver = rollout.weight_receiver("policy", sources=["trainer", "trainer"])
    with pytest.raises(TimeoutError_) as caught:
        receiver.stream(1, lambda bucket: None, timeout_s=0.3)
    assert (caught.value.peer, caught.value.channel) == ("trainer", "m2flow.weights.layout")
    assert 0.3 <= caught.value.elapsed_s < 5


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_a_stream_has_two_buckets_in_memory(make_endpoint: Any, peer: Any, dtype: str) -> None:
    program = f"""
        half, first = np.ones((64, 1024), "{dtype}"), 64 * (sys.argv[2] == "t1")
        endpoint.offer_weights("w", 1, {{f"w{{i}}": Shard(half, (first, 0), (128, 1024)) for i in range(16)}})
        say(endpoint.listen("127.0.0.1:0"))
        time.sleep(60)
    """
    rollout = make_endpoint("rollout")
    for name in ("t0", "t1"):
        rollout.add_address(name, peer(name, program).line())
    bucket = 4 * 128 * 1024 * np.dtype(dtype).itemsize
    receiver = rollout.weight_receiver("w", sources=["t0", "t1"], bucket_bytes=bucket)
    tracemalloc.start()
    try:
        # The next one comes while this one is loaded.
        receiver.stream(1, lambda loaded: time.sleep(0.05), timeout_s=20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bucket < peak < 2.4 * bucket


def test_a_receiver_without_sources_is_refused(make_endpoint: Any) -> None:
    with pytest.raises(ValueError, match="weights 'policy': got no sources"):
        make_endpoint("rollout").weight_receiver("policy", sources=[])


def test_what_is_wanted_and_missing_is_named(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("policy", 1, {"x": Shard(np.zeros(2), (0,), (4,))})
    for boxes, message in (
        ({"y": Box((0,), (1,))}, "no source has a tensor 'y'"),
        ({"x": Box((0,), (4,))}, r"tensor 'x': nobody has offset \(2,\)"),
        ({"x": Box((0, 0), (1, 1))}, "got a box of 2 dims, want 1"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout.weight_receiver("policy", sources=["trainer"], wanted=boxes).prepare(1, timeout_s=5)


def test_an_altered_slice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Endpoint(tmp_path / "t", "t", token="t") as trainer, Endpoint(tmp_path / "r", "r", token="t") as rollout:
        rollout.add_address("t", trainer.listen("127.0.0.1:0"))
        trainer.stage_weights("policy", 1, {"x": np.arange(100)})
        monkeypatch.setattr(transfer, "digest", lambda value: -1)
        with pytest.raises(PayloadError, match="'x' was altered"):
            rollout.weight_receiver("policy", sources=["t"]).prepare(1, timeout_s=10)
        receiver = rollout.weight_receiver("policy", sources=["t"])
        with pytest.raises(PayloadError, match="'x' was altered"):
            receiver.stream(1, lambda bucket: None, timeout_s=10)
        assert receiver.version is None


def test_offers_are_prepared_from_another_host_also_by_what_changed(tmp_path: Path) -> None:
    with Endpoint(tmp_path / "t", "t", token="t") as trainer, Endpoint(tmp_path / "r", "r", token="t") as rollout:
        rollout.add_address("t", trainer.listen("127.0.0.1:0"))
        receiver = rollout.weight_receiver("policy", sources=["t"], delta=True)
        got: dict[str, Any] = {}
        for version in (1, 2):
            trainer.offer_weights("policy", version, {"x": np.full(100, version)})
            receiver.prepare(version, timeout_s=10)
            receiver.commit(got.update)
            assert got["x"].tolist() == [version] * 100


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What only the cycle collector would free stays."""
    gc.disable()
    yield
    gc.enable()


def wait_until_free(slot: Any) -> None:
    """Waits until only the store holds a slot."""
    deadline = time.monotonic() + 5
    while slot.holds > 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.usefixtures("no_collector")
def test_what_fails_keeps_no_memory(make_endpoint: Any) -> None:
    sources, rollout = [make_endpoint(name) for name in "ab"], make_endpoint("rollout")
    for source in sources:
        source.stage_weights("policy", 1, {source.name: np.ones(1 << 17)})
    sources[1].stage_weights("policy", 2, {"b": np.ones(1 << 17)})
    slot = sources[0]._weights._line("policy").staged[1].slot
    with pytest.raises(RemoteError, match="version 1 are withdrawn"):
        rollout.weight_receiver("policy", sources=["a", "b"]).prepare(1, timeout_s=10)
    wait_until_free(slot)


@pytest.mark.usefixtures("no_collector")
def test_an_error_keeps_nothing_of_the_thread_that_reads_it(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    go_on: Future[None] = Future()
    trainer.handle("wait", lambda request: go_on)
    trainer.handle("fail", lambda request: 1 // 0)
    trainer.stage_weights("policy", 1, {"x": np.ones(1 << 17)})
    slot = trainer._weights._line("policy").staged[1].slot
    waits = threading.Event()

    def read() -> None:
        held = rollout.fetch_weights("trainer", "policy", 1)
        waits.set()
        rollout.request("trainer", "wait", "", timeout_s=10)
        assert held

    reader = threading.Thread(target=read)
    reader.start()
    assert waits.wait(10)
    time.sleep(0.05)  # by now it reads the link
    failed = rollout.request_async("trainer", "fail", "")
    assert isinstance(failed.exception(10), RemoteError)
    go_on.set_result(None)
    reader.join(10)
    del failed
    wait_until_free(slot)


def test_a_stream_serves_nothing_while_it_loads(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    weights = {name: np.zeros(8) for name in "ab"}
    trainer.stage_weights("policy", 1, weights)
    receiver = rollout.weight_receiver("policy", sources=["trainer"], bucket_bytes=64)
    receiver.prepare(1, timeout_s=10)
    served: list[int | None] = [receiver.commit(lambda bucket: None)]
    trainer.stage_weights("policy", 2, weights)
    receiver.stream(2, lambda bucket: served.append(receiver.version), timeout_s=10)
    assert served == [1, None, None]
    with pytest.raises(ZeroDivisionError):
        receiver.stream(2, lambda bucket: 1 // 0, timeout_s=10)
    assert receiver.version is None


@pytest.mark.parametrize("way", ["prepared", "streamed"])
def test_receivers_that_begin_with_different_sources_take_from_different_sources(make_endpoint: Any, way: str) -> None:
    sources, rollout = [make_endpoint(f"t{rank}") for rank in range(3)], make_endpoint("rollout")
    for rank, source in enumerate(sources):
        # Copies of each other, but for telling them apart here.
        source.stage_weights("policy", 1, {"x": np.full(8, rank)})
    took = []
    for rank in range(6):
        receiver = rollout.weight_receiver("policy", sources=["t0", "t1", "t2"], first_source=rank)
        loaded: dict[str, Any] = {}
        if way == "prepared":
            receiver.prepare(1, timeout_s=10)
            receiver.commit(loaded.update)
        else:
            receiver.stream(1, loaded.update, timeout_s=10)
        took.append(loaded["x"][0])
    assert took == [0, 1, 2, 0, 1, 2]


def test_layout_waits_for_the_version_and_refuses_old_ones(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    asked = rollout.request_async("trainer", "m2flow.weights", "layout", ("policy", 5, 0))
    trainer.stage_weights("policy", 5, {"x": np.zeros((2, 3))})
    _, layout = asked.result(5)
    assert read_layout(layout)["x"][:2] == (Box((0, 0), (2, 3)), (2, 3))
    with pytest.raises(RemoteError, match="withdrawn"):
        rollout.request("trainer", "m2flow.weights", "layout", ("policy", 1, 0))


def test_layout_comes_back_from_its_columns() -> None:
    weights = {
        "scalar": np.zeros((), ">i4"),
        "x": Shard(torch.zeros((2, 3), dtype=torch.bfloat16), (4, 0), (6, 3)),
        "y": torch.zeros(1, dtype=torch.float32),
        "empty": np.zeros(0, np.float32),
    }
    found = read_layout(packed_layout(weights))
    assert {name: laid[:2] for name, laid in found.items()} == {
        "scalar": (Box((), ()), ()),
        "x": (Box((4, 0), (2, 3)), (6, 3)),
        "y": (Box((0,), (1,)), (1,)),
        "empty": (Box((0,), (0,)), (0,)),
    }
    assert [str(laid.kind.dtype) for laid in found.values()] == [">i4", "torch.bfloat16", "torch.float32", "float32"]


def test_version_that_is_cut_otherwise_is_planned_anew(make_endpoint: Any) -> None:
    trainers, rollout = [make_endpoint("t0"), make_endpoint("t1")], make_endpoint("rollout")
    whole = np.arange(24.0).reshape(6, 4)
    receiver = rollout.weight_receiver("policy", sources=["t0", "t1"])
    for version, cut in enumerate((2, 2, 5, 2)):
        trainers[0].stage_weights("policy", version, {"x": Shard(whole[:cut] + version, (0, 0), whole.shape)})
        trainers[1].stage_weights("policy", version, {"x": Shard(whole[cut:] + version, (cut, 0), whole.shape)})
        receiver.prepare(version, timeout_s=10)
        loaded: dict[str, Any] = {}
        receiver.commit(loaded.update)
        np.testing.assert_array_equal(loaded["x"], whole + version)


@pytest.mark.parametrize("again", [False, True])
def test_who_streams_a_version_that_is_withdrawn_is_told_at_once(make_endpoint: Any, again: bool) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    weights = {f"a{index}": np.ones(1000) for index in range(8)}
    trainer.offer_weights("policy", 1, weights)
    loaded = []

    def load(bucket: Any) -> None:
        loaded.extend(bucket)
        if len(loaded) == 2:
            trainer.release_weights("policy", 1)
            if again:
                trainer.offer_weights("policy", 1, weights)

    receiver = rollout.weight_receiver("policy", sources=["trainer"], bucket_bytes=16_000)
    with pytest.raises(RemoteError, match=r"withdrawn|staged anew"):
        receiver.stream(1, load, timeout_s=20)
    assert len(loaded) < 8


@pytest.mark.parametrize("target", [torch.int4, torch.uint7, torch.uint1])
def test_targets_of_less_than_a_byte_are_refused_for_what_torch_does_not_convert(
    make_endpoint: Any, target: torch.dtype
) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("policy", 1, {"a": torch.ones(4)})
    receiver = rollout.weight_receiver("policy", sources=["trainer"])
    receiver.prepare(1)
    receiver.commit(lambda weights: None)
    trainer.stage_weights("policy", 2, {"a": torch.ones(4)})
    receiver.prepare(2)
    with pytest.raises(ValueError, match="a"):
        receiver.commit_into({"a": torch.empty(4, dtype=target)})
    assert receiver.version == 1
