"""A few daemon threads that run handlers, in order for each sender.

Jobs of one lane run one after another, in the order they came; lanes run beside each other. Threads are started when
there is work for them, and none exists before the first job.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

_log = logging.getLogger("m2flow.comm")


class LaneExecutor:
    """At most `max_threads` threads. Thread-safe."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._lanes: dict[Hashable, deque[Callable[[], None]]] = {}
        self._ready: deque[Hashable] = deque()
        self._work = threading.Condition()
        self._num_threads = 0
        self._num_idle = 0
        self._closed = False

    def submit(self, lane: Hashable, job: Callable[[], None]) -> None:
        """Runs a job after the earlier ones of its lane. Does not block; does nothing once closed."""
        with self._work:
            if self._closed:
                return
            jobs = self._lanes.get(lane)
            if jobs is not None:
                jobs.append(job)
                return
            self._lanes[lane] = deque([job])
            self._ready.append(lane)
            if self._num_idle >= len(self._ready):
                self._work.notify()
            elif self._num_threads < self._max_threads:
                self._num_threads += 1
                name = f"m2flow-comm {self._name} {self._num_threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        """Lets running jobs end and drops the rest. Does not wait for them."""
        with self._work:
            self._closed = True
            self._lanes.clear()
            self._ready.clear()
            self._work.notify_all()

    def _run(self) -> None:
        # Nothing of a job or its lane is kept while the thread waits for the next: it may hold much memory.
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        lane = self._next_lane()
        if lane is not None:
            self._run_first(lane)
            self._finish(lane)
        return lane is not None

    def _run_first(self, lane: Hashable) -> None:
        with self._work:
            jobs = self._lanes.get(lane)
            if not jobs:
                return
            job = jobs[0]
        try:
            job()
        except BaseException:
            # Handlers' errors are answered to their caller; what arrives here is our own defect, or a callback's.
            _log.exception("m2flow.comm: a job failed")

    def _next_lane(self) -> Hashable | None:
        with self._work:
            self._num_idle += 1
            while not self._ready and not self._closed:
                self._work.wait()
            self._num_idle -= 1
            return None if self._closed else self._ready.popleft()

    def _finish(self, lane: Hashable) -> None:
        with self._work:
            jobs = self._lanes.get(lane)
            if not jobs:
                return
            jobs.popleft()
            if jobs:
                self._ready.append(lane)
            else:
                del self._lanes[lane]
