"""What can go wrong with devices, placements, groups and workers.

WorkerError
├── PlacementError        a placement text or a placement that does not fit (also a ValueError)
├── LaunchError           a run, an agent or a group could not start
├── RefusedError          a launcher cannot do what was asked, by its nature
├── SessionClosedError    a call on a session or a group that has ended
├── CallCancelled         the result of a call that was given up before it started
├── CallTimeout           a wait that ran out (also a TimeoutError)
├── LockTimeout           a device lock that did not come in time (also a TimeoutError)
├── RewardFailed          an item that got no reward, where the pool's policy is to stop
├── MemoryRefused         bytes that do not fit on a device, with the account of who holds what
└── WorkerFailed          the first cause of a run's end: which rank, where, doing what, and why
"""


class WorkerError(Exception):
    """The root of this package's errors."""


class PlacementError(WorkerError, ValueError):
    """A placement that cannot be: the message shows the text, the place in it, and what would be right."""


class LaunchError(WorkerError):
    """A run, an agent or a group that could not start."""


class RefusedError(WorkerError):
    """What a launcher cannot do by its nature, such as a signal to a thread."""


class SessionClosedError(WorkerError):
    """A call on what has ended."""


class CallCancelled(WorkerError):
    """The result of a call that was given up before it started."""


class CallTimeout(WorkerError, TimeoutError):
    """A wait that ran out: it names the call, the ranks still missing and the seconds waited."""


class LockTimeout(WorkerError, TimeoutError):
    """A device lock that did not come in time: it names the holder."""


class RewardFailed(WorkerError):
    """An item that got no reward, where the policy is to stop: it says why."""


class MemoryRefused(WorkerError):
    """Bytes that do not fit on a device: the message holds the account of the device."""


class WorkerFailed(WorkerError):
    """Why a worker failed.

    Attributes: `group`, `rank`, `host`, `pid`, `phase` ("start", a method's name or "idle"), `cause` (the
    exception, the signal or the exit code, in words), `traceback` (empty where the process died without one),
    `last_log_lines`, and `time_s`, seconds since the epoch on that host's clock.
    """

    def __init__(
        self,
        *,
        group: str,
        rank: int,
        host: str,
        pid: int,
        phase: str,
        cause: str,
        traceback: str = "",
        last_log_lines: tuple[str, ...] = (),
        time_s: float = 0.0,
    ) -> None:
        self.group = group
        self.rank = rank
        self.host = host
        self.pid = pid
        self.phase = phase
        self.cause = cause
        self.traceback = traceback
        self.last_log_lines = last_log_lines
        self.time_s = time_s
        super().__init__(self._text())

    def _text(self) -> str:
        where = f"{self.group}.{self.rank} on {self.host} (pid {self.pid}), phase {self.phase!r}: {self.cause}"
        parts = [where]
        if self.traceback:
            parts.append(self.traceback.rstrip())
        if self.last_log_lines:
            parts.append("last log lines:")
            parts.extend(f"  {line}" for line in self.last_log_lines)
        return "\n".join(parts)
