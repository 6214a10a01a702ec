"""The ranks of a group, joined by torch's own collectives."""

import threading
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from m2flow.worker._meeting import hear, say
from m2flow.worker.context import WorkerContext
from m2flow.worker.errors import RefusedError

# Held from the first rank of this process that joins a mesh, for good.
_UNJOINED = threading.Lock()


def join_ranks(context: WorkerContext, *, timeout_s: float = 60.0) -> DeviceMesh | None:
    """A mesh of all ranks of the worker's group; None where it is one. To be called in `setup` by every rank. Blocks.

    CPU ranks are joined by gloo, CUDA ranks by NCCL; between machines, either may have to be told which interface to
    use (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME). Raises RefusedError in a process that is a rank of a mesh already:
    threads cannot be ranks of one.
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
        host = context.host or "127.0.0.1"
        store = TCPStore(host, 0, context.world_size, True, limit, wait_for_workers=False)
        for rank in range(1, context.world_size):
            say(context.endpoint, f"{context.group}.{rank}", [host, store.port])
    else:
        host, port = hear(context.endpoint, f"{context.group}.{context.rank}", timeout_s=timeout_s)
        store = TCPStore(host, port, context.world_size, False, limit)
    on_cuda = context.devices[0].kind == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=limit
    )
    return init_device_mesh("cuda" if on_cuda else "cpu", (context.world_size,))
