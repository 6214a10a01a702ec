"""One rank's presence on its devices: whose turn it is, what is loaded, and which weights it has.

Nobody keeps a turn while it waits: a turn is asked for with a chunk in hand, and given up when there is no next one, or
when the outputs find no room. So whoever holds devices can go on, and nobody waits for ever.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from m2flow.flow._orphans import Orphans
from m2flow.flow._outlet import Tally
from m2flow.flow._quota import QuotaMaker
from m2flow.flow._residence import Residence
from m2flow.flow._safe_points import SafePoints
from m2flow.flow._spans import Recorder
from m2flow.flow.errors import RunStopped
from m2flow.flow.microflow import DRIVER, MicroGroup, MicroStage
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import DeviceLock, Worker, WorkerContext


class Unit:
    """Shared by the stage loops of one rank."""

    def __init__(self, worker: Worker, context: WorkerContext, recorder: Recorder) -> None:
        self.worker = worker
        self.context = context
        self.recorder = recorder
        self.tally = Tally()
        self.quotas = QuotaMaker(context.endpoint)
        self.sender = ThreadPoolExecutor(64, thread_name_prefix="flow:sender")
        self.residence = Residence(worker, context, recorder)
        self.orphans = Orphans()
        self.safe_points = SafePoints()
        context.safe_point = self.safe_points.reach
        self._lock = DeviceLock(context.endpoint, host=DRIVER)
        self._weights = threading.Condition()
        self._versions: dict[str, int] = {}
        self._stopped = False

    def enter(self, stage: MicroStage, group: MicroGroup, iteration: int) -> ExitStack:
        """Takes the devices for a stage and loads the worker; close the result to leave. Blocks until its turn."""
        turn = ExitStack()
        if not stage.locked:
            return turn
        owner, devices = group.unit(self.context.rank)
        with self.recorder.span(pb.SPAN_KIND_WAIT_LOCK, stage.name, iteration):
            turn.enter_context(self._lock.turn(owner, devices, (iteration, stage.position)))
        turn.enter_context(self.residence.within(stage.name, iteration, offload=group.offload))
        return turn

    @contextmanager
    def running(self, stage: str, iteration: int) -> Iterator[pb.Span]:
        """Holds the worker, whose methods run one at a time, and records that it is busy."""
        if not self.context.turn.acquire(blocking=False):
            with self.recorder.span(pb.SPAN_KIND_WAIT_LOCK, stage, iteration):
                self.context.turn.acquire()
        try:
            with self.recorder.span(pb.SPAN_KIND_BUSY, stage, iteration) as span:
                yield span
        finally:
            self.context.turn.release()

    def await_weights(self, stage: str, iteration: int, version: int) -> None:
        """Waits until the worker has weights of `version` or later. Raises RunStopped at the end of the run."""
        with self._weights:
            if self.version < version:
                with self.recorder.span(pb.SPAN_KIND_WAIT_WEIGHTS, stage, iteration):
                    self._weights.wait_for(lambda: self.version >= version or self._stopped)
            if self._stopped:
                raise RunStopped(f"{stage}: the run was stopped while it waited for weights of version {version}")

    def have_weights(self, publication: str, version: int) -> None:
        """Notes that the worker has the weights of `version` that a publish stage brought."""
        with self._weights:
            self._versions[publication] = max(version, self.version_of(publication))
            self._weights.notify_all()

    def version_of(self, publication: str) -> int:
        """The version of the weights that the worker has of a publish stage; -1 before the first."""
        return self._versions.get(publication, -1)

    @property
    def version(self) -> int:
        """The version of the worker's weights, the oldest where several stages bring some; -1 before the first."""
        return min(self._versions.values(), default=-1)

    def stop(self) -> None:
        """Wakes whoever waits here, and gives back the devices."""
        self._lock.close()
        self.sender.shutdown(wait=False)
        with self._weights:
            self._stopped = True
            self._weights.notify_all()
