"""Weights across hosts by what changed: fewer bytes, the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.comm import Box, Endpoint, PayloadError, transfer
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
    plain = rollout.weight_receiver("w", sources=["t"])
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
        assert plain.prepare(version, timeout_s=20).moved_bytes == prepared.nbytes
    assert moved[0] == prepared.nbytes
    assert all(later < prepared.nbytes / 10 for later in moved[1:])


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


def test_changes_that_were_altered_are_refused(far: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = far
    receiver = rollout.weight_receiver("w", sources=["t"], delta=True)
    trainer.stage_weights("w", 0, {"x": np.arange(1000)})
    receiver.prepare(0, timeout_s=20)
    trainer.stage_weights("w", 1, {"x": np.arange(1000) + (np.arange(1000) == 7)})
    wrong = Changes(np.array([5], np.uint32), np.zeros(8, np.uint8))
    monkeypatch.setattr(transfer, "changed", lambda old, found: changed(old, wrong))
    with pytest.raises(PayloadError, match="'x' was altered"):
        receiver.prepare(1, timeout_s=20)
