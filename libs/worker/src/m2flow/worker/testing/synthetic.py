"""Workers that sleep by a cost model instead of computing, so that a large plan is executed for real on two cores.

What they emit depends on the item, the seed and the policy version alone, never on time, batch mates or placement: a
plan that loses, doubles or reorders anything changes the trainer's result.

Costs: a stage call over n items takes `fixed_s`, then the items run on `lanes` x devices ** `scaling` lanes, each item
taking the next lane that is free for `item_s` x its factor. Factors are 1, or where `tail` > 0 log-normal with that
sigma and a mean of 1. One lane is a machine that works item by item; many are an engine that batches.
"""

import heapq
import math
import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2flow.comm import register
from m2flow.worker.base import Worker
from m2flow.worker.item import Item
from m2flow.worker.residency import claim_memory
from m2flow.worker.stage import stage, stage_names


@register
@dataclass(frozen=True)
class SyntheticConfig:
    """What a synthetic worker costs.

    Seconds end in `_s`. `memory_bytes` is what it holds on each device while loaded. `samples` is how many children a
    rollout makes of a prompt, `length` the mean length of one. `die_on` names items at which a rank kills its own
    process, each the first time that the rank is started.
    """

    item_s: float = 0.01
    fixed_s: float = 0.0
    tail: float = 0.0
    lanes: int = 1
    scaling: float = 1.0
    seed: int = 0
    memory_bytes: int = 0
    onload_s: float = 0.0
    offload_s: float = 0.0
    samples: int = 4
    length: int = 16
    die_on: tuple[str, ...] = ()


