"""What a worker knows about itself: its place in the group, its devices, its timers."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from m2flow.comm import Endpoint
from m2flow.worker.device import Device


class _Timers(threading.local):
    """The timers of each thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}


def _nothing() -> None:
    pass


@dataclass
class WorkerContext:
    """Set on a worker before `setup()`.

    `endpoint` is this rank's presence in the run's fabric, named "group.rank". `turn` is held while one of the
    worker's own methods runs; an attached object takes it to run the worker's stages.
    `open_endpoint` opens another, of another name, for who closes it. `host` is where other machines reach this one,
    empty in a run of one machine.
    `attempt` counts how often this rank was started before. `torch_threads` is how many threads torch gets; 0: one a
    core. A stage calls `safe_point` between two steps of its work, where its weights may be changed: flow does so where
    newer ones have come and the plan lets samples be stale.
    """

    group: str
    rank: int
    world_size: int
    devices: tuple[Device, ...]
    endpoint: Endpoint
    run_dir: Path
    open_endpoint: Callable[[str], Endpoint]
    host: str = ""
    attempt: int = 0
    torch_threads: int = 0
    safe_point: Callable[[], None] = _nothing
    turn: threading.RLock = field(default_factory=threading.RLock)
    _timers: _Timers = field(default_factory=_Timers)

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The global ids of its devices."""
        return tuple(device.id for device in self.devices)

    def match_torch_threads(self) -> None:
        """Gives torch as many threads as the worker has cores, or `torch_threads`, for work of the calling thread.

        MKL keeps the number by thread: on a thread that was never told, a small product is shared with threads that
        have no core to run on, and waits for them, for ten milliseconds. Nothing here imports torch.
        """
        torch = sys.modules.get("torch")
        num_threads = self.torch_threads or sum(len(device.cores) for device in self.devices)
        if torch is not None and num_threads:
            torch.set_num_threads(num_threads)

    def compute_in_one_thread(self) -> None:
        """One torch thread from now on, on every thread: a sum's bits then do not depend on the number of cores."""
        self.torch_threads = 1
        self.match_torch_threads()

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the seconds of a block to the timer `name` of the call that runs on this thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            timers = self._timers.seconds
            timers[name] = timers.get(name, 0.0) + time.perf_counter() - start

    def take_timers(self) -> dict[str, float]:
        """The timers of this thread since they were last taken, in seconds."""
        timers, self._timers.seconds = self._timers.seconds, {}
        return timers
