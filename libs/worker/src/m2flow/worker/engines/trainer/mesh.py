"""The ranks of a group, joined by torch's own collectives."""

import os
import socket
import tempfile
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from m2flow.worker._meeting import hear, say
from m2flow.worker.context import WorkerContext
from m2flow.worker.errors import RefusedError

# Held from the first rank of this process that joins a mesh, for good.
_UNJOINED = threading.Lock()
_LOOPBACK = "lo"


def join_ranks(context: WorkerContext, *, timeout_s: float = 60.0) -> DeviceMesh | None:
    """A mesh of all ranks of the worker's group; None where it is one. To be called in `setup` by every rank. Blocks.

    CPU ranks are joined by gloo, CUDA ranks by NCCL. In a run of one machine they meet in a file of the run's private
    directory and listen on its loopback interface alone. Between machines rank 0 listens at its host's address, either
    may have to be told which interface to use (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and none of them asks for a
    token: such a run belongs on a network that you trust. Raises RefusedError in a process that is a rank of a mesh
    already: threads cannot be ranks of one.
    """
    if context.world_size == 1:
        return None
    if not _UNJOINED.acquire(blocking=False):
        raise RefusedError(
            f"{context.group}.{context.rank}: this process is a rank of a mesh already, and a sharded group needs a "
            "process per rank: use the launcher process or ray, and ranks_per_process=1"
        )
    on_cuda = context.devices[0].kind == "cuda"
    if not context.host:
        # For the groups that torch makes later too.
        os.environ.setdefault("NCCL_SOCKET_IFNAME" if on_cuda else "GLOO_SOCKET_IFNAME", _LOOPBACK)
    limit = timedelta(seconds=timeout_s)
    join_store = _join_tcp_store if context.host else _join_file_store
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=join_store(context, limit),
        rank=context.rank,
        world_size=context.world_size,
        timeout=limit,
    )
    return init_device_mesh("cuda" if on_cuda else "cpu", (context.world_size,))


def _join_file_store(context: WorkerContext, limit: timedelta) -> Store:
    if context.rank == 0:
        descriptor, path = tempfile.mkstemp(dir=context.endpoint.directory, prefix=f"{context.group}.")
        os.close(descriptor)
        _tell_others(context, path)
    else:
        path = _hear_first(context, limit)
    store = FileStore(path, context.world_size)
    store.set_timeout(limit)
    return store


def _join_tcp_store(context: WorkerContext, limit: timedelta) -> Store:
    if context.rank > 0:
        host, port = _hear_first(context, limit)
        return TCPStore(host, port, context.world_size, False, limit)
    # By itself it would listen on all interfaces.
    family, *_, address = socket.getaddrinfo(context.host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        context.host,
        port,
        context.world_size,
        True,
        limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    _tell_others(context, [context.host, port])
    return store


def _tell_others(context: WorkerContext, place: Any) -> None:
    for rank in range(1, context.world_size):
        say(context.endpoint, f"{context.group}.{rank}", place)


def _hear_first(context: WorkerContext, limit: timedelta) -> Any:
    return hear(context.endpoint, f"{context.group}.{context.rank}", timeout_s=limit.total_seconds())
