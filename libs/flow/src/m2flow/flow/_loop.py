"""A stage at work on one rank: the same few steps for every chunk, on a thread of its own.

take a chunk -> have the weights -> take the turn -> load -> run -> put outputs -> acknowledge -> leave the turn
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

from m2flow.comm import Channel, IterationEnded, TimeoutError_
from m2flow.flow._inbox import Chunk, Inbox
from m2flow.flow._mail import gate_channel, inbox_channel
from m2flow.flow._outlet import Outlet
from m2flow.flow._rendezvous import Rendezvous
from m2flow.flow._spans import num_tokens
from m2flow.flow._unit import Unit
from m2flow.flow.errors import RunError
from m2flow.flow.microflow import DRIVER, MicroFlow, MicroStage
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Item

# How long a holder looks for its next chunk before it gives its turn up.
_GRACE_S = 0.01
# Puts that take longer than this are waits for room.
_PUT_NS = 1_000_000


class StageLoop:
    """One iteration of one stage on one rank."""

    def __init__(
        self, flow: MicroFlow, stage: MicroStage, unit: Unit, iteration: int, rendezvous: Rendezvous | None
    ) -> None:
        self._flow = flow
        self._stage = stage
        self._group = flow.group(stage.group)
        self._unit = unit
        self._iteration = iteration
        self._rendezvous = rendezvous
        self._outlet = Outlet(flow, stage.name, unit.context.endpoint, unit.tally)
        channel = unit.context.endpoint.channel(inbox_channel(flow.generation, stage.name), host=DRIVER)
        quota = unit.quotas.for_iteration(iteration)
        self._inbox = Inbox(flow, stage, channel, iteration, rank=unit.context.rank, quota=quota)
        self._turn = ExitStack()
        self._held = False
        self._num_chunks = 0
        self.lost = self._inbox.lost

    def run(self) -> None:
        """Works until the iteration has ended. Blocks."""
        await_gate(self._flow, self._stage, self._unit, self._iteration)
        retained: list[Chunk] = []
        try:
            while (chunk := self._next()) is not None:
                self._work(chunk)
                if self._stage.inbox.epochs > 1:
                    retained.append(chunk)
                else:
                    self._inbox.ack(chunk)
            self._even_out()
            for epoch, chunk in itertools.product(range(1, self._stage.inbox.epochs), retained):
                # An epoch's outputs are other items than the last one's: they count as another round.
                self._work(Chunk(chunk.items, rounds={item.seq: epoch for item in chunk.items}))
            for chunk in retained:
                self._inbox.ack(chunk)
            self._inbox.ack_rest()
        finally:
            self._leave()
        self._outlet.end(self._iteration)

    def _next(self) -> Chunk | None:
        if self._held:
            try:
                return self._inbox.next(timeout_s=_GRACE_S)
            except TimeoutError_:
                self._leave()
        with self._unit.recorder.span(pb.SPAN_KIND_WAIT_INPUT, self._stage.name, self._iteration):
            return self._inbox.next()

    def _work(self, chunk: Chunk) -> None:
        """Runs the stage on a chunk, and sends on what it gives and what passes it by."""
        if chunk.items or self._moves_in_step():
            if not self._held:
                self._enter()
            self._run(chunk)
            if not self._stage.hold:
                self._leave()
        if chunk.dead:
            self._outlet.put(chunk.dead, [chunk.round_of(item) for item in chunk.dead], self._iteration)

    def _moves_in_step(self) -> bool:
        return self._rendezvous is not None

    def _enter(self) -> None:
        stage, unit = self._stage, self._unit
        if stage.lag >= 0:
            unit.await_weights(stage.name, self._iteration, self._iteration - stage.lag)
        if self._rendezvous is not None:
            # The group is one unit: it asks for its devices once every rank has its share of the chunk.
            with unit.recorder.span(pb.SPAN_KIND_WAIT_INPUT, stage.name, self._iteration):
                self._rendezvous.meet((stage.name, self._iteration, self._num_chunks))
        self._turn = unit.enter(stage, self._group, self._iteration)
        self._held = True

    def _leave(self) -> None:
        self._held = False
        self._turn.close()

    def _run(self, chunk: Chunk) -> None:
        self._num_chunks += 1
        name, unit = self._stage.name, self._unit
        with unit.running(name, self._iteration) as span:
            made = getattr(unit.worker, self._stage.method)(list(chunk.items))
            outputs = self._send(made, chunk)
            span.items = len(chunk.items)
            span.tokens = max(num_tokens(chunk.items), num_tokens(outputs))
            span.inputs.extend(chunk.inputs)
            span.outputs.extend(f"{name}|{item.id}" for item in outputs)

    def _send(self, made: object, chunk: Chunk) -> list[Item]:
        if made is None:
            raise RunError(f"{self._stage.name}: the stage gave None, want a list or a generator of items")
        sent: list[Item] = []
        for batch in _batches(made):
            for item in batch:
                if not isinstance(item, Item):
                    raise RunError(f"{self._stage.name}: the stage gave a {type(item).__name__}, want items")
            self._put(batch, chunk)
            sent += batch
        return sent

    def _put(self, items: list[Item], chunk: Chunk) -> None:
        with self._unit.recorder.span(pb.SPAN_KIND_WAIT_OUTPUT, self._stage.name, self._iteration, _PUT_NS):
            rounds = [chunk.round_of(item) for item in items]
            self._outlet.put(items, rounds, self._iteration)

    def _even_out(self) -> None:
        """Gives a rank that was dealt less the empty chunks that it lacks, so that all ranks take as many steps."""
        if self._rendezvous is None:
            return
        stage, num_ranks = self._stage, len(self._group.ranks)
        most = -(-self._flow.source_items // num_ranks)
        while self._num_chunks < -(-most // stage.share):
            self._work(Chunk([]))


def await_gate(flow: MicroFlow, stage: MicroStage, unit: Unit, iteration: int) -> None:
    """Waits until the stages that `stage` comes after have ended the iteration."""
    if not stage.after:
        return
    gate: Channel = unit.context.endpoint.channel(gate_channel(flow.generation, stage.name), host=DRIVER)
    with unit.recorder.span(pb.SPAN_KIND_WAIT_INPUT, stage.name, iteration):
        try:
            gate.get(iteration=iteration)
        except IterationEnded:
            return
    raise RunError(f"{stage.name}: its gate gave an item, want only the end of iteration {iteration}")


def _batches(made: object) -> Iterator[list[Item]]:
    """A list goes on as one message; what is yielded goes on as it comes."""
    if isinstance(made, list | tuple):
        yield list(made)
        return
    for item in made:  # type: ignore[attr-defined]
        yield [item]
