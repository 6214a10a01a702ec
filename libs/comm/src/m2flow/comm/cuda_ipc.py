"""Messages between processes of one host whose GPU tensors are read in place: only their handles travel.

This is an adapter: importing it imports torch. It is an endpoint's messages with one difference: a tensor on a GPU goes
as the handle of its allocation, which the reader opens. torch counts the readers of what it has shared and keeps the
memory until they are done; this backend keeps the tensor too until the reader reports, and ends the count of a reader
that died, which torch itself would wait for until the sender ends.
"""

import contextlib
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch

from m2flow.comm import _torch
from m2flow.comm._calls import Request
from m2flow.comm._executor import LaneExecutor
from m2flow.comm._registry import register
from m2flow.comm.endpoint import Endpoint
from m2flow.comm.errors import CommError, PayloadError
from m2flow.comm.payload import Tree, decode, encode
from m2flow.comm.routing import route

_SERVICE = "m2flow.cuda_ipc"
_MAX_THREADS = 4


class _Shared(NamedTuple):
    """What `_share_cuda_` returns, and `_new_shared_cuda` takes in the same order; all but the device are plain data.

    The event is recorded on the sender's current stream; opening makes the reader's current stream wait for it.
    """

    device: int
    memory: bytes
    size_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    has_event: bool


@register
class Handle(NamedTuple):
    """A tensor in another process: `number` is its sender's, `gpu` the device's UUID, the strides are in elements."""

    number: int
    gpu: str
    code: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    shared: tuple[Any, ...]


@register
class _Message(NamedTuple):
    handles: list[Handle]
    payload: bytes


