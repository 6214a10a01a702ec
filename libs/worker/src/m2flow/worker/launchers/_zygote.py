"""The parent of all worker processes of a node: it imports what they need, forks them warm, and watches them.

It has one thread and no gRPC, so that a fork copies a simple process; where a worker's module starts threads when it
is imported, ranks start as processes of their own instead, slower. It is also the last to leave: when its agent or
the driver has gone it kills what is left, reaps it, and removes the run's private directory.

It reads `SessionRequest`s (start, stop, kill) from its agent and answers with `SessionResponse`s: a log line that a
worker printed, a failure to import, or `Stopped` with the exit code of a process that the kernel saw end.
"""

import gc
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import NoReturn

from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._cause import failure_of
from m2flow.worker._python import MODULE
from m2flow.worker.errors import LaunchError
from m2flow.worker.launchers._boot import Boot
from m2flow.worker.launchers._frames import receive_frame, send_frame
from m2flow.worker.launchers._rank import run_rank

_CHUNK = 1 << 16


@dataclass
class _Child:
    group: str
    rank: int
    pid: int
    pidfd: int
    log_fd: int
    partial: bytes = b""
    kill_at: float = field(default=float("inf"))


class Zygote:
    """The loop of the zygote."""

    def __init__(self, boot: Boot, agent: socket.socket) -> None:
        self._boot = boot
        self._agent = agent
        self._selector = selectors.DefaultSelector()
        self._children: dict[tuple[str, int], _Child] = {}
        # Only this process holds the writing end: its children read end-of-file when it dies.
        self._life_read, self._life_write = os.pipe()

    def run(self) -> None:
        """Serves until the agent or the driver has gone. Blocks."""
        self._selector.register(self._agent, selectors.EVENT_READ, self._on_agent)
        self._selector.register(self._boot.liveness_fd, selectors.EVENT_READ, self._on_liveness)
        for module in self._boot.preload:
            import_module(module)
        try:
            while True:
                for key, _ in self._selector.select(self._patience()):
                    # An exit earlier in this round may have taken this one's descriptors with it.
                    if self._selector.get_map().get(key.fd) == key:
                        key.data()
                self._kill_overdue()
        except _Gone:
            pass
        finally:
            self._leave()

    def _patience(self) -> float | None:
        due = min((child.kill_at for child in self._children.values()), default=float("inf"))
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _on_liveness(self) -> None:
        if not os.read(self._boot.liveness_fd, 1):
            raise _Gone

    def _on_agent(self) -> None:
        request = receive_frame(self._agent, pb.SessionRequest)
        if request is None:
            raise _Gone
        kind = request.WhichOneof("kind")
        if kind == "start":
            self._start(request.start)
        elif kind == "stop":
            child = self._children.get((request.stop.group, request.stop.rank))
            if child is not None:
                child.kill_at = time.monotonic() + request.stop.grace_s
        elif kind == "kill":
            child = self._children.get((request.kill.group, request.kill.rank))
            if child is not None:
                os.kill(child.pid, signal.SIGKILL)

    def _start(self, order: pb.StartWorker) -> None:
        try:
            if self._boot.allow and order.target not in self._boot.allow:
                raise LaunchError(
                    f"got class {order.target}, want {' or '.join(self._boot.allow)}: what is served here"
                )
            import_module(order.target.partition(":")[0])
        except BaseException as failure:
            self._say(failure_of(failure, order.group, order.rank, "start", 0))
            self._say(pb.SessionResponse(stopped=pb.Stopped(exit_code=1, group=order.group, rank=order.rank)))
            return
        log_read, log_write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A fork copies one thread and every lock: where an import has started threads, ranks start cold instead.
        if len(os.listdir("/proc/self/task")) == 1:
            pid = self._fork(order, log_read, log_write)
        else:
            pid = self._spawn(order, log_write)
        os.close(log_write)
        os.set_blocking(log_read, False)
        child = _Child(order.group, order.rank, pid, os.pidfd_open(pid), log_read)
        self._children[order.group, order.rank] = child
        self._selector.register(child.log_fd, selectors.EVENT_READ, lambda: self._on_log(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_exit(child))

    def _fork(self, order: pb.StartWorker, log_read: int, log_write: int) -> int:
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            os.close(log_read)
            self._become(order, log_write)
        os.setpgid(pid, pid)
        return pid

    def _spawn(self, order: pb.StartWorker, log_write: int) -> int:
        process = subprocess.Popen(
            [*MODULE, "rank"],
            stdin=subprocess.PIPE,
            stdout=log_write,
            stderr=log_write,
            pass_fds=(self._boot.liveness_fd, self._life_read),
            process_group=0,
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(f"{self._boot.to_json()}\n{self._life_read}\n".encode() + order.SerializeToString())
        # Its exit is seen and reaped here, as that of a forked one.
        process.returncode = 0
        return process.pid

    def _become(self, order: pb.StartWorker, log_fd: int) -> NoReturn:
        """The rest of a child's life. It never returns to the zygote's loop."""
        exit_code = 1
        try:
            for key in list(self._selector.get_map().values()):
                if key.fd != self._boot.liveness_fd:
                    os.close(key.fd)
            self._selector.close()
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            os.close(log_fd)
            os.close(self._life_write)
            exit_code = run_rank(order, self._boot, [self._boot.liveness_fd, self._life_read])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)

    def _on_log(self, child: _Child) -> bool:
        try:
            text = os.read(child.log_fd, _CHUNK)
        except BlockingIOError:
            return False
        if not text:
            self._selector.unregister(child.log_fd)
            return False
        *lines, child.partial = (child.partial + text).split(b"\n")
        for line in lines:
            self._say_line(child, line)
        return True

    def _say_line(self, child: _Child, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._say(pb.SessionResponse(log=pb.LogLine(group=child.group, rank=child.rank, text=text)))

    def _on_exit(self, child: _Child) -> None:
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        _kill_group(child.pid)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        if child.log_fd in self._selector.get_map():
            while self._on_log(child):
                pass
        if child.log_fd in self._selector.get_map():
            self._selector.unregister(child.log_fd)
        if child.partial:
            self._say_line(child, child.partial)
        os.close(child.log_fd)
        del self._children[child.group, child.rank]
        self._say(
            pb.SessionResponse(stopped=pb.Stopped(exit_code=exit_code, group=child.group, rank=child.rank)),
        )

    def _say(self, response: pb.SessionResponse) -> None:
        try:
            send_frame(self._agent, response)
        except OSError as failure:
            raise _Gone from failure

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.kill_at <= now:
                child.kill_at = float("inf")
                _kill_group(child.pid)

    def _leave(self) -> None:
        for child in self._children.values():
            _kill_group(child.pid)
        for child in self._children.values():
            os.waitpid(child.pid, 0)
        if self._boot.owns_directory:
            shutil.rmtree(self._boot.directory, ignore_errors=True)


class _Gone(Exception):
    """The agent or the driver has gone."""


def _kill_group(pid: int) -> None:
    """Kills a worker and what it started, as far as that stayed in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
