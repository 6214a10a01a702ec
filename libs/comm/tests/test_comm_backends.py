"""One suite over every backend: by reference, shared memory, gRPC over TCP and Unix sockets, gloo, NCCL."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from m2flow.comm import (
    Endpoint,
    PayloadError,
    PeerLostError,
    Pickled,
    TimeoutError_,
    _torch,
    encode,
)
from m2flow.comm._deadline import Deadline
from m2flow.comm.collectives import Handle, RankGroup, move_rows, spans
from m2flow.comm.process_group import ProcessGroupBackend
from m2flow.comm.testing import PatientConformance, Ranks

NAMES = ("r0", "r1", "r2")


class TestReference(PatientConformance):
    hands_over = True

    @pytest.fixture
    def ranks(self, run_dir: Path) -> Iterator[Ranks]:
        with ExitStack() as stack:
            yield tuple(stack.enter_context(Endpoint(run_dir, name, token="t")) for name in NAMES)

    def test_the_object_itself_arrives(self, ranks: Ranks) -> None:
        array = np.zeros(10)
        ranks[0].isend("r1", array)
        assert ranks[1].irecv("r0").result(5) is array


class TestSharedMemory(PatientConformance):
    @pytest.fixture
    def ranks(self, run_dir: Path) -> Iterator[Ranks]:
        with ExitStack() as stack:
            ends = [Endpoint(run_dir, name, token="t", by_reference=False) for name in NAMES]
            yield tuple(stack.enter_context(end) for end in ends)


class TestGrpc(PatientConformance):
    @pytest.fixture(params=["tcp", "unix"])
    def ranks(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
        with ExitStack() as stack:
            ends = [stack.enter_context(Endpoint(tmp_path / name, name, token="t")) for name in NAMES]
            for end in ends:
                address = end.listen("127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/{end.name}.grpc")
                for other in ends:
                    other.add_address(end.name, address)
            yield tuple(ends)


def on_three_threads(make: Callable[[int], Any]) -> list[Any]:
    """Returns what `make(rank)` returns for each rank; making a process group waits for the others."""
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(make, range(3)))


class TestGloo(PatientConformance):
    @pytest.fixture(params=["one group", "one for each direction"])
    def ranks(self, request: pytest.FixtureRequest) -> Iterator[Ranks]:
        store = dist.HashStore()

        def join(way: str) -> list[Any]:
            prefixed = dist.PrefixStore(way, store)
            return on_three_threads(lambda rank: dist.ProcessGroupGloo(prefixed, rank, 3, timedelta(seconds=20)))

        groups = join("group")
        backs = join("back") if request.param != "one group" else [None] * 3
        backends = [ProcessGroupBackend(group, NAMES, back=back) for group, back in zip(groups, backs, strict=True)]
        yield tuple(backends)
        for backend in backends:
            backend.close()


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 3, reason=f"gpu: three ranks of NCCL need 3 devices, here {torch.cuda.device_count()}"
)
class TestNccl(PatientConformance):
    device = "cuda"

    @pytest.fixture
    def ranks(self) -> Iterator[Ranks]:
        store = dist.HashStore()

        def join(rank: int) -> ProcessGroupBackend:
            torch.cuda.set_device(rank)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=20)
            group, back = (
                dist.ProcessGroupNCCL(dist.PrefixStore(way, store), rank, 3, options) for way in ("group", "back")
            )
            return ProcessGroupBackend(group, NAMES, device=f"cuda:{rank}", back=back)

        backends = on_three_threads(join)
        yield tuple(backends)
        for backend in backends:
            backend.close()


def test_a_process_group_that_will_not_do_is_refused() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    with pytest.raises(ValueError, match="got 2 names, want 1"):
        ProcessGroupBackend(group, ["a", "b"])
    with pytest.raises(ValueError, match="want a second one of the same ranks"):
        ProcessGroupBackend(group, ["a"], device="cuda:0")
    backend = ProcessGroupBackend(group, ["a"])
    with pytest.raises(ValueError, match="got peer 'x', want one of a"):
        backend.isend("x", 1)
    backend.close()


@pytest.mark.parametrize(
    ("sizes", "tensors", "reason"),
    [
        ((64, 1 << 40), [], r"message of \[64, 1099511627776\] bytes, want 0 to 1000000 in all"),
        ((-1, 64), [], r"message of \[-1, 64\] bytes"),
        (None, [(_torch.code_of(torch.zeros(1)), (1 << 20, 1 << 20))], r"tensors of 4398046511104 bytes"),
    ],
)
def test_a_message_of_a_process_group_is_refused_before_memory_is_made(
    sizes: tuple[int, int] | None, tensors: list[Any], reason: str
) -> None:
    store = dist.HashStore()
    groups = on_three_threads(lambda rank: dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=10)))
    backend = ProcessGroupBackend(groups[0], NAMES, max_payload_bytes=1_000_000)
    head, body = encode(("t", tensors)).to_bytes(), encode(None).to_bytes()
    received = backend.irecv("r1", tag="t")
    message = torch.tensor(sizes or [len(head), len(body)]), torch.frombuffer(bytearray(head + body), dtype=torch.uint8)
    sent = [groups[1].send([tensor], 0, 0) for tensor in message]
    with pytest.raises(PayloadError, match=reason):
        received.result(20)
    backend.close()
    del sent


def test_of_who_sent_too_long_a_message_no_more_is_received() -> None:
    """What was left of it came as the next one, of another size, and gloo ended the process."""
    store = dist.HashStore()
    groups = on_three_threads(lambda rank: dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=10)))
    backends = [ProcessGroupBackend(group, NAMES, max_payload_bytes=100_000) for group in groups]
    sent = backends[1].isend("r0", bytes(1_000_000))
    errors = [backends[0].irecv("r1").exception(5) for _ in range(2)]
    assert all(isinstance(error, PayloadError) and "want 0 to 100000 in all" in str(error) for error in errors)
    # One alone would keep what each that it was raised for has at hand.
    assert errors[0] is not errors[1]
    # One that came whole and cannot be read is the only one that is lost.
    for tree in (Pickled(1), 2):
        backends[2].isend("r0", tree)
    with pytest.raises(PayloadError, match="got a pickle"):
        backends[0].irecv("r2").result(5)
    assert backends[0].irecv("r2").result(5) == 2
    for backend in backends:
        backend.close()
    del sent


def test_of_whom_a_process_group_gave_up_in_a_message_no_more_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    groups = on_three_threads(lambda rank: dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=10)))
    backends = [ProcessGroupBackend(group, NAMES) for group in groups]
    asked = []

    def out_of_memory(rank: int) -> Any:
        asked.append(rank)
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(backends[0], "_recv", out_of_memory)
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"r1.*can't allocate memory"):
            backends[0].irecv("r1").result(5)
    assert asked == [1]
    for backend in backends:
        backend.close()


def test_a_rank_that_is_silent_for_the_groups_time_out_is_lost() -> None:
    store = dist.HashStore()
    groups = on_three_threads(lambda rank: dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=1)))
    backend = ProcessGroupBackend(groups[0], NAMES)
    with pytest.raises(PeerLostError, match="'r1' is lost: its process group gave up"):
        backend.irecv("r1").result(20)
    backend.close()


def test_a_receive_from_a_dead_peer_fails_and_names_it(make_endpoint: Any, peer: Any) -> None:
    a = make_endpoint("a")
    victim = peer("v", "endpoint.isend('a', 'first'); say('sent'); time.sleep(60)")
    assert victim.line() == "sent"
    assert a.recv("v", timeout_s=10) == "first"
    waiting = a.irecv("v")
    victim.kill()
    with pytest.raises(PeerLostError, match="'v' is lost"):
        waiting.result(5)
    with pytest.raises(PeerLostError):
        a.send("v", "x", timeout_s=5)
    with pytest.raises(PeerLostError):
        a.recv("v", timeout_s=5)


def test_a_receive_that_times_out_names_the_peer(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    with pytest.raises(TimeoutError_, match=r"waited 0\.\d+ s for b"):
        a.recv("b", timeout_s=0.05)
    b.isend("a", "later")
    assert a.recv("b", timeout_s=5) == "later"
    assert a._fabric.mailbox.num_states() == 0


@pytest.mark.parametrize("timeout_s", [20, None])
def test_a_collective_fails_with_the_first_rank_that_is_lost(make_endpoint: Any, timeout_s: float | None) -> None:
    """Whoever else is late; whether it is lost before or during the wait."""
    r0, _, r2 = (make_endpoint(name) for name in NAMES)
    handles = [RankGroup(r0, name, NAMES).gather(0, root=0) for name in ("during", "before")]
    r2.isend("r0", "here")
    assert r0.recv("r2", timeout_s=10) == "here"
    closing = threading.Timer(0.05, r2.close)
    closing.start()
    for handle in handles:
        with pytest.raises(PeerLostError, match="'r2' is lost"):
            handle.wait(timeout_s)
        assert handle.done()
    closing.join()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_failed_by_a_time_out_of_its_own_is_not_taken_for_missing(num_ranks: int) -> None:
    parts: list[tuple[str, Future[None]]] = [(name, Future()) for name in NAMES[:num_ranks]]
    error = TimeoutError_(channel="c", key=None, peer="somebody else", elapsed_s=1.0)
    failing = threading.Timer(0.02, parts[-1][1].set_exception, [error])
    failing.start()
    with pytest.raises(TimeoutError_) as caught:
        Handle("what", parts, list, Deadline(20)).wait()
    assert caught.value is error
    failing.join()


@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_that_is_no_rank_is_refused(make_endpoint: Any, root: int) -> None:
    group = RankGroup(make_endpoint("r0"), "g", NAMES)
    for collective in (group.broadcast, group.scatter, group.gather):
        with pytest.raises(ValueError, match=f"got root {root}, want a rank, 0 to 2"):
            collective([None] * 3, root=root)


def test_a_scatter_that_was_refused_is_made_again(make_endpoint: Any) -> None:
    """It counted as a call at the root alone, and no later one met the others'."""
    r0, r1 = (RankGroup(make_endpoint(name), "g", NAMES[:2]) for name in NAMES[:2])
    with pytest.raises(ValueError, match="scatter: got 3 trees, want 2"):
        r0.scatter([1, 2, 3], root=0)
    handles = [r0.scatter([1, 2], root=0, timeout_s=5), r1.scatter(None, root=0, timeout_s=5)]
    assert [handle.wait() for handle in handles] == [1, 2]


