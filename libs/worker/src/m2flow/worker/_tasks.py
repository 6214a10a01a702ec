"""Tasks for a function in processes that can be killed: the frames, and the template that forks and watches them.

The template has one thread. It reads tasks from standard input and writes answers to standard output; each of its
children has a socket to it, runs one task at a time, and is killed and replaced when a task's time is up.
"""

import ctypes
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, BinaryIO, NoReturn

from m2flow.comm import decode, encode
from m2flow.worker._cause import cause_of, exit_in_words
from m2flow.worker.target import resolve_target

Stream = IO[bytes] | socket.SocketIO

_TASK = struct.Struct("<QdQ")
_ANSWER = struct.Struct("<QBQ")
_PR_SET_PDEATHSIG = 1
KINDS = ("done", "errors", "timeouts", "deaths")


@dataclass(frozen=True)
class Task:
    """One call: its number, the seconds that it has, its encoded arguments."""

    number: int
    timeout_s: float
    arguments: bytes


@dataclass(frozen=True)
class Answer:
    """What came of a task: "done" with the encoded result, or "errors", "timeouts" or "deaths" with why."""

    number: int
    kind: str
    value: bytes


def write_task(stream: Stream, task: Task) -> None:
    """Writes a frame. Blocks while the pipe is full."""
    _write(stream, _TASK.pack(task.number, task.timeout_s, len(task.arguments)) + task.arguments)


def read_task(stream: Stream) -> Task | None:
    """The next task, or None at the end. Blocks."""
    head = _read(stream, _TASK.size)
    if len(head) < _TASK.size:
        return None
    number, timeout_s, size = _TASK.unpack(head)
    return Task(number, timeout_s, _read(stream, size))


def write_answer(stream: Stream, answer: Answer) -> None:
    """Writes a frame. Blocks while the pipe is full."""
    _write(stream, _ANSWER.pack(answer.number, KINDS.index(answer.kind), len(answer.value)) + answer.value)


def read_answer(stream: Stream) -> Answer | None:
    """The next answer, or None at the end. Blocks."""
    head = _read(stream, _ANSWER.size)
    if len(head) < _ANSWER.size:
        return None
    number, kind, size = _ANSWER.unpack(head)
    return Answer(number, KINDS[kind], _read(stream, size))


def _write(stream: Stream, frame: bytes) -> None:
    rest = memoryview(frame)
    while rest:
        rest = rest[stream.write(rest) :]
    stream.flush()


def _read(stream: Stream, size: int) -> bytes:
    """So many bytes, or fewer at the end. It reads no further, so that a selector sees what is left."""
    parts = bytearray()
    with suppress(ConnectionError):  # An end as any other: a process was killed with something unread.
        while len(parts) < size and (part := stream.read(size - len(parts))):
            parts += part
    return bytes(parts)


@dataclass
class _Child:
    pid: int
    stream: socket.SocketIO
    task: Task | None = None
    due_s: float = float("inf")


class Template:
    """The parent of the processes that run `target`."""

    def __init__(self, target: str, num_processes: int, tasks: BinaryIO, answers: BinaryIO) -> None:
        self._run_task = resolve_target(target)
        self._tasks = tasks
        self._answers = answers
        self._selector = selectors.DefaultSelector()
        self._queue: deque[Task] = deque()
        self._children: list[_Child] = []
        for _ in range(num_processes):
            self._fork()

    def run(self) -> None:
        """Serves until the tasks end; kills what runs then. Blocks."""
        self._selector.register(self._tasks, selectors.EVENT_READ, None)
        try:
            while True:
                self._hand_out()
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        task = read_task(self._tasks)
                        if task is None:
                            return
                        self._queue.append(task)
                    else:
                        self._hear(key.data)
                self._end_overdue()
        finally:
            for child in self._children:
                self._reap(child)

    def _patience(self) -> float | None:
        due_s = min((child.due_s for child in self._children), default=float("inf"))
        return None if due_s == float("inf") else max(0.0, due_s - time.monotonic())

    def _hand_out(self) -> None:
        for child in self._children:
            if child.task is None and self._queue:
                child.task = self._queue.popleft()
                child.due_s = time.monotonic() + child.task.timeout_s
                with suppress(BrokenPipeError):  # It has died: its end-of-file is read next.
                    write_task(child.stream, child.task)

    def _hear(self, child: _Child) -> None:
        answer = read_answer(child.stream)
        if answer is not None:
            child.task, child.due_s = None, float("inf")
            write_answer(self._answers, answer)
            return
        self._replace(child, "deaths", f"the process ended: {self._reap(child)}")

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for child in [child for child in self._children if child.due_s <= now]:
            assert child.task is not None
            self._reap(child)
            self._replace(child, "timeouts", f"took longer than {child.task.timeout_s} s")

    def _replace(self, child: _Child, kind: str, why: str) -> None:
        self._selector.unregister(child.stream)
        child.stream.close()
        self._children.remove(child)
        if child.task is not None:
            write_answer(self._answers, Answer(child.task.number, kind, why.encode()))
        self._fork()

    def _reap(self, child: _Child) -> str:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return exit_in_words(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become(theirs)
        os.setpgid(pid, pid)
        theirs.close()
        child = _Child(pid, ours.makefile("rwb", buffering=0))
        ours.close()
        self._children.append(child)
        self._selector.register(child.stream, selectors.EVENT_READ, child)

    def _become(self, template: socket.socket) -> NoReturn:
        exit_code = 1
        try:
            # Only the template may hold the ends of the others: each must read end-of-file when it dies.
            for child in self._children:
                os.close(child.stream.fileno())
            self._selector.close()
            _die_with_parent()
            os.close(self._tasks.fileno())
            os.close(self._answers.fileno())
            stream = template.makefile("rwb", buffering=0)
            pid = os.getpid()
            while (task := read_task(stream)) is not None:
                answer = self._answer(task)
                if os.getpid() != pid:
                    break  # The function has forked, and this is the copy.
                write_answer(stream, answer)
            exit_code = 0
        finally:
            os._exit(exit_code)

    def _answer(self, task: Task) -> Answer:
        try:
            value = encode(self._run_task(*decode(task.arguments))).to_bytes()
        except Exception as failure:
            return Answer(task.number, "errors", cause_of(failure).encode())
        return Answer(task.number, "done", value)


def _die_with_parent() -> None:
    # The kernel's signal follows the thread that forked, and the template has but one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_tasks(target: str, num_processes: int) -> None:
    """Serves standard input and output until the former ends. What the function prints goes to standard error."""
    tasks, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # Line by line: what is killed has been heard.
    with suppress(BrokenPipeError):  # Nobody hears the answers any more.
        Template(target, num_processes, tasks, answers).run()
