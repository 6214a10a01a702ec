"""One rank: it builds the worker, runs its calls one at a time, and keeps the objects that live beside it.

The worker's own lane is the thread that calls `run`, the process's main thread where the process holds one rank; every
attached object has a lane of its own.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from m2flow.comm import Endpoint, decode
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._cause import failure_of
from m2flow.worker._lane import Job, Lane, Reporter, wake
from m2flow.worker._warm import warm_class
from m2flow.worker._wire import device_from_proto, group_of
from m2flow.worker.context import WorkerContext
from m2flow.worker.target import resolve_target

_log = logging.getLogger(__name__)


def deliver(request: pb.SessionRequest, hosts: "Iterable[RankHost]") -> None:
    """Queues a call or an attachment, gives one up, or asks for the end, at ranks of this process. Does not block."""
    wake(iter([lane for host in hosts for lane in host.take(request)]))


class RankHost:
    """One rank of a group, in this process.

    `open_endpoint` makes a presence in the run's fabric, under a name. `reporter` hears that the rank is up, or why it
    is not, and then its answers, on the threads that made them. `deliver` brings what it is asked.
    """

    def __init__(self, order: pb.StartWorker, open_endpoint: Callable[[str], Endpoint], reporter: Reporter) -> None:
        self._order = order
        self._reporter = reporter
        group = group_of(order.group)
        self.context = WorkerContext(
            group=group,
            rank=order.rank,
            world_size=order.world_size,
            devices=tuple(device_from_proto(device) for device in order.devices),
            endpoint=open_endpoint(f"{group}.{order.rank}"),
            run_dir=Path(order.run_dir),
            attempt=order.attempt,
            open_endpoint=open_endpoint,
            host=order.host,
        )
        self._address = self._be_reached()
        self._lane = Lane(order.group, self.context, self.context.turn, reporter)
        self._lanes = {"": self._lane}
        self._objects: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def run(self) -> bool:
        """Builds the worker and runs its calls until it is stopped; False where it could not be built. Blocks."""
        try:
            return self._run()
        finally:
            self.context.endpoint.close()

    def _run(self) -> bool:
        order = self._order
        try:
            worker = warm_class(order.target)(decode(order.config))
            worker.context = self.context
            self.context.match_torch_threads()
            worker.setup()
        except BaseException as failure:
            self._report(failure_of(failure, order.group, order.rank, "start", attempt=order.attempt))
            return False
        self._objects[""] = worker
        self._report(
            pb.SessionResponse(
                started=pb.Started(
                    pid=os.getpid(),
                    group=order.group,
                    rank=order.rank,
                    address=self._address,
                    attempt=order.attempt,
                )
            ),
        )
        self._lane.run()
        for lane in self._lanes.values():
            lane.stop()
        self._close(worker)
        return True

    def _close(self, worker: Any) -> None:
        self._lane.phase = "close"
        try:
            worker.close()
        except BaseException:  # A sys.exit too: the rank has been stopped, and is to say so.
            _log.exception("%s: close failed", self.context.endpoint.name)
        self._lane.phase = "idle"

    def take(self, request: pb.SessionRequest) -> Iterator[Lane]:
        """Takes what `deliver` brings; the lanes that are to be woken."""
        kind = request.WhichOneof("kind")
        if kind == "call":
            lane = self._lanes[request.call.attached]
            if lane.submit(self._call(request.id, request.call)):
                yield lane
        elif kind == "attach":
            self._attach(request.id, request.attach)
        elif kind == "cancel":
            for lane in self._lanes.values():
                lane.cancel(request.cancel.call_id)
        elif kind == "peers":
            for name, address in request.peers.addresses.items():
                self.context.endpoint.add_address(name, address)
        elif kind == "stop":
            self._lane.stop()

    def busy_with(self) -> list[str]:
        """The phases of its lanes that run something now."""
        return [lane.phase for lane in self._lanes.values() if lane.phase != "idle"]

    def join(self, timeout_s: float) -> None:
        """Waits for the threads of attached objects."""
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _report(self, response: pb.SessionResponse) -> None:
        self._reporter.hold(response)
        self._reporter.send()

    def _be_reached(self) -> str:
        """Listens to other machines, where the run has any, and learns where they are."""
        for name, address in self._order.peers.items():
            self.context.endpoint.add_address(name, address)
        return self.context.endpoint.listen(f"{self._order.host}:0") if self._order.host else ""

    def _call(self, call_id: int, call: pb.Call) -> Job:
        def run() -> Any:
            return getattr(self._objects[call.attached], call.method)(*decode(call.arguments))

        return Job(call_id, f"{call.attached}.{call.method}" if call.attached else call.method, run)

    def _attach(self, call_id: int, attach: pb.Attach) -> None:
        lane = self._lanes[attach.name] = Lane(self._order.group, self.context, nullcontext(), self._reporter)

        def run() -> None:
            build = resolve_target(attach.target)
            self._objects[attach.name] = build(self._objects[""], self.context, *decode(attach.arguments))

        name = f"{self.context.group}.{self.context.rank}:{attach.name}"
        lane.submit(Job(call_id, f"{attach.name}.start", run))
        thread = threading.Thread(target=lane.run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
