"""The life of a worker process, which holds one rank or many, from just after the fork to its exit code.

One rank runs on the process's main thread. Many run on a thread each, and the main thread waits for further ones: a
rank that joins a process that runs is told to it by the zygote, over a socket of theirs.
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from m2flow.comm import Endpoint
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._host import RankHost, deliver
from m2flow.worker._node import addressees
from m2flow.worker.launchers._boot import Boot
from m2flow.worker.launchers._control import ControlClient
from m2flow.worker.launchers._frames import FrameReader


def run_process(order: pb.StartWorker, boot: Boot, life_fds: Sequence[int], further: socket.socket | None) -> int:
    """Runs a rank, and those that `further` brings, until all have been stopped; the exit code. Blocks.

    The process dies when one of `life_fds` reads end-of-file: the other end is the driver, or the zygote.
    """
    threading.Thread(target=_die_with, args=(life_fds,), name="liveness", daemon=True).start()
    faulthandler.enable()
    _name_process(f"{order.group}.{order.rank}")
    if further is None:
        _bind(order)
    ranks = _Ranks(boot)
    if further is None:
        ranks.run(order)
    else:
        ranks.serve(order, further)
    ranks.control.flush()
    return 1 if ranks.failed else 0


class _Ranks:
    """The ranks of this process, all of one group."""

    def __init__(self, boot: Boot) -> None:
        self.control = ControlClient(str(boot.control), boot.token)
        self.failed = False
        self._boot = boot
        self._hosts: dict[int, RankHost] = {}
        self._running: set[int] = set()
        self._mutex = threading.Lock()
        self.control.listen(self._hear)

    def run(self, order: pb.StartWorker) -> None:
        """Runs a rank on this thread until it is stopped. Blocks."""
        open_endpoint = partial(Endpoint, self._boot.path, token=order.token or self._boot.token)
        host = self._hosts[order.rank] = RankHost(order, open_endpoint, self.control)
        self.control.enter(order.group, order.rank)
        self.failed |= not host.run()

    def serve(self, order: pb.StartWorker, further: socket.socket) -> None:
        """Runs ranks on threads of their own until the last has been stopped. Blocks."""
        incoming = FrameReader(further)
        self._start(order, further)
        while (frames := incoming.read()) is not None:
            for frame in frames:
                self._start(pb.StartWorker.FromString(frame), further)

    def _start(self, order: pb.StartWorker, further: socket.socket) -> None:
        def live() -> None:
            try:
                _bind(order)
                self.run(order)
            except BaseException:  # None of the worker's: the zygote reports the end of the process.
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            with self._mutex:
                self._running.discard(order.rank)
                if not self._running:
                    further.shutdown(socket.SHUT_RD)

        with self._mutex:
            self._running.add(order.rank)
        threading.Thread(target=live, name=f"{order.group}.{order.rank}", daemon=True).start()

    def _hear(self, request: pb.SessionRequest) -> None:
        # What comes to the process of one rank is for that rank: a list of all ranks is long to look through.
        ranks = self._hosts if len(self._hosts) == 1 else [rank for _, rank in addressees(request)]
        deliver(request, [self._hosts[rank] for rank in ranks if rank in self._hosts])


def _name_process(name: str) -> None:
    """Lets ps and top show which rank a process is; Linux keeps the first 15 bytes."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/self/comm").write_text(name[:15])


def _bind(order: pb.StartWorker) -> None:
    """Gives this thread, and those that it starts, the cores of the rank; the process the rest of what it has."""
    os.environ.update(order.environment)
    cores = {core for device in order.devices for core in device.cores}
    if cores:
        os.sched_setaffinity(0, cores)


def _die_with(life_fds: Sequence[int]) -> None:
    ends = select.poll()  # Unlike select, of files beyond the first 1,024 too.
    for descriptor in life_fds:
        ends.register(descriptor, select.POLLIN)
    ends.poll()
    os.kill(os.getpid(), signal.SIGKILL)
