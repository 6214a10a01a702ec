"""Weights across hosts by what changed: fewer bytes, the same bits."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.comm import Box, Endpoint, transfer
from m2flow.comm._changes import Changes, changed, changes

DTYPES = ("uint8", "float16", "float32", "float64", "complex128", "bool")


@given(
    st.sampled_from(DTYPES), st.integers(0, 40), st.floats(0, 1), st.integers(0, 1 << 32), st.booleans(), st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_changes_make_the_new_of_the_old_to_the_bit(
    name: str, size: int, share: float, seed: int, as_tensor: bool, transposed: bool
) -> None:
    rng = np.random.default_rng(seed)
    top = 2 if name == "bool" else 256
    bits = rng.integers(0, top, (2, size * np.dtype(name).itemsize), np.uint8)
    old, new = bits.view(name)
    new = np.where(rng.random(size) < share, new, old)
    if transposed and size % 2 == 0:
        old, new = old.reshape(2, -1).T, new.reshape(2, -1).T
    found = changes(torch.tensor(old), torch.tensor(new)) if as_tensor else changes(old, new)
    if found is None:
        return
    made = changed(torch.tensor(old), found).numpy() if as_tensor else changed(old, found)
    assert made.tobytes() == np.ascontiguousarray(new).tobytes()
    assert found.nbytes < new.nbytes


def test_zeros_of_another_sign_and_nans_of_other_bits_are_changes() -> None:
    old = np.zeros(100, np.float32)
    new = old.copy()
    new[3], new[4] = -0.0, np.nan
    other = new.copy()
    other.view(np.uint32)[4] ^= 1
    first, second = changes(old, new), changes(new, other)
    assert first is not None
    assert second is not None
    assert (first.indices.tolist(), second.indices.tolist()) == ([3, 4], [4])


def test_what_is_not_alike_or_changed_throughout_is_sent_whole() -> None:
    old = np.zeros(10, np.float32)
    assert changes(old, old.astype(np.float64)) is None
    assert changes(old, old[:5]) is None
    assert changes(old, old + 1) is None
    nothing = changes(old, old.copy())
    assert nothing is not None
    assert nothing.nbytes == 0


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Endpoint, Endpoint]]:
    with Endpoint(tmp_path / "t", "t", token="t") as trainer, Endpoint(tmp_path / "r", "r", token="t") as rollout:
        rollout.add_address("t", trainer.listen("127.0.0.1:0"))
        yield trainer, rollout


def test_a_receiver_with_delta_moves_only_what_changed(far: tuple[Endpoint, Endpoint]) -> None:
    trainer, rollout = far
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        "a": torch.randn(300, 40).to(torch.bfloat16),
        "b": rng.normal(size=(50, 50)).astype(np.float32),
        "c": torch.tensor(1.0),
    }
    receiver = rollout.weight_receiver("w", sources=["t"], delta=True)
    moved = []
    for version in range(4):
        if version:
            rows = rng.integers(0, 300, 20)
            weights["a"] = weights["a"].clone()
            weights["a"][rows, 3] = -weights["a"][rows, 3]
            weights["b"] = weights["b"].copy()
            weights["b"][version] += 1
        trainer.stage_weights("w", version, weights)
        prepared = receiver.prepare(version, timeout_s=20)
        moved.append(prepared.moved_bytes)
        got: dict[str, Any] = {}
        receiver.commit(got.update)
        assert all(bool((got[name] == weights[name]).all()) for name in weights)
    assert moved[0] == prepared.nbytes
    assert all(later < prepared.nbytes / 10 for later in moved[1:])


def test_a_tensor_that_has_other_dims_than_before_is_sent_whole(far: tuple[Endpoint, Endpoint]) -> None:
    """Every prepare failed from then on."""
    trainer, rollout = far
    receiver = rollout.weight_receiver("w", sources=["t"], delta=True)
    for version, (shape, moved) in enumerate((((6,), 48), ((2, 3), 48), ((2, 3), 0), ((), 8), ((6,), 48))):
        trainer.stage_weights("w", version, {"x": np.ones(shape)})
        assert receiver.prepare(version, timeout_s=20).moved_bytes == moved
        got: dict[str, Any] = {}
        receiver.commit(got.update)
        assert (got["x"].shape, got["x"].sum()) == (shape, np.ones(shape).sum())


def test_a_base_that_was_withdrawn_is_no_base(far: tuple[Endpoint, Endpoint]) -> None:
    trainer, rollout = far
    receiver = rollout.weight_receiver("w", sources=["t"], wanted={"x": Box((10,), (500,))}, delta=True)
    array = np.arange(1000.0)
    trainer.stage_weights("w", 0, {"x": array})
    receiver.prepare(0, timeout_s=20)
    for version in range(1, 5):
        trainer.stage_weights("w", version, {"x": array + (np.arange(1000) == version + 20)})
    prepared = receiver.prepare(4, timeout_s=20)
    assert prepared.moved_bytes == prepared.nbytes == 4000
    got: dict[str, Any] = {}
    receiver.commit(got.update)
    assert got["x"].tolist() == (array + (np.arange(1000) == 24))[10:510].tolist()


def test_changes_that_do_not_fit_are_asked_for_whole(
    far: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = far
    receiver = rollout.weight_receiver("w", sources=["t"], delta=True)
    trainer.stage_weights("w", 0, {"x": np.arange(1000)})
    receiver.prepare(0, timeout_s=20)
    trainer.stage_weights("w", 1, {"x": np.arange(1000) + (np.arange(1000) == 7)})
    wrong = Changes(np.array([5], np.uint32), np.zeros(8, np.uint8))
    monkeypatch.setattr(transfer, "changed", lambda old, found: changed(old, wrong))
    assert receiver.prepare(1, timeout_s=20).moved_bytes == 12 + 8000
    got: dict[str, Any] = {}
    receiver.commit(got.update)
    assert got["x"].tolist() == (np.arange(1000) + (np.arange(1000) == 7)).tolist()


def test_a_source_that_was_started_anew_has_other_bases(tmp_path: Path) -> None:
    """Its version of the base's number is another: every prepare failed while that was staged."""
    with Endpoint(tmp_path / "r", "r", token="t") as rollout:
        receiver = rollout.weight_receiver("w", sources=["t"], delta=True)
        for life in range(2):
            with Endpoint(tmp_path / "t", "t", token="t") as trainer:
                rollout.add_address("t", trainer.listen("127.0.0.1:0"))
                array = np.arange(1000) + life * (np.arange(1000) % 7 == 0)
                trainer.stage_weights("w", 5, {"x": array})
                receiver.prepare(5, timeout_s=20)
                got: dict[str, Any] = {}
                receiver.commit(got.update)
                assert got["x"].tolist() == array.tolist()


def test_the_version_before_stays_while_a_receiver_of_another_host_is_in_its_midst(
    far: tuple[Endpoint, Endpoint],
) -> None:
    trainer, rollout = far
    receiver = rollout.weight_receiver("w", sources=["t"], bucket_bytes=1)
    staged = trainer._weights._line("w").staged
    trainer.stage_weights("w", 0, {name: np.full(10, 0) for name in "abc"})
    got: dict[str, Any] = {}

    def load(bucket: dict[str, Any]) -> None:
        if not got:
            trainer.stage_weights("w", 1, {name: np.full(10, 1) for name in "abc"})
            assert sorted(staged) == [0, 1]
        got.update(bucket)

    receiver.stream(0, load, timeout_s=20)
    assert [array.max() for array in got.values()] == [0, 0, 0]
    deadline = time.monotonic() + 10
    while sorted(staged) != [1]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    receiver.prepare(1, timeout_s=20)
    # What is told a source goes ahead of what is asked next.
    assert rollout.newest_weights("t", "w") == 1
    trainer.stage_weights("w", 2, {name: np.full(10, 2) for name in "abc"})
    assert sorted(staged) == [2]