def test_after_a_call_whose_tree_could_not_be_encoded_the_next_ones_meet(make_endpoint: Any) -> None:
    r0, r1 = (RankGroup(make_endpoint(name), "g", ["r0", "r1"]) for name in ("r0", "r1"))
    with pytest.raises(PayloadError):
        r0.broadcast(object(), root=0)
    with pytest.raises(TimeoutError_, match="r0"):
        r1.broadcast(None, root=0, timeout_s=0.2).wait()
    handles = [r0.broadcast(1, root=0, timeout_s=5), r1.broadcast(None, root=0, timeout_s=5)]
    assert [handle.wait() for handle in handles] == [1, 1]


def test_the_ranks_of_a_collective_share_its_time() -> None:
    given_s: list[float] = []

    def isend(peer: str, tree: Any, *, tag: str, timeout_s: float) -> Future[None]:
        given_s.append(timeout_s)
        time.sleep(0.05)
        if peer == "r2":
            raise TimeoutError_(channel=f"send {tag}", key=None, peer=peer, elapsed_s=0.05)
        return Future()

    backend: Any = SimpleNamespace(name="r0", isend=isend)
    with pytest.raises(TimeoutError_, match=r"'send g/broadcast/1': waited 0\.[1-9]\d+ s for r2$"):
        RankGroup(backend, "g", NAMES).broadcast(1, root=0, timeout_s=0.1)
    assert given_s[0] <= 0.1
    assert given_s[1] <= 0.05


