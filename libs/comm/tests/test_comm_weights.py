"""Weights: staged once, read in place, checked, and kept for as long as a reader holds them."""

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.comm import CommError, Endpoint, PayloadError, RemoteError, TimeoutError_
from m2flow.comm.endpoint import _MAX_THREADS
from m2flow.comm.payload import Encoded, decode, encode
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
    waiting = [rollout.request_async("trainer", SERVICE, method, ("policy", 3, 0)) for method in ("fetch", "layout")]
    trainer.stage_weights("other", 1, {"a": np.zeros(5000)})
    # Calls of one peer are handled in order, so the others wait by now.
    assert rollout.newest_weights("trainer", "other") == 1
    # No thread is left to answer.
    busy, go_on = threading.Barrier(_MAX_THREADS + 1), threading.Event()

    def block() -> None:
        busy.wait()
        go_on.wait()

    for number in range(_MAX_THREADS):
        trainer._own_executor.submit(number, block)
    busy.wait(10)
    weights = {version: {"a": np.full(5000, version)} for version in range(3, 7)}
    for version, staged in weights.items():
        trainer.stage_weights("policy", version, staged)
    trainer.release_weights("policy", 6)
    trainer.stage_weights("other", 2, {"a": np.full(5000, 99)})
    go_on.set()
    fetched, (_, layout) = (answer.result(10) for answer in waiting)
    assert decode(fetched["weights"])["a"].tolist() == weights[3]["a"].tolist()
    assert layout[0] == ["a"]
    del fetched, layout, waiting
    gc.collect()
    while (segment := next(iter(trainer._fabric.pool._slabs.values()))).slots_in_use > 1:
        time.sleep(0.001)
    assert segment.slots_in_use == 1  # version 2 of the other


