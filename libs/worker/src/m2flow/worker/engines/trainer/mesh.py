"""The ranks of a group, joined by torch's own collectives."""

import socket
import threading
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from m2flow.worker.context import WorkerContext
from m2flow.worker.errors import RefusedError

_TAG = "m2flow.mesh"

# Held from the first rank of this process that joins a mesh, for good.
_UNJOINED = threading.Lock()


def join_ranks(context: WorkerContext, *, timeout_s: float = 60.0) -> DeviceMesh | None:
    """A mesh of all ranks of the worker's group; None where it is one. To be called in `setup` by every rank. Blocks.

    Rank 0 says where the others find it. CPU ranks are joined by gloo, CUDA ranks by NCCL. Raises RefusedError in a
    process that is a rank of a mesh already: threads cannot be ranks of one.
    """
    if context.world_size == 1:
        return None
    if not _UNJOINED.acquire(blocking=False):
        raise RefusedError(
            f"{context.group}.{context.rank}: this process is a rank of a mesh already, and a sharded group needs a "
            "process per rank: use the launcher process or ray, and ranks_per_process=1"
        )
    limit = timedelta(seconds=timeout_s)
    if context.rank == 0:
        host = _own_address()
        store = TCPStore(host, 0, context.world_size, True, limit, wait_for_workers=False)
        for rank in range(1, context.world_size):
            context.endpoint.isend(f"{context.group}.{rank}", [host, store.port], tag=_TAG)
    else:
        host, port = context.endpoint.recv(f"{context.group}.0", tag=_TAG, timeout_s=timeout_s)
        store = TCPStore(host, port, context.world_size, False, limit)
    on_cuda = context.devices[0].kind == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=limit
    )
    return init_device_mesh("cuda" if on_cuda else "cpu", (context.world_size,))


def _own_address() -> str:
    """The address by which this host's name is known, as gloo itself chooses it."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
