"""A stage at work on one rank: the same few steps for every chunk, on a thread of its own.

take a chunk -> have the weights -> take the turn -> load -> run -> put outputs -> acknowledge -> leave the turn
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace

from m2flow.comm import Channel, IterationEnded, PeerLostError, TimeoutError_
from m2flow.flow._debts import Debts
from m2flow.flow._inbox import RESTART_S, Chunk, Inbox
from m2flow.flow._mail import gate_channel, inbox_channel
from m2flow.flow._outlet import Outlet
from m2flow.flow._pull import Pull
from m2flow.flow._rendezvous import Rendezvous
from m2flow.flow._sender import Sender
from m2flow.flow._spans import num_tokens
from m2flow.flow._unit import Unit
from m2flow.flow.errors import RunError
from m2flow.flow.microflow import DRIVER, MicroFlow, MicroStage
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Item, pulls

# The reason of a tombstone for an episode whose process died.
DIED = "died"
# How long a holder looks for its next chunk before it gives its turn up.
_GRACE_S = 0.01
# How long a holder waits for the stage that follows it on the same worker.
_HAND_OVER_S = 0.1
# How long an eager stage with less than it could take waits for what comes together.
_TOGETHER_S = 0.002
# Puts that take longer than this are waits for room.
_PUT_NS = 1_000_000


class StageLoop:
    """One iteration of one stage on one rank."""

    def __init__(
        self, flow: MicroFlow, stage: MicroStage, unit: Unit, iteration: int, rendezvous: Rendezvous | None
    ) -> None:
        self._method = getattr(unit.worker, stage.method)
        self._pulls = pulls(self._method)
        # Whoever pulls wants what has arrived, and batches it by itself.
        stage = replace(stage, eager=stage.eager or self._pulls)
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
        # What enters a loop here may have been inside it when the process before this one died.
        self._enters = flow.is_entry(stage) and not stage.inbox.feedback
        self._in_loop = flow.is_in_loop(stage)
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
            for epoch, chunk in itertools.product(range(1, self._stage.inbox.epochs), retained):
                # An epoch's outputs are other items than the last one's: they count as another round.
                self._work(Chunk(chunk.items, rounds={seq: round_ + epoch for seq, round_ in chunk.rounds.items()}))
            while self._meet(has_work=False):
                self._step(Chunk([]))
            for chunk in retained:
                self._inbox.ack(chunk)
            self._inbox.ack_rest()
            self._outlet.end(self._iteration)
            self._hand_over()
        finally:
            self._leave()

    def _hand_over(self) -> None:
        """Stays in its turn until the next stage of this worker has come in, so that it need not be loaded again."""
        for follower in self._flow.stages_of(self._group.name):
            if self._held and follower.locked and self._stage.name in follower.after:
                self._unit.residence.await_entry(follower.name, self._iteration, _HAND_OVER_S)

    def _next(self) -> Chunk | None:
        if self._held and self._stage.eager:
            # In a loop, what comes next waits for others who may need these devices.
            chunk = self._inbox.arrived(self._stage.share)
            if chunk is not None or self._inbox.ended:
                return chunk
            self._leave()
        elif self._held:
            try:
                return self._inbox.next(timeout_s=_GRACE_S)
            except TimeoutError_:
                self._leave()
        with self._unit.recorder.span(pb.SPAN_KIND_WAIT_INPUT, self._stage.name, self._iteration):
            return self._inbox.next()

    def _work(self, chunk: Chunk) -> None:
        """Runs the stage on a chunk, and sends on what it gives and what passes it by."""
        self._drop_orphans(chunk)
        if chunk.items and self._meet(has_work=True):
            self._step(chunk)
        if chunk.dead:
            self._put(chunk.dead, chunk)

    def _drop_orphans(self, chunk: Chunk) -> None:
        """Turns items whose episodes died with the process before this one into tombstones."""
        rounds = [chunk.round_of(item) for item in chunk.items]
        lost = self._unit.orphans.among(
            self._iteration, chunk.items, rounds, enters=self._enters, in_loop=self._in_loop
        )
        if lost:
            chunk.items = [item for item in chunk.items if all(item is not gone for gone in lost)]
            chunk.dead += [item.as_tombstone(DIED) for item in lost]

    def _step(self, chunk: Chunk) -> None:
        if not self._held:
            self._enter()
            self._complete(chunk)
        sender = Sender(self._unit.sender, lambda items, timeout_s: self._put(items, chunk, timeout_s))
        self._run(chunk, sender)
        self._flush(sender)
        if not self._stage.hold:
            self._leave()

    def _meet(self, *, has_work: bool) -> bool:
        """Meets the other ranks of a group that moves in step; says whether there is work for any of them.

        The group is one unit: it asks for its devices once every rank has its part of the chunk, and a rank that has
        no more goes along with an empty one.
        """
        if self._rendezvous is None:
            return has_work
        meeting = self._rendezvous.arrive((self._stage.name, self._iteration, self._num_chunks), has_work)
        with self._unit.recorder.span(pb.SPAN_KIND_WAIT_INPUT, self._stage.name, self._iteration):
            if self._held:
                try:
                    return meeting.result(_GRACE_S)
                except TimeoutError:
                    self._leave()
            return meeting.result()

    def _enter(self) -> None:
        stage, unit = self._stage, self._unit
        if stage.lag >= 0:
            unit.await_weights(stage.name, self._iteration, self._iteration - stage.lag)
        self._turn = unit.enter(stage, self._group, self._iteration)
        self._held = stage.locked

    def _leave(self) -> None:
        self._held = False
        self._turn.close()

    def _run(self, chunk: Chunk, sender: Sender) -> None:
        """Runs the stage's method; what it gives is on its way when this returns."""
        self._num_chunks += 1
        name, unit = self._stage.name, self._unit
        weights = unit.safe_points.during() if self._stage.lag > 0 else nullcontext()
        with unit.running(name, self._iteration) as span, weights:
            debts = Debts(self._stage)
            debts.take(chunk.items)
            made = None if self._pulls else self._method(list(chunk.items))
            checked = self._pulled(chunk, debts) if self._pulls else self._checked(made, debts)
            given = unit.recorder.noting(span, checked)
            if isinstance(made, list):
                sender.keep(outputs := list(given))
            else:
                outputs = sender.send(given)
            span.items = len(chunk.items)
            span.tokens = num_tokens(chunk.items, outputs)
            span.inputs.extend(chunk.inputs)
            span.outputs.extend(f"{name}|{item.id}" for item in outputs)

    def _pulled(self, chunk: Chunk, debts: Debts) -> Iterator[Item]:
        """Lets the stage pull; yields what it gives and the tombstones that pass it by."""

        def more(most: int) -> list[Item]:
            extra = self._extend(chunk, most)
            debts.take(extra)
            return extra

        for item in self._checked(self._method(Pull(chunk.items, more)), debts):
            yield item
            dead, chunk.dead = chunk.dead, []
            yield from dead

    def _extend(self, chunk: Chunk, most: int) -> list[Item]:
        """Adds to a chunk what has arrived since, up to `most` items; returns those."""
        extra = self._inbox.arrived(most) if most > 0 else None
        if extra is None:
            return []
        self._drop_orphans(extra)
        chunk.absorb(extra)
        return extra.items

    def _complete(self, chunk: Chunk) -> None:
        """Adds to the chunk of an eager stage what has arrived since it was taken, and what comes with it.

        Ranks that work side by side are done together: who begins with what the first of them gave makes the others
        wait for a whole call.
        """
        missing = self._stage.share - len(chunk.items)
        if self._stage.eager and not self._pulls and missing > 0:
            time.sleep(_TOGETHER_S)
            self._extend(chunk, missing)

    def _flush(self, sender: Sender) -> None:
        """Waits until the outputs have been put; gives the turn up where they find no room."""
        with self._unit.recorder.span(pb.SPAN_KIND_WAIT_OUTPUT, self._stage.name, self._iteration, _PUT_NS):
            if self._held:
                try:
                    sender.finish(_GRACE_S)
                except TimeoutError:
                    self._leave()
            sender.finish()

    def _put(self, items: list[Item], chunk: Chunk, timeout_s: float | None = None) -> None:
        rounds = [chunk.round_of(item) for item in items]
        self._inbox.sent(items)
        self._outlet.put(items, rounds, self._iteration, timeout_s=timeout_s)

    def _checked(self, made: object, debts: Debts) -> Iterator[Item]:
        if not isinstance(made, Iterable):
            raise RunError(f"{self._stage.name}: the stage gave a {type(made).__name__}, want items, listed or yielded")
        for item in made:
            if not isinstance(item, Item):
                raise RunError(f"{self._stage.name}: the stage gave a {type(item).__name__}, want items")
            debts.pay(item)
            yield item
        debts.settle()


def await_gate(flow: MicroFlow, stage: MicroStage, unit: Unit, iteration: int) -> None:
    """Waits until the stages that `stage` comes after have ended the iteration."""
    if not stage.after:
        return
    gate: Channel = unit.context.endpoint.channel(gate_channel(flow.generation, stage.name), host=DRIVER)
    with unit.recorder.span(pb.SPAN_KIND_WAIT_INPUT, stage.name, iteration):
        while True:
            try:
                gate.get(iteration=iteration)
                break
            except IterationEnded:
                return
            except PeerLostError as lost:
                if not flow.comes_back(lost.peer):
                    raise
                time.sleep(RESTART_S)
    raise RunError(f"{stage.name}: its gate gave an item, want only the end of iteration {iteration}")
