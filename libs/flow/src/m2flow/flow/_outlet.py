"""Where a stage's items go: into the inbox of every stage that takes them."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from m2flow.comm import Channel, Endpoint, IterationOverError, Put
from m2flow.flow._mail import ANYONE, ENTERED, gate_channel, inbox_channel, key_of, make_id
from m2flow.flow.glue import Filter
from m2flow.flow.microflow import DRIVER, MicroFlow, MicroStage
from m2flow.worker import Item


class Tally:
    """Which stages of one process have ended an iteration of a channel: the process ends it with its last."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._ended: dict[tuple[str, int], set[str]] = {}

    def is_last(self, channel: str, iteration: int, stage: str, stages: set[str]) -> bool:
        """Notes the end of `stage`; says whether all of `stages` have ended by now."""
        with self._mutex:
            ended = self._ended.setdefault((channel, iteration), set())
            ended.add(stage)
            if ended < stages:
                return False
            del self._ended[channel, iteration]
            return True


class _Way(NamedTuple):
    """To one stage that takes the items: its channel, and the filter that decides which are sent."""

    taker: MicroStage
    num_ranks: int
    channel: Channel
    sieve: Filter | None


class Outlet:
    """The sending side of one stage in one process."""

    def __init__(self, flow: MicroFlow, stage: str, endpoint: Endpoint, tally: Tally) -> None:
        self._flow = flow
        self._stage = stage
        self._tally = tally
        self._endpoint = endpoint
        self._ways = []
        for taker in flow.takers(stage):
            channel = endpoint.channel(inbox_channel(flow.generation, taker.name), host=DRIVER)
            sieve = next((Filter(op) for op in taker.inbox.sieves if stage in op.inputs), None)
            self._ways.append(_Way(taker, flow.num_ranks(taker.name), channel, sieve))
        self._gates = [
            (endpoint.channel(gate_channel(flow.generation, later.name), host=DRIVER), later.after)
            for later in flow.stages
            if stage in later.after
        ]

    def put(
        self, items: Sequence[Item], rounds: Sequence[int], iteration: int, *, timeout_s: float | None = None
    ) -> None:
        """Puts items, each with the number of its round in a loop. Blocks while an inbox is full.

        Raises TimeoutError after `timeout_s` seconds of that: then all of them may be put again.
        """
        for taker, num_ranks, channel, sieve in self._ways:
            back = int(self._stage in taker.inbox.feedback)
            puts = [
                Put(
                    item=sent,
                    id=make_id(self._stage, item, round_ + back),
                    iteration=iteration,
                    key=key_of(item, num_ranks, taker.inbox.routed),
                )
                for item, round_ in zip(items, rounds, strict=True)
                for sent in (sieve.push(item, self._stage) if sieve else [item])
            ]
            if puts:
                channel.put_many(puts, timeout_s=timeout_s)

    def end(self, iteration: int) -> None:
        """Says that this process has put all of an iteration, to inboxes and to whoever comes after."""
        for taker, num_ranks, channel, _ in self._ways:
            if taker.inbox.feedback and self._stage not in taker.inbox.feedback:
                # Where it is over, the process before this one has told it, and died after the end.
                with suppress(IterationOverError):
                    channel.put_many(self._entered(iteration, num_ranks, taker.inbox.routed))
            self._end(channel, taker.inbox.ports, iteration)
        for gate, before in self._gates:
            self._end(gate, before, iteration)

    def _end(self, channel: Channel, producers: Sequence[str], iteration: int) -> None:
        group = self._flow.stage(self._stage).group
        alike = {name for name in producers if self._flow.stage(name).group == group}
        if self._tally.is_last(channel.name, iteration, self._stage, alike):
            channel.end(iteration)

    def _entered(self, iteration: int, num_ranks: int, routed: bool) -> list[Put]:
        note = replace(Item((0,), iteration), tombstone=ENTERED)
        sender = f"{self._stage}@{self._endpoint.name}"
        return [
            Put(item=note, id=f"{sender}|{rank}|0", iteration=iteration, key=str(rank) if routed else ANYONE)
            for rank in range(num_ranks if routed else 1)
        ]
