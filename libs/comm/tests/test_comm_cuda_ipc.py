"""GPU tensors by their handles: the suite and the loans on a fake GPU, and on a real one where there is one."""

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.comm import CommError, Endpoint, PayloadError, PeerLostError, TimeoutError_, cuda_ipc, route
from m2flow.comm.cuda_ipc import CudaIpcBackend
from m2flow.comm.testing import PatientConformance, Ranks

NAMES = ("r0", "r1", "r2")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: CUDA IPC needs a CUDA device, here none")


class FakeGpu:
    """Storages of this process by their handle, and torch's count of each: what sharing and opening really change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._storages: weakref.WeakValueDictionary[bytes, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self.counts: dict[int, int] = {}
        for name in ("_share", "_open_shared", "_end_count"):
            monkeypatch.setattr(cuda_ipc, name, getattr(self, name))
        monkeypatch.setattr(cuda_ipc, "_is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(cuda_ipc, "_uuid", lambda device: "GPU-0")
        monkeypatch.setattr(cuda_ipc, "_device_of", lambda uuid: torch.device("cpu"))
        monkeypatch.setattr(cuda_ipc, "_finish", lambda tensors: None)

    def _share(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        number, storage = next(self._numbers), tensor.untyped_storage()
        self._storages[b"%d" % number] = storage
        self.counts[number] = 1
        return 0, b"%d" % number, storage.nbytes(), 0, b"counters", number, b"event", True

    def _open_shared(self, device: torch.device, shared: Any) -> torch.UntypedStorage:
        # Another storage on the same bytes, as a reader in another process has.
        opened = torch.from_numpy(
            torch.empty(0, dtype=torch.uint8).set_(self._storages[shared.memory]).numpy()
        ).untyped_storage()
        weakref.finalize(opened, self._end_count, shared)
        return opened

    def _end_count(self, shared: Any) -> None:
        self.counts[shared.counter_offset] -= 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


@pytest.fixture
def ends(run_dir: Path) -> Iterator[tuple[Endpoint, ...]]:
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(Endpoint(run_dir, name, token="token-of-this-run", by_reference=False))
            for name in NAMES
        )


@pytest.fixture
def backends(ends: tuple[Endpoint, ...]) -> Iterator[tuple[CudaIpcBackend, ...]]:
    made = tuple(CudaIpcBackend(end) for end in ends)
    yield made
    for backend in made:
        backend.close()


class TestOnAFake(PatientConformance):
    @pytest.fixture
    def ranks(self, fake: FakeGpu, backends: Ranks) -> Ranks:
        return backends


@pytest.mark.gpu
@NEEDS_GPU
class TestWithinOneProcess(PatientConformance):
    device = "cuda"
    hands_over = True

    @pytest.fixture
    def ranks(self, run_dir: Path) -> Iterator[Ranks]:
        with ExitStack() as stack:
            yield tuple(CudaIpcBackend(stack.enter_context(Endpoint(run_dir, name, token="t"))) for name in NAMES)


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


def test_a_tensor_is_read_in_place_and_kept_until_its_last_view_is_gone(fake: FakeGpu, backends: Any) -> None:
    a, b, _ = backends
    tensor = torch.arange(12.0).reshape(3, 4)
    kept = weakref.ref(tensor.untyped_storage())
    a.isend("r1", {"x": tensor.t()})
    arrived = b.irecv("r0").result(5)["x"]
    tensor[1, 2] = -1
    assert arrived[2, 1] == -1
    view = arrived[1:]
    del tensor, arrived
    gc.collect()
    assert kept() is not None
    assert len(a._lent) == 1
    assert view[1, 1] == -1
    del view
    assert wait_until(lambda: not a._lent and kept() is None)
    assert fake.counts == {0: 0}


def test_a_message_that_nobody_takes_is_taken_back(fake: FakeGpu, backends: Any, ends: Any) -> None:
    a, _, _ = backends
    sent = a.isend("r1", torch.ones(3))
    assert fake.counts == {0: 1}
    time.sleep(0.1)
    ends[1].close()
    with pytest.raises(PeerLostError):
        sent.result(5)
    assert wait_until(lambda: not a._lent)
    assert fake.counts == {0: 0}


def test_a_dead_readers_count_is_ended_for_it(fake: FakeGpu, backends: Any) -> None:
    a, b, c = backends
    sent = [a.isend("r1", torch.ones(3)), a.isend("r2", torch.ones(3))]
    kept = [b.irecv("r0").result(5), c.irecv("r0").result(5)]
    assert [future.result(5) for future in sent] == [None, None]
    a._on_lost("r1")
    assert [lent[0] for lent in a._lent.values()] == ["r2"]
    assert fake.counts == {0: 0, 1: 1}
    assert len(kept) == 2


def test_what_a_reader_cannot_open_is_an_error_there_and_given_back(
    fake: FakeGpu, backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = backends

    def fail(device: torch.device, shared: Any) -> torch.UntypedStorage:
        raise RuntimeError("invalid device context")

    monkeypatch.setattr(cuda_ipc, "_open_shared", fail)
    a.isend("r1", [torch.ones(3), torch.ones(3)])
    with pytest.raises(CommError, match="'r0' that CUDA does not open here: invalid device context"):
        b.irecv("r0").result(5)
    assert wait_until(lambda: not a._lent)
    assert fake.counts == {0: 0, 1: 0}


def test_a_stranger_cannot_end_anothers_loan(fake: FakeGpu, backends: Any, ends: Any) -> None:
    a, b, _ = backends
    a.isend("r1", torch.ones(3))
    arrived = b.irecv("r0").result(5)
    ends[2].request("r0", "m2flow.cuda_ipc", "let go", 1)
    assert len(a._lent) == 1
    assert arrived.sum() == 3


def test_a_tensor_that_came_so_is_not_sent_on(fake: FakeGpu, backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: torch.Tensor) -> tuple[Any, ...]:
        raise RuntimeError("received from another process")

    monkeypatch.setattr(cuda_ipc, "_share", fail)
    with pytest.raises(PayloadError, match="cannot be shared: received from another process"):
        backends[0].isend("r1", torch.ones(3))


def test_a_send_that_times_out_lends_nothing(
    fake: FakeGpu, backends: Any, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def isend(peer: str, tree: Any, *, tag: str, timeout_s: float) -> None:
        raise TimeoutError_(channel=f"send {tag}", key=None, peer=peer, elapsed_s=timeout_s)

    monkeypatch.setattr(ends[0], "isend", isend)
    for tree in ("plain", torch.ones(3)):
        with pytest.raises(TimeoutError_, match=r"waited 0\.050 s for r1"):
            backends[0].isend("r1", tree, timeout_s=0.05)
    assert not backends[0]._lent
    assert fake.counts == {0: 0}


def test_over_grpc_it_is_refused(fake: FakeGpu, tmp_path: Path) -> None:
    with Endpoint(tmp_path / "a", "a", token="t") as a, Endpoint(tmp_path / "b", "b", token="t") as b:
        a.add_address("b", b.listen("127.0.0.1:0"))
        way = route(a.address, a.address_of("b"), "cuda")
        assert way.backend == "nccl"
        with pytest.raises(PayloadError, match=r"'b': .* torch.distributed moves .*; use nccl") as refused:
            CudaIpcBackend(a).isend("b", torch.ones(3))
        assert way.reason in str(refused.value)


@pytest.mark.parametrize("by_reference", [False, True])
def test_gpu_tensors_go_as_route_says(fake: FakeGpu, run_dir: Path, by_reference: bool) -> None:
    tensor = torch.arange(100_000)
    with (
        Endpoint(run_dir, "a", token="t", by_reference=by_reference) as a,
        Endpoint(run_dir, "b", token="t", by_reference=by_reference) as b,
    ):
        backends = CudaIpcBackend(a), CudaIpcBackend(b)
        backends[0].isend("b", tensor)
        arrived = backends[1].irecv("a").result(5)
        used = "reference" if arrived is tensor else "cuda_ipc" if backends[0]._lent else "another"
        assert route(a.address, a.address_of("b"), "cuda").backend == used
        assert used == ("reference" if by_reference else "cuda_ipc")
        assert a._fabric.pool.size_bytes == 0


READER = """
    import torch
    from m2flow.comm.cuda_ipc import CudaIpcBackend
    backend = CudaIpcBackend(endpoint)
    tensor = backend.irecv("r0").result(30)["x"]
    say(int(tensor.sum()))
    sys.stdin.readline()
    say(int(tensor.sum()))
    sys.stdin.readline()
    del tensor
    say("gone")
    sys.stdin.readline()
"""


@pytest.mark.gpu
@pytest.mark.medium
@NEEDS_GPU
@pytest.mark.parametrize("dies", [False, True])
def test_another_process_reads_a_gpu_tensor_in_place(ends: Any, backends: Any, peer: Any, dies: bool) -> None:
    a = backends[0]
    reader = peer("reader", READER)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1 << 24, device="cuda")
        for _ in range(100):
            tensor += 1  # still under way when it is sent: the reader must wait for it
        a.isend("reader", {"x": tensor})
    assert reader.line() == str(100 << 24)
    tensor.zero_()
    torch.cuda.synchronize()
    reader.process.stdin.write("go\n")
    reader.process.stdin.flush()
    assert reader.line() == "0"
    assert len(a._lent) == 1
    assert route(ends[0].address, ends[0].address_of("reader"), "cuda").backend == "cuda_ipc"
    if dies:
        reader.kill()
    else:
        reader.process.stdin.write("go\n")
        reader.process.stdin.flush()
        assert reader.line() == "gone"
    assert wait_until(lambda: not a._lent)
    before = torch.cuda.memory_allocated()
    del tensor
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= before - (4 << 24)