class CudaIpcBackend:
    """Sends and receives between endpoints of one host, GPU tensors without a copy. One for each endpoint.

    What arrives on a GPU is the sender's own memory: neither end may change it afterwards. It lies on the same GPU,
    which the reader must see; it cannot be sent on without a copy. A tensor is kept at the sender until the reader has
    let go of its last view, died, or left before it took the message; a reader that leaves in good order lets go first,
    or what it has stays lent until this backend is closed. Everything else goes as by `Endpoint`. Raises ValueError for
    an endpoint that has one.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.name = endpoint.name
        self._endpoint = endpoint
        self._executor = LaneExecutor(_MAX_THREADS, f"{self.name} cuda ipc")
        # By number: whom a tensor is lent to, the tensor, and torch's count of its readers.
        self._lent: dict[int, tuple[str, torch.Tensor, _Shared]] = {}
        self._num_lent = 0
        self._lock = threading.Lock()
        endpoint.handle(_SERVICE, self._on_report)
        endpoint.on_peer_lost(self._on_lost)

    def isend(self, peer: str, tree: Tree, *, tag: str = "", timeout_s: float | None = None) -> "Future[None]":
        """Sends a tree; the future is done when the peer has received it. Blocks as an endpoint's does, and not for the
        GPU.

        Raises PayloadError at once for what cannot be encoded, or has itself come from another process, and for a GPU
        tensor to a peer on another host.
        """
        way = route(self._endpoint.address, self._endpoint.address_of(peer), "cuda")
        if way.backend == "reference":
            return self._endpoint.isend(peer, tree, tag=tag, timeout_s=timeout_s)
        encoded = encode(tree, lift=_is_on_gpu)
        if not encoded.lifted:
            return self._endpoint.isend(peer, tree, tag=tag, timeout_s=timeout_s)
        if way.backend != "cuda_ipc":
            raise PayloadError(f"got a GPU tensor for {peer!r}: {way.reason}; use {way.backend}, or send its cpu()")
        handles: list[Handle] = []
        try:
            for tensor in encoded.lifted:
                handles.append(self._lend(peer, tensor))
            message = _Message(handles, encoded.to_bytes())
            sent = self._endpoint.isend(peer, message, tag=tag, timeout_s=timeout_s)
        except BaseException:
            self._take_back([handle.number for handle in handles])
            raise
        sent.add_done_callback(partial(self._on_sent, handles))
        return sent

    def irecv(self, peer: str, *, tag: str = "") -> "Future[Tree]":
        """Returns the future of a peer's next tree with a tag, in the order sent. Cancelled, it takes none.

        It is done when the tensors' elements are there, whatever stream reads them.
        """
        arrived = self._endpoint.irecv(peer, tag=tag)
        opened = _Opened(arrived)
        lane = (peer, tag)
        arrived.add_done_callback(lambda done: self._executor.submit(lane, partial(self._open, peer, done, opened)))
        return opened

    def close(self) -> None:
        """Lets go of all tensors; torch keeps those that a reader still has. The endpoint is its owner's."""
        self._executor.close()
        with self._lock:
            self._lent.clear()

    # The sender's side.

    def _lend(self, peer: str, tensor: torch.Tensor) -> Handle:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        code = _torch.code_of(tensor)
        try:
            shared = _Shared(*_share(tensor)) if tensor.numel() else ()
        except RuntimeError as error:
            raise PayloadError(f"got a GPU tensor that cannot be shared: {error}") from error
        with self._lock:
            self._num_lent += 1
            number = self._num_lent
            if shared:
                self._lent[number] = peer, tensor, shared
        gpu, offset = _uuid(tensor.device), int(tensor.storage_offset())
        return Handle(number, gpu, code, tuple(tensor.shape), tensor.stride(), offset, tuple(shared))

    def _on_sent(self, handles: list[Handle], sent: "Future[None]") -> None:
        if sent.cancelled() or sent.exception() is not None:
            self._take_back([handle.number for handle in handles])

    def _on_report(self, request: Request) -> None:
        """Ends a loan: the reader has let go of the tensor, and torch has counted that, or it has never opened it."""
        number = request.args
        with self._lock:
            lent = self._lent.get(number)
        if lent is None or lent[0] != request.peer:
            return
        if request.method == "never opened":
            self._take_back([number])
        else:
            with self._lock:
                self._lent.pop(number, None)

    def _on_lost(self, peer: str) -> None:
        with self._lock:
            numbers = [number for number, lent in self._lent.items() if lent[0] == peer]
        self._take_back(numbers)

    def _take_back(self, numbers: list[int]) -> None:
        """Ends the loan of what its reader will never let go of."""
        with self._lock:
            taken = [self._lent.pop(number) for number in numbers if number in self._lent]
        for _, _, shared in taken:
            _end_count(shared)

    # The reader's side.

    def _open(self, peer: str, arrived: "Future[Tree]", opened: "Future[Tree]") -> None:
        if arrived.cancelled() or not opened.set_running_or_notify_cancel():
            return
        try:
            message = arrived.result()
            if isinstance(message, _Message):
                message = decode(message.payload, lifted=self._map_all(peer, message.handles))
        except CommError as error:
            opened.set_exception(error)
        else:
            opened.set_result(message)

    def _map_all(self, peer: str, handles: list[Handle]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        try:
            for handle in handles:
                tensors.append(self._map(peer, handle))
        except RuntimeError as error:
            raise CommError(f"got a GPU tensor of {peer!r} that CUDA does not open here: {error}") from error
        finally:
            for handle in handles[len(tensors) :]:
                self._report(peer, "never opened", handle.number)
        _finish(tensors)
        return tensors

    def _map(self, peer: str, handle: Handle) -> torch.Tensor:
        device = _device_of(handle.gpu)
        empty: torch.Tensor = _torch.empty(handle.code, (0,), device)
        if not handle.shared:
            return empty.reshape(handle.shape)
        storage = _open_shared(device, _Shared(*handle.shared))
        # The storage lives as long as any tensor that lies in it.
        weakref.finalize(storage, self._report, peer, "let go", handle.number).atexit = False
        return empty.set_(storage, handle.offset, handle.shape, handle.strides)

    def _report(self, peer: str, what: str, number: int) -> None:
        """Tells a tensor's sender what has become of it. A finaliser calls it, so the io thread does the work."""

        def tell() -> None:
            # Where an end is closed there is nobody to tell.
            with contextlib.suppress(CommError):
                self._endpoint.request_async(peer, _SERVICE, what, number)

        self._endpoint._fabric.loop.call(tell)


class _Opened(Future[Tree]):
    """A message whose tensors have yet to be opened; it can be cancelled for as long as the message can."""

    def __init__(self, arrived: "Future[Tree]") -> None:
        super().__init__()
        self._arrived = arrived

    def cancel(self) -> bool:
        return self._arrived.cancel() and super().cancel()


# What is asked of torch and CUDA; tests put others in their place.


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _device_of(uuid: str) -> torch.device:
    """Returns the device here of a GPU by its UUID, as two processes may number the GPUs that they see differently."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if _uuid(device) == uuid:
            return device
    raise CommError(f"got a tensor on GPU {uuid}, which this process does not see: widen CUDA_VISIBLE_DEVICES")


def _share(tensor: torch.Tensor) -> tuple[Any, ...]:
    shared: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return shared


def _open_shared(device: torch.device, shared: _Shared) -> torch.UntypedStorage:
    with torch.cuda.device(device):
        return torch.UntypedStorage._new_shared_cuda(device.index, *shared[1:])


def _end_count(shared: _Shared) -> None:
    torch.UntypedStorage._release_ipc_counter_cuda(shared.counter, shared.counter_offset)


def _finish(tensors: list[torch.Tensor]) -> None:
    """Waits for the events that opening made this thread's streams wait for."""
    for device in {tensor.device for tensor in tensors}:
        torch.cuda.current_stream(device).synchronize()
