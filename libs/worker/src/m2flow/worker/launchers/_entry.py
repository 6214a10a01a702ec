"""The first moments of an agent, which forks its zygote while it is still small, and of a rank that starts cold."""

import os
import signal
import socket
import sys

from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker.launchers._boot import Boot
from m2flow.worker.launchers._rank import run_process
from m2flow.worker.launchers._zygote import Zygote
from m2flow.worker.target import resolve_target


def run_agent() -> None:
    """Reads a `Boot` from standard input and serves one session. Blocks until it has ended and nothing is left."""
    boot = Boot.from_json(sys.stdin.readline())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ours, zygotes = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(boot.ready_fd)
        _be_zygote(boot, zygotes)
    zygotes.close()
    # By name, because gRPC starts threads and must not be there when the zygote is forked.
    resolve_target("m2flow.worker.launchers._agent:serve")(boot, ours)
    os.waitpid(pid, 0)


def run_cold_rank() -> None:
    """Reads a `Boot`, two descriptors and a `StartWorker` from standard input, and becomes that rank. Blocks.

    One descriptor is to be watched; the other, or -1, brings further ranks.
    """
    stdin = sys.stdin.buffer
    boot = Boot.from_json(stdin.readline().decode())
    life_fd, further_fd = map(int, stdin.readline().split())
    further = socket.socket(fileno=further_fd) if further_fd >= 0 else None
    order = pb.StartWorker.FromString(stdin.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(run_process(order, boot, [boot.liveness_fd, life_fd], further))


def _be_zygote(boot: Boot, agent: socket.socket) -> None:
    exit_code = 1
    try:
        Zygote(boot, agent).run()
        exit_code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(exit_code)