class SyntheticWorker(Worker):
    """The cost model, memory, and a stage `work` that passes items on."""

    config: SyntheticConfig

    def setup(self) -> None:
        self.loaded = False
        self.policy_version = 0
        self.onload()

    def onload(self) -> None:
        if not self.loaded:
            self._claim(self.config.memory_bytes)
            time.sleep(self.config.onload_s)
            self.loaded = True

    def offload(self) -> None:
        if self.loaded:
            time.sleep(self.config.offload_s)
            self.loaded = False
            self._claim(0)

    def resident_bytes(self) -> int:
        return self.config.memory_bytes if self.loaded else 0

    def _claim(self, size_bytes: int) -> None:
        if self.config.memory_bytes:
            claim_memory(self.context.endpoint, self.context.device_ids, size_bytes)

    @stage
    def work(self, items: list[Item]) -> Iterator[Item]:
        """The items as they finish, with the field "worked" counted up."""
        return self.take_time(items, lambda item: item.with_fields(worked=item.fields.get("worked", 0) + 1))

    def work_through(self, items: list[Item]) -> list[Item]:
        """What the worker's own stage gives for these items, as a plain call."""
        own = [name for name in stage_names(type(self)) if name != "work"] or ["work"]
        return list(getattr(self, own[0])(items))

    def drill(self, num_items: int) -> float:
        """Works through as many items of its own making; the seconds that each took beyond its cost."""
        items = [Item(seq=(number,), iteration=0) for number in range(num_items)]
        expected_s = self.config.fixed_s + self.schedule(items)[-1][0]
        start = time.monotonic()
        for _ in self.work(items):
            pass
        return (time.monotonic() - start - expected_s) / num_items

    def take_time(self, items: list[Item], make: Callable[[Item], Item]) -> Iterator[Item]:
        """What `make` makes of the items, in the order in which they finish, at the times at which they do. Sleeps.

        An item is made before its time has come: making it costs no more than the cost model says.
        """
        if not self.loaded:
            raise RuntimeError(f"{self.context.group}.{self.context.rank}: its state is offloaded: onload it first")
        start = time.monotonic() + self.config.fixed_s
        for finish_s, item in self.schedule(items):
            made = make(item)
            if (left_s := start + finish_s - time.monotonic()) > 0:
                time.sleep(left_s)
            if self.config.die_on and item.id in self.config.die_on and self.context.attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield made

    def schedule(self, items: list[Item]) -> list[tuple[float, Item]]:
        """Each item and the seconds after which it finishes, in that order; ties go by `seq`."""
        config = self.config
        num_lanes = max(1, round(config.lanes * len(self.context.devices) ** config.scaling))
        free = [0.0] * min(num_lanes, max(1, len(items)))
        finished = []
        for item in items:
            finish_s = heapq.heappop(free) + config.item_s * self.factor(item)
            heapq.heappush(free, finish_s)
            finished.append((finish_s, item))
        return sorted(finished, key=lambda entry: (entry[0], entry[1].seq))

    def factor(self, item: Item) -> float:
        """How many times the mean this item costs: by its place, the same in every iteration, so that these compare."""
        tail = self.config.tail
        return math.exp(self._rng(item.seq).gauss(-tail * tail / 2, tail)) if tail else 1.0

    def rng(self, item: Item) -> random.Random:
        """A generator of this item's own, the same in every run, worker and attempt."""
        return self._rng(item.id)

    def _rng(self, name: object) -> random.Random:
        return random.Random(zlib.crc32(f"{self.config.seed}:{name}".encode()))

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Takes a published version, and remembers its sum to put into what it emits."""
        self.weight = float(sum(float(np.sum(np.asarray(value))) for value in weights.values()))
        self.policy_version = version


class SyntheticRollout(SyntheticWorker):
    """Makes `samples` children of every prompt, gathered by "prompt", as each of them finishes."""

    on_death = "retry"

    def setup(self) -> None:
        self.weight = 0.0
        super().setup()

    @stage
    def generate(self, items: list[Item]) -> Iterator[Item]:
        """Children with completion_ids, int32 of their own length, and the policy_version that made them."""
        samples = self.config.samples
        children = [item.child(index, samples, "prompt") for item in items for index in range(samples)]
        return self.take_time(children, self._complete)

    def _complete(self, child: Item) -> Item:
        length = max(1, round(self.config.length * self.factor(child)))
        ids = np.random.default_rng(self.rng(child).getrandbits(32)).integers(0, 1000, length, dtype=np.int32)
        return child.with_fields(
            completion_ids=(ids + int(self.weight * 1e6)) % 1000, policy_version=self.policy_version
        )


class SyntheticReward(SyntheticWorker):
    """Scores an item by its completion."""

    on_death = "retry"

    @stage
    def score(self, items: list[Item]) -> Iterator[Item]:
        """The items with `reward`, from 0 to 1."""
        return self.take_time(
            items, lambda item: item.with_fields(reward=float(np.mean(item.fields["completion_ids"]) / 1000))
        )


class SyntheticTrainer(SyntheticWorker):
    """Adds up what it is given, in whole numbers: a lost, doubled or altered item changes the state, no order does."""

    in_step = True

    def setup(self) -> None:
        self.state: dict[str, Any] = {"moved": 0, "seen": 0}
        super().setup()

    @stage
    def train(self, items: list[Item]) -> Iterator[Item]:
        """The items, or groups of them, each with its `loss`; the weights move by what they hold."""
        return self.take_time(items, self._learn)

    def _learn(self, item: Item) -> Item:
        members = item.members or (item,)
        loss = sum(float(member.fields.get("reward", 0.0)) for member in members if not member.tombstone)
        self.state["seen"] += len(members)
        self.state["moved"] += round(loss * 1e9)
        return item.with_fields(loss=loss)

    def named_weights(self) -> dict[str, Any]:
        """What is published."""
        return {"weight": np.full(4, self.state["moved"] * 1e-12)}

    def totals(self) -> dict[str, Any]:
        """All of its state."""
        return dict(self.state)

    def shards(self) -> dict[str, Any]:
        return {name: np.array(value) for name, value in self.state.items()}

    def load_shards(self, shards: Mapping[str, Any]) -> None:
        self.state |= {name: int(value) for name, value in shards.items()}
