"""Publishing: weights leave one group at the end of its iteration and reach another at its own safe point.

Both sides are stages: they take turns on devices, they have spans, and an iteration is over when they are. Weights of
version t+1 are those that iteration t left behind; they are staged once in host memory and mapped by every receiver.
"""

from collections.abc import Mapping
from typing import Any

from m2flow.comm import RemoteError
from m2flow.flow._loop import await_gate
from m2flow.flow._unit import Unit
from m2flow.flow.microflow import MicroFlow, MicroStage
from m2flow.proto.flow.v1 import flow_pb2 as pb


class Publication:
    """The sending side: one publish stage on one rank of the group whose weights it sends."""

    def __init__(self, flow: MicroFlow, stage: MicroStage, unit: Unit) -> None:
        self._flow = flow
        self._stage = stage
        self._unit = unit

    def run(self, iteration: int) -> None:
        """Sends what the iteration left, once the stages before it have ended it. Blocks."""
        await_gate(self._flow, self._stage, self._unit, iteration)
        self.send(iteration, iteration + 1)

    def send(self, iteration: int, version: int) -> None:
        """Stages the worker's weights as `version`, in its turn; receivers wait for it where it is staged. Blocks."""
        stage, unit = self._stage, self._unit
        group = self._flow.group(stage.group)
        if unit.context.rank and not group.in_step:
            return  # Replicas are alike: the first one's weights stand for all.
        with unit.enter(stage, group, iteration), unit.running(stage.name, iteration) as span:
            span.items = 1
            weights = unit.worker.named_weights()  # type: ignore[attr-defined]
            if unit.context.rank == 0:
                unit.context.endpoint.stage_weights(stage.name, version, weights)


class Reception:
    """The receiving side: the same publish stage on one rank of the group that gets the weights."""

    def __init__(self, flow: MicroFlow, stage: MicroStage, unit: Unit) -> None:
        self._flow = flow
        self._stage = stage
        self._unit = unit

    def run(self, iteration: int) -> None:
        """Takes the weights that the iteration left behind. Blocks until the worker has them."""
        self.receive(iteration, iteration + 1)

    def receive(self, iteration: int, version: int) -> None:
        """Waits for `version` to be staged and gives it, or a newer one, to the worker. Blocks.

        Where samples may be stale, a worker in a call loads it at its next safe point. Else one that stays on its
        devices loads it in a turn of its own, and one that comes and goes, when it is there.
        """
        stage, unit = self._stage, self._unit
        if unit.version_of(stage.name) >= version:
            return
        with unit.recorder.span(pb.SPAN_KIND_WAIT_WEIGHTS, stage.name, iteration):
            weights, version = self._fetch(version)
        group = self._flow.group(stage.to)

        def load() -> None:
            unit.worker.load_weights(weights, version)  # type: ignore[attr-defined]

        def load_between_steps() -> None:
            with unit.running(stage.name, iteration) as span:
                span.items = 1
                load()

        if unit.safe_points.offer(load_between_steps):
            pass
        elif group.offload:
            unit.residence.take_weights(stage.name, iteration, load)
        else:
            with unit.enter(stage, group, iteration):
                load_between_steps()
        unit.have_weights(stage.name, version)

    def _fetch(self, version: int) -> tuple[Mapping[str, Any], int]:
        """Fetches `version`, or, for who comes too late for that, the newest there is; returns it with its number."""
        endpoint, name, source = self._unit.context.endpoint, self._stage.name, f"{self._stage.group}.0"
        while True:
            try:
                return endpoint.fetch_weights(source, name, version), version
            except RemoteError:
                newest = endpoint.newest_weights(source, name)
                if newest <= version:
                    raise
                version = newest
