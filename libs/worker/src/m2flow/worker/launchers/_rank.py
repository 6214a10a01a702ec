"""The life of a worker process that holds one rank, from just after the fork to its exit code."""

import contextlib
import faulthandler
import os
import select
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from m2flow.comm import Endpoint
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._host import RankHost
from m2flow.worker.launchers._boot import Boot
from m2flow.worker.launchers._control import ControlClient


def run_rank(order: pb.StartWorker, boot: Boot, life_fds: Sequence[int]) -> int:
    """Runs one rank on this thread until it is stopped; the exit code. Blocks.

    The process dies when one of `life_fds` reads end-of-file: the other end is the driver, or the zygote.
    """
    threading.Thread(target=_die_with, args=(life_fds,), name="liveness", daemon=True).start()
    faulthandler.enable()
    _name_process(f"{order.group}.{order.rank}")
    os.environ.update(order.environment)
    _bind_cores(order)
    endpoint = Endpoint(boot.path, f"{order.group}.{order.rank}", token=boot.token)
    control = ControlClient(str(boot.control), boot.token, order.group, order.rank)
    host = RankHost(order, endpoint, control.report)
    control.listen(host.handle)
    try:
        return 0 if host.run() else 1
    finally:
        endpoint.close()


def _name_process(name: str) -> None:
    """Lets ps and top show which rank a process is; Linux keeps the first 15 bytes."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/self/comm").write_text(name[:15])


def _bind_cores(order: pb.StartWorker) -> None:
    cores = {core for device in order.devices for core in device.cores}
    if cores:
        os.sched_setaffinity(0, cores)


def _die_with(life_fds: Sequence[int]) -> None:
    select.select(life_fds, [], [])
    os.kill(os.getpid(), signal.SIGKILL)
