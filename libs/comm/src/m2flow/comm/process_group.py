"""Messages over a process group of torch.distributed, gloo or NCCL: for ranks that it has joined already.

This is an adapter: importing it imports torch. A message is its sizes, then its tree, then each tensor that lies on the
group's device, from where it lies to where it will lie. Each peer and direction has a thread's lane of its own, so
messages keep their order and nobody blocks the caller; which tag a message has is read from the message.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from m2flow.comm import _torch
from m2flow.comm._executor import LaneExecutor
from m2flow.comm._mailbox import Mailbox
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import CommError, PayloadError, PeerLostError
from m2flow.comm.payload import MAX_PAYLOAD_BYTES, Encoded, Tree, decode, encode


class ProcessGroupBackend:
    """Sends and receives between the ranks of a process group. `members` are the ranks' names, in order.

    `device` is where the group moves tensors: "cpu" for gloo, this rank's GPU for NCCL. Tensors there go and arrive
    without touching the host; everything else goes as bytes. A future is done when the data are where they belong,
    whatever stream reads them; what is sent is read as the caller's current stream leaves it.

    NCCL runs what two ranks ask of one group in order, so that two who both sent first would wait for ever: there
    messages to lower ranks go over a group of their own, `back`, and neither is made with a `device_id`, as all ranks
    would share its one queue. With gloo a rank silent for the time-out of its group is a lost peer; with NCCL torch's
    watchdog acts as its own settings say. `max_payload_bytes` is the most that the tree of a message may have, and its
    tensors; more fails who waits for that peer, and who does so later, before memory is made for it. Raises ValueError
    for groups that will not do.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[str],
        *,
        device: torch.device | str = "cpu",
        back: dist.ProcessGroup | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        if len(members) != group.size():
            raise ValueError(f"got {len(members)} names, want {group.size()}, one a rank")
        self.name = members[group.rank()]
        self._device = torch.device(device)
        self._max_payload_bytes = max_payload_bytes
        if self._device.type == "cuda":
            if back is None:
                raise ValueError("got one group for a GPU, want a second one of the same ranks: give it as `back`")
            if any(getattr(found, "bound_device_id", None) is not None for found in (group, back)):
                raise ValueError("got a group that was made with a device_id, want one made without")
        self._group, self._back = group, group if back is None else back
        self._rank = group.rank()
        self._ranks = {name: rank for rank, name in enumerate(members)}
        self._mailbox = Mailbox()
        # Peers of whom nothing more is received, and what makes the error that says why: one that is raised again and
        # again would keep what each of its callers has.
        self._refused: dict[str, Callable[[], CommError]] = {}
        # One thread a peer and direction: a group's operations block the thread that waits for them.
        self._executor = LaneExecutor(2 * len(members), f"{self.name} process group")

    def isend(self, peer: str, tree: Tree, *, tag: str = "", timeout_s: float | None = None) -> "Future[None]":
        """Sends a tree; the future is done when the group has handed it over. Raises PayloadError at once.

        It waits for nobody, so that every `timeout_s` is enough.
        """
        rank = self._rank_of(peer)
        encoded = encode(tree, lift=lambda tensor: bool(tensor.device.type == self._device.type))
        tensors = [(_torch.code_of(tensor), tuple(tensor.shape)) for tensor in encoded.lifted]
        head = encode((tag, tensors)).to_bytes()
        ready = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        future: Future[None] = Future()
        self._executor.submit(("send", peer), partial(self._run_send, peer, rank, head, encoded, ready, future))
        return future

    def irecv(self, peer: str, *, tag: str = "") -> "Future[Tree]":
        """Returns the future of a peer's next tree with a tag, in the order sent. Cancelled, it takes none."""
        rank = self._rank_of(peer)
        future = self._mailbox.receive(peer, tag)
        self._executor.submit(("recv", peer), partial(self._receive_until, future, peer, rank))
        return future

    def close(self) -> None:
        """Ends the threads once they are idle; the process groups are their owner's. Does not block."""
        self._executor.close()

    def _rank_of(self, peer: str) -> int:
        if peer not in self._ranks:
            raise ValueError(f"got peer {peer!r}, want one of {', '.join(self._ranks)}")
        return self._ranks[peer]

    # On the lanes' threads.

    def _run_send(
        self,
        peer: str,
        rank: int,
        head: bytes,
        encoded: Encoded,
        ready: torch.cuda.Event | None,
        future: "Future[None]",
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with self._apart(ready):
                self._send(rank, head, encoded)
        except RuntimeError as error:
            future.set_exception(PeerLostError(peer, f"its process group gave up: {error}"))
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _send(self, rank: int, head: bytes, encoded: Encoded) -> None:
        group = self._group if self._rank < rank else self._back
        data = np.empty(len(head) + encoded.size_bytes, np.uint8)
        data[: len(head)] = np.frombuffer(head, np.uint8)
        encoded.write_into(data[len(head) :])
        sizes = torch.tensor([len(head), encoded.size_bytes])
        for tensor in (sizes, torch.from_numpy(data), *map(_torch.flat, encoded.lifted)):
            if tensor.numel():
                group.send([tensor.to(self._device)], rank, 0).wait()

    def _receive_until(self, future: "Future[Tree]", peer: str, rank: int) -> None:
        """Receives a peer's messages, for whomever they are, until this one is there."""
        while not future.done():
            if peer in self._refused:
                self._mailbox.fail(peer, self._refused[peer]())
                return
            try:
                with self._apart(None):
                    tag, data, lifted = self._recv(rank)
            except RuntimeError as error:
                # Part of the message is yet to come: taken for the next one it would make gloo end this process.
                self._refused[peer] = partial(PeerLostError, peer, f"its process group gave up: {error}")
            except CommError as error:
                self._refused[peer] = partial(PayloadError, str(error))
            else:
                self._deliver(peer, tag, data, lifted)

    def _deliver(self, peer: str, tag: str, data: Bytes, lifted: list[torch.Tensor]) -> None:
        try:
            self._mailbox.deliver(peer, tag, decode(data, lifted=lifted))
        except CommError as error:
            self._mailbox.fail(peer, error)

    def _recv(self, rank: int) -> tuple[str, Bytes, list[torch.Tensor]]:
        group = self._group if rank < self._rank else self._back

        def receive(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel():
                group.recv([tensor], rank, 0).wait()
            return tensor

        sizes = receive(torch.empty(2, dtype=torch.int64, device=self._device)).tolist()
        if min(sizes) < 0 or sum(sizes) > self._max_payload_bytes:
            raise PayloadError(f"got a message of {sizes} bytes, want 0 to {self._max_payload_bytes} in all")
        data = receive(torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)).cpu().numpy()
        tag, tensors = decode(data[: sizes[0]])
        beside = sum(_torch.item_size(code) * math.prod(shape) for code, shape in tensors)
        if beside > self._max_payload_bytes:
            raise PayloadError(f"got tensors of {beside} bytes, want at most {self._max_payload_bytes}")
        lifted = [_torch.empty(code, shape, self._device) for code, shape in tensors]
        for tensor in lifted:
            receive(_torch.flat(tensor))
            if tensor.is_cuda:
                # Made on a stream of ours: its memory is not to be used again before those who will read it are done.
                tensor.record_stream(torch.cuda.default_stream(self._device))
        return tag, data[sizes[0] :], lifted

    @contextlib.contextmanager
    def _apart(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """On a GPU, has what follows done on a stream of its own, after `ready`, and waits until it is done.

        On the default stream everything that the process computes would wait for the peer.
        """
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            yield
        stream.synchronize()
