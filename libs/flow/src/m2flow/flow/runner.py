"""The part of the runtime that lives beside each worker: it runs the stages of one rank.

The driver says `begin` for each iteration and later asks for what came of it with `finish`; in between nothing passes
through it. Every stage has a thread; a publish stage has one on both sides.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

from m2flow.comm import ChannelClosedError
from m2flow.flow._loop import StageLoop
from m2flow.flow._rendezvous import Rendezvous
from m2flow.flow._spans import Recorder
from m2flow.flow._unit import Unit
from m2flow.flow._weights import Publication, Reception
from m2flow.flow.errors import RunStopped
from m2flow.flow.microflow import MicroFlow, MicroStage, unpack
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Item, Worker, WorkerContext

# What was lost in a stage, by reason; None where nothing can be.
Lost = Counter[str] | None
Job = Callable[[], Lost]


class RankRunner:
    """Attached to every rank by the runtime, under the name "flow"."""

    def __init__(self, worker: Worker, context: WorkerContext, epoch_ns: int) -> None:
        """`epoch_ns`: when the run began, on the monotonic clock; spans count from there."""
        self._recorder = Recorder(context.group, context.rank, context.device_ids, epoch_ns)
        self._unit = Unit(worker, context, self._recorder)
        self._rendezvous: Rendezvous | None = None
        if type(worker).in_step and context.world_size > 1:
            self._rendezvous = Rendezvous(context.endpoint, context.group, context.rank, context.world_size)
        self._lanes: dict[str, _Lane] = {}
        self._visit = ExitStack()
        self._begun: dict[int, dict[str, Future[Lost]]] = {}
        self._fresh = True

    def begin(self, iteration: int, under_way: Sequence[int], packed: bytes) -> None:
        """Starts an iteration of a packed flow: each stage follows its own previous one.

        Blocks only in a rank that was restarted. Such a rank first catches up with where the one before it was,
        whichever call reaches it first: it begins all iterations that are `under_way`, this one among them.
        """
        if iteration in self._begun:
            return
        flow = unpack(packed)
        starting: Sequence[int] = [iteration]
        if self._fresh and self._unit.context.attempt:
            starting = under_way
            self._catch_up(starting[0], flow)
            if type(self._unit.worker).on_death == "drop":
                self._unit.orphans.bury(starting)
        self._fresh = False
        for number in starting:
            self._begun[number] = {name: self._lane(name).submit(job) for name, job in self._jobs(number, flow)}

    def finish(self, iteration: int, under_way: Sequence[int], packed: bytes) -> dict[str, Any]:
        """Waits for the end of an iteration here; returns its spans and what was lost. Raises what a stage raised.

        A rank that was restarted may not have begun the iteration: it does now, as by `begin`.
        """
        self.begin(iteration, under_way, packed)
        futures = list(self._begun[iteration].values())
        wait(futures, return_when=FIRST_EXCEPTION)
        lost: Counter[str] = Counter()
        try:
            for future in futures:
                if future.done():
                    lost.update(future.result() or ())
        except (ChannelClosedError, RunStopped):
            return {"stopped": True}  # The driver took the channels away: it knows why.
        assert all(future.done() for future in futures), "a stage that failed has raised above"
        del self._begun[iteration]
        spans = pb.Timeline(spans=self._recorder.take(iteration)).SerializeToString()
        return {"spans": spans, "lost": dict(lost)}

    def rest(self, flow: MicroFlow) -> None:
        """Leaves the devices where others will take turns on them. Blocks."""
        self._unit.residence.rest(offload=flow.group(self._unit.context.group).offload)

    def load(self, iteration: int, flow: MicroFlow) -> None:
        """Keeps the worker on its devices, with its newest weights, for calls until `unload`. Blocks."""
        if self._fresh and self._unit.context.attempt:
            self._catch_up(iteration, flow)
        name = self._unit.context.group
        locked = any(stage.locked for stage in flow.stages if name in (stage.group, stage.to))
        call = MicroStage("call", "call", group=name, locked=locked)
        self._visit.enter_context(self._unit.enter(call, flow.group(name), iteration))

    def unload(self) -> None:
        """Ends `load`. Blocks."""
        self._visit.close()

    def send_weights(self, iteration: int, flow: MicroFlow) -> None:
        """Publishes the present weights as version `iteration`, before that iteration begins. Blocks."""
        for stage in flow.stages_of(self._unit.context.group):
            if stage.kind == "publish":
                Publication(flow, stage, self._unit).send(iteration, iteration)

    def receive_weights(self, iteration: int, flow: MicroFlow) -> None:
        """Loads what `send_weights` published. Blocks."""
        for stage in self._received(flow):
            Reception(flow, stage, self._unit).receive(iteration, iteration)

    def carried(self) -> dict[str, list[Item]]:
        """What the quotas here keep for the next iteration, by quota."""
        return self._unit.quotas.carried

    def carry(self, carried: Mapping[str, Sequence[Item]]) -> None:
        """Takes what `carried` gave, here or elsewhere."""
        self._unit.quotas.carry(carried)

    def now(self) -> int:
        """The nanoseconds of the clock that spans are recorded by."""
        return time.monotonic_ns()

    def stop(self) -> None:
        """Ends the threads that wait for weights or for another iteration. Does not block."""
        self._unit.stop()
        for lane in self._lanes.values():
            lane.stop()

    def _lane(self, name: str) -> "_Lane":
        if name not in self._lanes:
            self._lanes[name] = _Lane(name, self._unit.context.match_torch_threads)
        return self._lanes[name]

    def _jobs(self, iteration: int, flow: MicroFlow) -> list[tuple[str, Job]]:
        own = flow.stages_of(self._unit.context.group)
        jobs = [(stage.name, self._job(iteration, flow, stage)) for stage in own]
        for stage in self._received(flow):
            jobs.append((f"{stage.name}>", partial(Reception(flow, stage, self._unit).run, iteration)))
        return jobs

    def _job(self, iteration: int, flow: MicroFlow, stage: MicroStage) -> Job:
        if stage.kind == "publish":
            return partial(Publication(flow, stage, self._unit).run, iteration)

        # Weights of an iteration are those that it left behind: the next one changes none before they are on their way.
        before = self._begun.get(iteration - 1, {})
        leaving = [
            before[one.name] for one in flow.stages_of(stage.group) if one.kind == "publish" and one.name in before
        ]

        def run() -> Counter[str]:
            with self._recorder.span(pb.SPAN_KIND_WAIT_WEIGHTS, stage.name, iteration):
                wait(leaving)
            loop = StageLoop(flow, stage, self._unit, iteration, self._rendezvous)
            loop.run()
            return loop.lost

        return run

    def _catch_up(self, version: int, flow: MicroFlow) -> None:
        """Brings a fresh worker to where the one before it was: off its devices, and with the weights of the day."""
        self.rest(flow)
        if self._unit.version < 0:
            self.receive_weights(version, flow)

    def _received(self, flow: MicroFlow) -> list[MicroStage]:
        return [stage for stage in flow.stages if stage.to == self._unit.context.group]


class _Lane:
    """One thread that runs jobs in order, started with the first."""

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        """`begin` runs first on the thread."""
        self._begin = begin
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Lost]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"flow:{name}", daemon=True).start()

    def submit(self, job: Job) -> "Future[Lost]":
        future: Future[Lost] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        self._begin()
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            try:
                future.set_result(job())
            except BaseException as failure:
                future.set_exception(failure)
