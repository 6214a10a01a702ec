"""Starts an agent process of this machine, and ends it: by request, or by its own death."""

import os
import select
import subprocess
import weakref

from m2flow.worker._python import MODULE, child_environment
from m2flow.worker.errors import LaunchError
from m2flow.worker.launchers._boot import AgentOptions, Boot

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0


class AgentProcess:
    """An agent, in a session of its own so that Ctrl-C is for its parent alone. It ends when this process does."""

    def __init__(self, options: AgentOptions) -> None:
        liveness_read, self._liveness = os.pipe()
        _ALIVE.add(self)
        ready_read, ready_write = os.pipe()
        boot = Boot(**vars(options), liveness_fd=liveness_read, ready_fd=ready_write)
        self._process = subprocess.Popen(
            [*MODULE, "agent"],
            stdin=subprocess.PIPE,
            pass_fds=(liveness_read, ready_write),
            start_new_session=True,
            env=child_environment(),
        )
        os.close(liveness_read)
        os.close(ready_write)
        try:
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(boot.to_json().encode() + b"\n")
            self.address = _await_ready(ready_read)
        except BaseException:
            self.end()
            raise
        finally:
            os.close(ready_read)

    @property
    def pid(self) -> int:
        """Its process, and the session of all that it starts."""
        return self._process.pid

    def wait(self) -> None:
        """Blocks until it has ended."""
        self._process.wait()

    def end(self) -> None:
        """Lets it end, as it does by itself when its parent dies. Blocks until it has."""
        self.forget_liveness()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget_liveness(self) -> None:
        """Closes this process's end of the pipe by which the agent sees it live."""
        if self._liveness >= 0:
            os.close(self._liveness)
            self._liveness = -1


_ALIVE: "weakref.WeakSet[AgentProcess]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for agent in list(_ALIVE):
        agent.forget_liveness()


# A child that other code forks from this process must not keep its agents alive.
os.register_at_fork(after_in_child=_forget_in_child)


def _await_ready(ready_fd: int) -> str:
    ready = select.poll()  # Unlike select, of files beyond the first 1,024 too.
    ready.register(ready_fd, select.POLLIN)
    if not ready.poll(_START_TIMEOUT_S * 1000):
        raise LaunchError(f"agent: did not listen within {_START_TIMEOUT_S} s")
    address = os.read(ready_fd, 4096).decode()
    if not address:
        raise LaunchError("agent: it ended before it listened; its own words are on standard error")
    return address
