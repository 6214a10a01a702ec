"""Weights: staged once, read in place, checked, and kept for as long as a reader holds them."""

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.comm import Endpoint, PayloadError, RemoteError
from m2flow.comm.endpoint import _MAX_HANDLER_THREADS
from m2flow.comm.payload import decode, encode
from m2flow.comm.weights import SERVICE, WeightReader, digest


def test_a_version_is_read_in_place(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    weights = {
        "a": torch.randn(300, 7),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": np.arange(4),
        "d": torch.tensor(2.0),
    }
    staged = trainer.stage_weights("policy", 1, weights)
    assert staged.nbytes >= 300 * 7 * 4
    fetched = rollout.fetch_weights("trainer", "policy", 1)
    assert list(fetched) == list(weights)
    for name, value in weights.items():
        assert fetched[name].dtype == value.dtype
        assert (fetched[name] == value).all()


def test_many_readers_share_one_copy(make_endpoint: Any) -> None:
    trainer = make_endpoint("trainer")
    trainer.stage_weights("policy", 1, {"a": np.ones(1 << 18)})
    fetched = [make_endpoint(f"r{rank}").fetch_weights("trainer", "policy", 1) for rank in range(3)]
    assert all(version["a"].sum() == 1 << 18 for version in fetched)
    assert trainer._fabric.pool.size_bytes < 3 << 20


def test_a_held_version_stays_as_it_is_and_memory_is_used_again(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("policy", 0, {"a": np.zeros(1 << 18)})
    kept = rollout.fetch_weights("trainer", "policy", 0)["a"]
    for version in range(1, 12):
        trainer.stage_weights("policy", version, {"a": np.full(1 << 18, version)})
        assert rollout.fetch_weights("trainer", "policy", version)["a"][0] == version
        time.sleep(0.01)
    assert kept.max() == 0
    assert trainer._fabric.pool.size_bytes < 10 << 20


def test_a_fetch_waits_until_the_version_is_staged(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    timer = threading.Timer(0.1, lambda: trainer.stage_weights("policy", 3, {"a": np.ones(2)}))
    timer.start()
    assert rollout.fetch_weights("trainer", "policy", 3, timeout_s=5)["a"].sum() == 2


def test_a_fetch_that_waited_gets_its_version_though_newer_ones_overtake_the_answer(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    waiting = [rollout.request_async("trainer", SERVICE, method, ("policy", 3)) for method in ("fetch", "digests")]
    trainer.stage_weights("other", 1, {"a": np.zeros(5000)})
    # Calls of one peer are handled in order, so the others wait by now.
    rollout.request("trainer", SERVICE, "digests", ("other", 1))
    # No thread is left to answer.
    busy, go_on = threading.Barrier(_MAX_HANDLER_THREADS + 1), threading.Event()

    def block(request: Any) -> None:
        busy.wait()
        go_on.wait()

    for number in range(_MAX_HANDLER_THREADS):
        trainer.handle(f"busy{number}", block)
        rollout.request_async("trainer", f"busy{number}", "")
    busy.wait(10)
    weights = {version: {"a": np.full(5000, version)} for version in range(3, 7)}
    for version, staged in weights.items():
        trainer.stage_weights("policy", version, staged)
    trainer.release_weights("policy", 6)
    trainer.stage_weights("other", 2, {"a": np.full(5000, 99)})
    go_on.set()
    fetched, digests = (answer.result(10) for answer in waiting)
    assert decode(fetched["weights"])["a"].tolist() == weights[3]["a"].tolist()
    assert digests == {"a": digest(weights[3]["a"])}
    del fetched, waiting
    gc.collect()
    while (segment := next(iter(trainer._fabric.pool._slabs.values()))).slots_in_use > 3:
        time.sleep(0.001)
    assert segment.slots_in_use == 3  # version 5 and the two of the other


def test_a_fetch_of_a_version_that_is_passed_over_fails(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    passed_over, later = (rollout.request_async("trainer", SERVICE, "fetch", ("policy", at)) for at in (1, 3))
    trainer.stage_weights("other", 1, {"a": np.ones(2)})
    rollout.request("trainer", SERVICE, "digests", ("other", 1))
    trainer.stage_weights("policy", 2, {"a": np.ones(2)})
    with pytest.raises(RemoteError, match=r"version 1 are withdrawn, want one of \[2\]"):
        passed_over.result(10)
    trainer.stage_weights("policy", 3, {"a": np.full(2, 3.0)})
    assert decode(later.result(10)["weights"])["a"].sum() == 6


def test_a_released_version_is_not_waited_for(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("policy", 1, {"a": np.ones(2)})
    trainer.release_weights("policy", 1)
    with pytest.raises(RemoteError, match="version 1 are withdrawn, want one after 1"):
        rollout.fetch_weights("trainer", "policy", 1, timeout_s=10)
    with pytest.raises(ValueError, match="got version 1, want more than the staged 1"):
        trainer.stage_weights("policy", 1, {"a": np.ones(2)})


def test_old_and_unknown_versions_are_refused(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    assert rollout.newest_weights("trainer", "policy") == -1
    for version in (1, 2, 3):
        trainer.stage_weights("policy", version, {"a": np.ones(2)})
    assert rollout.newest_weights("trainer", "policy") == 3
    with pytest.raises(RemoteError, match=r"version 1 are withdrawn, want one of \[2, 3\]"):
        rollout.fetch_weights("trainer", "policy", 1)
    with pytest.raises(ValueError, match="got version 3, want more than the staged 3"):
        trainer.stage_weights("policy", 3, {"a": np.ones(2)})
    trainer.release_weights("policy", 2)
    with pytest.raises(ValueError, match="version 2 are not staged"):
        trainer.release_weights("policy", 2)
    with pytest.raises(PayloadError, match="arrays and tensors only"):
        trainer.stage_weights("policy", 4, {"a": "text"})


def test_a_wrong_digest_is_named(make_endpoint: Any) -> None:
    weights = {f"t{index}": np.full(3, index) for index in range(16)}
    every = {name: digest(value) for name, value in weights.items()}
    some = {name: every[name] for name in ("t1", "t9")}
    reader = WeightReader()

    def payload(arrays: dict[str, Any]) -> Any:
        return np.frombuffer(encode(arrays).to_bytes(), np.uint8)

    def check(name: str, digests: dict[str, int]) -> None:
        answer = {"weights": payload({**weights, name: np.full(3, 99)}), "digests": digests}
        reader.check("trainer", "policy", 1, answer, lambda: every)

    with pytest.raises(PayloadError, match="'policy' version 1 from 'trainer': 't5' has another digest"):
        check("t5", every)
    with pytest.raises(PayloadError, match="'t5' has another digest"):
        check("t5", some)  # a source that is new here is asked for the rest
    reader.check("trainer", "policy", 1, {"weights": payload(weights), "digests": some}, lambda: every)
    check("t5", some)
    with pytest.raises(PayloadError, match="'t9' has another digest"):
        check("t9", some)


def test_every_tensor_has_its_digest_once_in_eight_versions(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    weights = {f"t{index}": np.full(3, index) for index in range(16)}
    seen: list[str] = []
    for version in range(1, 10):
        trainer.stage_weights("policy", version, weights)
        digests = rollout.request("trainer", SERVICE, "fetch", ("policy", version))["digests"]
        assert len(digests) == (16 if version == 1 else 2)
        seen += digests if version > 1 else []
    assert sorted(seen) == sorted(weights)
    late = rollout.fetch_weights("trainer", "policy", 9, timeout_s=5)
    assert {name: value.tolist() for name, value in late.items()} == {k: v.tolist() for k, v in weights.items()}


def test_one_deadline_holds_for_all_that_a_fetch_asks(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = make_endpoint("source"), make_endpoint("reader")
    source.stage_weights("w", 1, {"x": np.zeros(8)})
    left: list[float | None] = []
    request = Endpoint.request

    def slow(self: Endpoint, *args: Any, timeout_s: float | None = None) -> Any:
        left.append(timeout_s)
        time.sleep(0.02)
        return request(self, *args, timeout_s=timeout_s)

    def ask(*args: Any) -> Any:
        args[-1]()
        return {}

    monkeypatch.setattr(Endpoint, "request", slow)
    monkeypatch.setattr(reader._reader, "check", ask)
    reader.fetch_weights("source", "w", 1, timeout_s=5)
    first, second = left
    assert first is not None
    assert second is not None
    assert second < first - 0.02
