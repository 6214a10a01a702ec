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

from m2flow.comm.errors import system_refuses
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._cause import failure_of
from m2flow.worker._python import MODULE
from m2flow.worker._warm import warm_class
from m2flow.worker.errors import LaunchError
from m2flow.worker.launchers._boot import Boot
from m2flow.worker.launchers._frames import FrameReader, send_frame
from m2flow.worker.launchers._rank import run_process

_CHUNK = 1 << 16


@dataclass
class _Child:
    """A process and its ranks; `further` brings it more of them, where it may hold several."""

    group: str
    ranks: list[int]
    pid: int
    pidfd: int
    log_fd: int
    further: socket.socket | None = None
    partial: bytes = b""
    stopping: set[int] = field(default_factory=set)
    kill_at: float = float("inf")


class Zygote:
    """The loop of the zygote."""

    def __init__(self, boot: Boot, agent: socket.socket) -> None:
        self._boot = boot
        self._agent = agent
        self._selector = selectors.DefaultSelector()
        self._orders = FrameReader(agent)
        self._children: dict[tuple[str, int], _Child] = {}
        # Those that may hold several ranks, by group and number.
        self._processes: dict[tuple[str, int], _Child] = {}
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
        frames = self._orders.read()
        if frames is None:
            raise _Gone
        for frame in frames:
            request = pb.SessionRequest.FromString(frame)
            kind = request.WhichOneof("kind")
            if kind == "start":
                self._start(request.start)
            elif kind == "stop":
                self._stop(request.stop)
            elif kind == "kill":
                child = self._children.get((request.kill.group, request.kill.rank))
                if child is not None:
                    os.kill(child.pid, signal.SIGKILL)

    def _stop(self, stop: pb.StopWorker) -> None:
        child = self._children.get((stop.group, stop.rank))
        if child is None:
            return
        child.stopping.add(stop.rank)
        # A rank that shares its process is asked first; when none is left in it, the process ends by itself.
        if stop.grace_s <= 0 or child.stopping.issuperset(child.ranks):
            child.kill_at = time.monotonic() + stop.grace_s

    def _start(self, order: pb.StartWorker) -> None:
        try:
            if self._boot.allow and order.target not in self._boot.allow:
                raise LaunchError(
                    f"got class {order.target}, want {' or '.join(self._boot.allow)}: what is served here"
                )
            warm_class(order.target)
        except BaseException as failure:
            self._refuse(order, failure)
            return
        try:
            self._children[order.group, order.rank] = self._shared(order) or self._new_process(order)
        except OSError as error:
            self._refuse(order, system_refuses("start a process", error))

    def _refuse(self, order: pb.StartWorker, failure: BaseException) -> None:
        self._say(failure_of(failure, order.group, order.rank, "start", attempt=order.attempt))
        self._say(pb.SessionResponse(stopped=pb.Stopped(exit_code=1, group=order.group, rank=order.rank)))

    def _shared(self, order: pb.StartWorker) -> _Child | None:
        """The process that the rank joins, told of it; None where there is none yet."""
        child = self._processes.get((order.group, order.process))
        if child is not None and child.further is not None:
            child.ranks.append(order.rank)
            with suppress(OSError):  # It has just ended: its exit is seen next, and is that of this rank too.
                send_frame(child.further, order)
        return child

    def _new_process(self, order: pb.StartWorker) -> _Child:
        log_read, log_write = os.pipe()
        ours, childs = socket.socketpair() if order.process else (None, None)
        sys.stdout.flush()
        sys.stderr.flush()
        # A fork copies one thread and every lock: where an import has started threads, ranks start cold instead.
        if len(os.listdir("/proc/self/task")) == 1:
            pid = self._fork(order, log_read, log_write, childs)
        else:
            pid = self._spawn(order, log_write, childs)
        os.close(log_write)
        os.set_blocking(log_read, False)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # Nobody would see its end.
            _kill_group(pid)
            os.waitpid(pid, 0)
            raise
        child = _Child(order.group, [order.rank], pid, pidfd, log_read, ours)
        if childs is not None:
            childs.close()
            self._processes[order.group, order.process] = child
        self._selector.register(child.log_fd, selectors.EVENT_READ, lambda: self._on_log(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_exit(child))
        return child

    def _fork(self, order: pb.StartWorker, log_read: int, log_write: int, further: socket.socket | None) -> int:
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            os.close(log_read)
            self._become(order, log_write, further)
        os.setpgid(pid, pid)
        return pid

    def _spawn(self, order: pb.StartWorker, log_write: int, further: socket.socket | None) -> int:
        further_fd = -1 if further is None else further.fileno()
        process = subprocess.Popen(
            [*MODULE, "rank"],
            stdin=subprocess.PIPE,
            stdout=log_write,
            stderr=log_write,
            pass_fds=[fd for fd in (self._boot.liveness_fd, self._life_read, further_fd) if fd >= 0],
            process_group=0,
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            head = f"{self._boot.to_json()}\n{self._life_read} {further_fd}\n"
            stdin.write(head.encode() + order.SerializeToString())
        # Its exit is seen and reaped here, as that of a forked one.
        process.returncode = 0
        return process.pid

    def _become(self, order: pb.StartWorker, log_fd: int, further: socket.socket | None) -> NoReturn:
        """The rest of a child's life. It never returns to the zygote's loop."""
        exit_code = 1
        try:
            for key in list(self._selector.get_map().values()):
                if key.fd != self._boot.liveness_fd:
                    os.close(key.fd)
            self._selector.close()
            for child in self._processes.values():
                if child.further is not None:
                    child.further.close()
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            os.close(log_fd)
            os.close(self._life_write)
            exit_code = run_process(order, self._boot, [self._boot.liveness_fd, self._life_read], further)
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
        self._say(pb.SessionResponse(log=pb.LogLine(group=child.group, rank=child.ranks[0], text=text)))

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
        if child.further is not None:
            child.further.close()
        self._processes = {key: other for key, other in self._processes.items() if other is not child}
        for rank in child.ranks:
            del self._children[child.group, rank]
            self._say(pb.SessionResponse(stopped=pb.Stopped(exit_code=exit_code, group=child.group, rank=rank)))

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
        for pid in {child.pid for child in self._children.values()}:
            os.waitpid(pid, 0)
        if self._boot.owns_directory:
            shutil.rmtree(self._boot.directory, ignore_errors=True)


class _Gone(Exception):
    """The agent or the driver has gone."""


def _kill_group(pid: int) -> None:
    """Kills a worker and what it started, as far as that stayed in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