def test_a_fetch_of_a_version_that_is_passed_over_fails(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    passed_over, later = (rollout.request_async("trainer", SERVICE, "fetch", ("policy", at, 0)) for at in (1, 3))
    trainer.stage_weights("other", 1, {"a": np.ones(2)})
    rollout.request("trainer", SERVICE, "digests", ("other", 1, 0))
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
    with pytest.raises(RemoteError, match=r"version 1 are withdrawn, want one of \[3\]"):
        rollout.fetch_weights("trainer", "policy", 1)
    with pytest.raises(ValueError, match="got version 3, want more than the staged 3"):
        trainer.stage_weights("policy", 3, {"a": np.ones(2)})
    trainer.release_weights("policy", 3)
    with pytest.raises(ValueError, match="version 3 are neither staged nor offered"):
        trainer.release_weights("policy", 3)
    with pytest.raises(PayloadError, match="arrays and tensors only"):
        trainer.stage_weights("policy", 4, {"a": "text"})


def test_one_copy_of_the_newest_version_is_all_that_receivers_of_a_host_cost(make_endpoint: Any) -> None:
    trainer, rollouts = make_endpoint("trainer"), [make_endpoint(f"r{rank}") for rank in range(2)]
    receivers = [rollout.weight_receiver("policy", sources=["trainer"]) for rollout in rollouts]
    size = 7 << 20
    own = [{"x": np.zeros(size, np.uint8)} for _ in receivers]
    for version in (1, 2, 3):
        trainer.stage_weights("policy", version, {"x": np.full(size, version, np.uint8)})
        for receiver, target in zip(receivers, own, strict=True):
            receiver.prepare(version, timeout_s=10)
            receiver.commit_into(target)
            assert target["x"].min() == target["x"].max() == version
        staged = trainer._weights._line("policy").staged[version]
        deadline = time.monotonic() + 10
        while staged.slot.holds > 1 or staged.readers:
            # That a receiver has let go, and that it asks for no more, is told a moment later.
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert size < trainer._fabric.pool.size_bytes < 1.15 * size
        assert all(rollout._fabric.pool.size_bytes == 0 for rollout in rollouts)


def test_weights_that_never_fit_are_refused_and_readers_are_waited_for_in_time(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer", quota_bytes=5 << 20), make_endpoint("rollout")
    weights = {"x": np.ones(3 << 20, np.uint8)}
    for version in (1, 2):
        trainer.stage_weights("policy", version, weights, timeout_s=5)
    with pytest.raises(CommError, match=rf"beside \d+ of other weights .* quota of {5 << 20} .* raise quota_bytes"):
        trainer.stage_weights("other", 1, weights)
    kept = rollout.fetch_weights("trainer", "policy", 2)
    with pytest.raises(TimeoutError_, match=r"key 'policy': waited 0\.\d+ s for rollout, who reads .* to let go"):
        trainer.stage_weights("policy", 3, weights, timeout_s=0.05)
    with pytest.raises(RemoteError, match="version 2 are withdrawn, want one after 2"):
        rollout.fetch_weights("trainer", "policy", 2)
    assert rollout.newest_weights("trainer", "policy") == 2
    del kept
    trainer.stage_weights("policy", 3, weights, timeout_s=5)
    assert rollout.fetch_weights("trainer", "policy", 3, timeout_s=5)["x"].all()


def meanwhile(monkeypatch: pytest.MonkeyPatch, method: str, do: Callable[[], object]) -> None:
    """Does something each time before a method of weights is asked for."""
    request = Endpoint.request

    def asks(self: Endpoint, peer: str, service: str, asked: str, args: Any = None, **settings: Any) -> Any:
        if asked == method:
            do()
        return request(self, peer, service, asked, args, **settings)

    monkeypatch.setattr(Endpoint, "request", asks)


@pytest.mark.parametrize("by", ["fetch", "prepare"])
def test_what_is_being_read_stays_beside_the_next_version(
    make_endpoint: Any, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    for version in (1, 2):
        trainer.stage_weights("policy", version, {name: np.full(4, version) for name in "abcdefghij"})
    meanwhile(monkeypatch, "digests", lambda: trainer.stage_weights("policy", 3, {"a": np.zeros(4)}))
    got: dict[str, Any] = {}
    if by == "fetch":
        got.update(rollout.fetch_weights("trainer", "policy", 2, timeout_s=5))
    else:
        receiver = rollout.weight_receiver("policy", sources=["trainer"])
        receiver.prepare(2, timeout_s=5)
        receiver.commit(got.update)
    assert {name: value.tolist() for name, value in got.items()} == dict.fromkeys("abcdefghij", [2] * 4)
    # Calls of one peer are handled in order: it has said that it is done.
    assert rollout.newest_weights("trainer", "policy") == 3
    assert list(trainer._weights._line("policy").staged) == [3]


def test_who_reads_what_makes_way_is_told_at_once(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = make_endpoint("trainer", quota_bytes=5 << 20), make_endpoint("rollout")
    for version in (1, 2):
        trainer.stage_weights("policy", version, {name: np.full(1 << 18, version, np.uint8) for name in "abcdefghij"})
    staged: list[Any] = []
    stager = threading.Thread(
        target=lambda: staged.append(trainer.stage_weights("policy", 3, {"a": np.ones(3 << 20, np.uint8)}, timeout_s=4))
    )

    def stage() -> None:
        stager.start()
        while trainer._weights._line("policy").staged:
            time.sleep(0.001)

    meanwhile(monkeypatch, "digests", stage)
    with pytest.raises(RemoteError, match="version 2 are withdrawn, want one after 2"):
        rollout.weight_receiver("policy", sources=["trainer"]).prepare(2, timeout_s=3)
    stager.join(10)
    assert len(staged) == 1


def test_staging_does_not_wait_for_what_it_keeps_itself(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer", quota_bytes=10 << 20), make_endpoint("rollout")
    rollout.host_channel("q", producers=["trainer"], consumers=["rollout"])
    trainer.channel("q", host="rollout").put(np.zeros(3 << 20, np.uint8))
    weights = {"x": np.ones(4 << 20, np.uint8)}
    trainer.stage_weights("policy", 1, weights)
    kept = [rollout.fetch_weights("trainer", "policy", 1)]
    timer = threading.Timer(0.1, kept.clear)
    timer.start()
    trainer.stage_weights("policy", 2, weights, timeout_s=1)


def test_versions_follow_one_another_whoever_stages_them(make_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("policy", 1, {"a": np.ones(2)})
    writing, go_on = threading.Event(), threading.Event()
    write = Encoded.write_into

    def slow(self: Encoded, target: Any) -> None:
        writing.set()
        assert go_on.wait(10)
        write(self, target)

    monkeypatch.setattr(Encoded, "write_into", slow)
    stagers = [
        threading.Thread(target=trainer.stage_weights, args=("policy", version, {"a": np.full(2, version)}))
        for version in (2, 3)
    ]
    stagers[0].start()
    assert writing.wait(10)
    stagers[1].start()
    # What makes way for the next version is refused at once.
    with pytest.raises(RemoteError, match="version 1 are withdrawn, want one after 1"):
        rollout.fetch_weights("trainer", "policy", 1, timeout_s=5)
    coming = rollout.request_async("trainer", SERVICE, "fetch", ("policy", 2, 0))
    # And which to ask for is said, so that nobody asks again and again. By then it waits for what is coming.
    assert rollout.newest_weights("trainer", "policy") == 2
    go_on.set()
    assert decode(coming.result(10)["weights"])["a"].sum() == 4
    for stager in stagers:
        stager.join(10)
    assert rollout.newest_weights("trainer", "policy") == 3


def test_who_waits_no_longer_is_forgotten(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    receiver = rollout.weight_receiver("policy", sources=["trainer"])
    line = trainer._weights._line("policy")
    for _ in range(5):
        with pytest.raises(TimeoutError_, match="for trainer"):
            receiver.prepare(1, timeout_s=0.001)
        with pytest.raises(TimeoutError_, match="for trainer"):
            rollout.fetch_weights("trainer", "policy", 1, timeout_s=0.001)
    waiting = rollout.request_async("trainer", SERVICE, "fetch", ("policy", 1, 0))
    # Calls of one peer are handled in order.
    assert rollout.newest_weights("trainer", "policy") == -1
    assert [asked.answer.done() for asked in line.awaited] == [False]
    rollout.close()
    with pytest.raises(CommError):
        waiting.result(10)
    deadline = time.monotonic() + 10
    while line.awaited:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_asks_for_a_version_before_it_is_offered_waits_for_that(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    streamed: dict[str, Any] = {}
    errors: list[str] = []

    def prepare() -> None:
        try:
            rollout.fetch_weights("trainer", "policy", 1, timeout_s=20)
        except RemoteError as error:
            errors.append(str(error))

    def stream() -> None:
        rollout.weight_receiver("policy", sources=["trainer"]).stream(1, streamed.update, timeout_s=20)

    threads = [threading.Thread(target=work) for work in (prepare, stream)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while len(trainer._weights._line("policy").awaited) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    trainer.offer_weights("policy", 0, {"a": np.zeros(2)})
    trainer.offer_weights("policy", 1, {"a": np.ones(2)})
    for thread in threads:
        thread.join(10)
    assert streamed["a"].tolist() == [1, 1]
    assert ["are only offered: stream them" in error for error in errors] == [True]
    assert trainer._weights._line("policy").awaited == []


def test_what_is_only_offered_is_not_prepared(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.offer_weights("policy", 1, {"a": np.ones(2)})
    receiver = rollout.weight_receiver("policy", sources=["trainer"])
    with pytest.raises(RemoteError, match="version 1 are only offered: stream them"):
        receiver.prepare(1, timeout_s=5)
    with pytest.raises(RemoteError, match="version 1 are only offered: stream them"):
        rollout.fetch_weights("trainer", "policy", 1, timeout_s=5)
    assert receiver.stream(1, lambda bucket: None, timeout_s=5) == 1
    trainer.release_weights("policy", 1)
    with pytest.raises(TimeoutError_):
        receiver.stream(1, lambda bucket: None, timeout_s=0.01)


def test_weights_that_are_one_empty_array_are_fetched(make_endpoint: Any) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    for length in range(1, 65):
        # The payload of one of these names ends where its array would begin.
        trainer.stage_weights("policy", length, {"x" * length: np.empty((0, 3), np.float32)})
        (found,) = rollout.fetch_weights("trainer", "policy", length, timeout_s=5).values()
        assert (found.shape, found.dtype) == ((0, 3), np.float32)


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
        digests = rollout.request("trainer", SERVICE, "fetch", ("policy", version, 0))["digests"]
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