def test_a_collective_that_cannot_send_keeps_nothing_of_what_comes(make_endpoint: Any) -> None:
    r0, r1 = make_endpoint("r0"), make_endpoint("r1")
    with pytest.raises(PayloadError):
        RankGroup(r0, "g", NAMES[:2]).all_gather(object())
    r1.isend("r0", 1, tag="g/all_gather/1").result(5)
    with pytest.raises(PayloadError):
        move_rows(r0, [object()], tag="rows", sources={"r0": 1, "r1": 1}, targets={"r1": 1, "r0": 1})
    r1.isend("r0", 1, tag="rows").result(5)
    assert r0._fabric.mailbox.num_states() == 0


def test_receives_that_time_out_leave_nothing(make_endpoint: Any) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    kept = a.irecv("b")
    for tag in ("", "", "other"):
        with pytest.raises(TimeoutError_):
            a.recv("b", tag=tag, timeout_s=0)
    assert [len(receivers) for receivers in a._fabric.mailbox._awaited.values()] == [1]
    b.isend("a", "first")
    assert kept.result(5) == "first"


counts = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(counts, counts)
def test_spans_move_every_row_once_and_in_order(sources: list[int], targets: list[int]) -> None:
    targets[-1] += max(0, sum(sources) - sum(targets))
    sources[-1] += max(0, sum(targets) - sum(sources))
    rows = np.arange(sum(sources))
    given_rows = np.split(rows, np.cumsum(sources)[:-1])
    taken = [np.full(count, -1) for count in targets]
    for span in spans(sources, targets):
        part = given_rows[span.source][span.source_start : span.source_start + span.num_rows]
        taken[span.target][span.target_start : span.target_start + span.num_rows] = part
    assert np.concatenate(taken).tolist() == rows.tolist()


def test_spans_refuse_unequal_sums_and_less_than_nothing() -> None:
    with pytest.raises(ValueError, match="3 rows to give and 4 to take"):
        spans([3], [4])
    with pytest.raises(ValueError, match=r"\[2, -1\] rows to give .* want none below 0"):
        spans([2, -1], [1])


def test_tensors_are_rows_too(run_dir: Path) -> None:
    sources, targets = {"r0": 3}, {"r0": 1, "r1": 2, "r2": 0}
    with ExitStack() as stack:
        ranks = [stack.enter_context(Endpoint(run_dir, name, token="t", by_reference=False)) for name in NAMES]
        rows = torch.arange(6).reshape(3, 2).to(torch.bfloat16)
        handles = [
            move_rows(rank, rows if rank.name == "r0" else None, tag="t", sources=sources, targets=targets)
            for rank in ranks
        ]
        moved = [handle.wait(10) for handle in handles]
    assert [tuple(found.shape) for found in moved] == [(1, 2), (2, 2), (0, 2)]
    assert torch.equal(torch.cat(moved), rows)
