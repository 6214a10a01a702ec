"""Workers that sleep by a cost model and compute a little, so that flows run for real with no model and no device.

Their results depend on seeds, places and weights alone, never on time or arrival: whatever plan runs them, they must
come out the same. What they sleep is what a cost model says of devices that are not there.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from m2flow.worker import Inbox, Item, Worker, stage

_WIDTH = 8


def noise(*key: int) -> float:
    """A number in [0, 1) that depends on its key alone."""
    return float(np.random.Generator(np.random.Philox(key=_mixed(key))).random())


def _mixed(key: tuple[int, ...]) -> int:
    mixed = 0
    for part in key:
        mixed = (mixed * 1_000_003 + part + 1) % (1 << 64)
    return mixed


class _Resident(Worker):
    """Comes to its device and leaves it, each in `switch_s`, and holds `bytes` there."""

    _loaded = True

    def onload(self) -> None:
        """Sleeps as long as a real one would copy."""
        time.sleep(self.config.get("switch_s", 0.0))
        self._loaded = True

    def offload(self) -> None:
        """Sleeps as long as a real one would copy."""
        time.sleep(self.config.get("switch_s", 0.0))
        self._loaded = False

    def resident_bytes(self) -> int:
        """What `bytes` says, while it is loaded."""
        return int(self.config.get("bytes", 0)) if self._loaded else 0


class SyntheticRollout(_Resident):
    """Generates `samples` completions a prompt; each takes `seconds`, times `tail` for one prompt in `tail_every`.

    The prompts of a call run side by side, and each prompt's samples come when they are done. `switch_s` is what it
    takes to load and unload.
    """

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"

    def setup(self) -> None:
        """Starts with weights of zero, which no publication has."""
        self._weights: NDArray[np.float64] = np.zeros(_WIDTH)
        self._version = -1

    @stage
    def generate(self, items: list[Item]) -> Iterator[Item]:
        """Completions of each prompt, the shortest first.

        With `die_at` the process kills itself in the middle of that iteration, the first time that it is started.
        """
        assert self._loaded, "generate was called while the worker was offloaded"
        start = time.monotonic()
        for seconds, item in sorted(((self.seconds(item), item) for item in items), key=lambda pair: pair[0]):
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            yield from self._complete(item)
            if item.iteration == self.config.get("die_at") and not self.context.attempt:
                os.kill(os.getpid(), signal.SIGKILL)

    def seconds(self, item: Item) -> float:
        """What one prompt takes."""
        every = int(self.config.get("tail_every", 0))
        long = every and item.seq[0] % every == every - 1
        return float(self.config.get("seconds", 0.0)) * (float(self.config.get("tail", 1.0)) if long else 1.0)

    def load_weights(self, weights: Mapping[str, NDArray[np.float64]], version: int) -> None:
        """Takes a copy of published weights."""
        assert self._loaded, "load_weights was called while the worker was offloaded"
        self._weights = np.array(weights["w"])
        self._version = version

    def version(self) -> int:
        """The version of its weights."""
        return self._version

    def _complete(self, item: Item) -> Iterator[Item]:
        size = int(self.config.get("samples", 4))
        for index in range(size):
            draw = noise(int(item.fields.get("seed", 0)), item.iteration, *item.seq, index)
            length = 1 + int(draw * 6)
            ids = (np.arange(length, dtype=np.int32) + int(draw * 1000)) % 97
            signal = float(self._weights.sum()) + draw
            yield item.child(index, size, "prompt", completion_ids=ids, signal=signal, policy_version=self._version)


class SyntheticReward(Worker):
    """Scores samples, `seconds` each."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"

    @stage
    def score(self, items: list[Item]) -> list[Item]:
        """Each sample with a reward; one that is as long as can be is dropped where `drop` says so."""
        time.sleep(len(items) * float(self.config.get("seconds", 0.0)))
        return [self._score(item) for item in items]

    def _score(self, item: Item) -> Item:
        ids = item.fields["completion_ids"]
        if self.config.get("drop") and len(ids) >= 6:
            return item.as_tombstone("too long")
        return item.with_fields(reward=float(int(ids.sum()) % 7) + float(item.fields["signal"]))


class SyntheticActor(_Resident):
    """Trains on graded groups, `seconds` each; the optimiser steps once in `minibatch` groups, by count."""

    in_step: ClassVar[bool] = True

    def setup(self) -> None:
        """Starts with seeded weights."""
        self._weights = np.linspace(0.0, 0.1, _WIDTH)
        self._gradient = np.zeros(_WIDTH)
        self._seen = 0
        self._steps = 0

    @stage
    def train(self, items: list[Item]) -> Iterable[Item]:
        """Accumulates each group's gradient; gives a metrics item for each group. Fails where `fail_at` says so."""
        assert self._loaded, "train was called while the worker was offloaded"
        time.sleep(len(items) * float(self.config.get("seconds", 0.0)) / self.context.world_size)
        if items and items[0].iteration == self.config.get("fail_at"):
            raise ValueError(f"told to fail at iteration {items[0].iteration}")
        return [self._learn(item) for item in items]

    def named_weights(self) -> dict[str, NDArray[np.float64]]:
        """The weights, by name."""
        assert self._loaded, "named_weights was called while the worker was offloaded"
        time.sleep(float(self.config.get("sync_s", 0.0)))
        return {"w": self._weights.copy()}

    def shards(self) -> dict[str, Any]:
        """All that a successor needs."""
        counts = np.array([self._seen, self._steps])
        return {"weights": self._weights, "gradient": self._gradient, "counts": counts}

    def load_shards(self, shards: Mapping[str, Any]) -> None:
        """Goes on where another stopped."""
        self._weights = np.array(shards.get("weights", self._weights))
        self._gradient = np.array(shards.get("gradient", self._gradient))
        self._seen, self._steps = map(int, shards.get("counts", (self._seen, self._steps)))

    def weights(self) -> list[float]:
        """The weights as numbers."""
        return [float(value) for value in self._weights]

    def _learn(self, group: Item) -> Item:
        for member, advantage in zip(group.members, group.fields["advantages"], strict=True):
            ids = np.resize(member.fields["completion_ids"], _WIDTH).astype(np.float64)
            self._gradient += advantage * ids / 97.0
        self._seen += 1
        if self._seen % int(self.config.get("minibatch", 2)) == 0:
            self._weights = self._weights + 0.01 * self._gradient
            self._gradient = np.zeros(_WIDTH)
            self._steps += 1
        versions = {int(member.fields["policy_version"]) for member in group.members}
        return Item(
            group.seq,
            group.iteration,
            {
                "rewards": [float(member.fields["reward"]) for member in group.members],
                "advantages": list(group.fields["advantages"]),
                "versions": sorted(versions),
                "order": self._seen,
                "steps": self._steps,
            },
        )


class SyntheticCritic(Worker):
    """Values for groups, `seconds` each."""

    @stage
    def values(self, items: list[Item]) -> list[Item]:
        """Each group's members with a value."""
        time.sleep(len(items) * float(self.config.get("seconds", 0.0)))
        return [_with_members(item, "value", lambda m: float(len(m.fields["completion_ids"]))) for item in items]


class SyntheticReference(Worker):
    """Log-probabilities for groups, `seconds` each; used for the reference and for the policy before its update."""

    @stage
    def logprobs(self, items: list[Item]) -> list[Item]:
        """Each group's members with a log-probability, under the name that `field` gives."""
        time.sleep(len(items) * float(self.config.get("seconds", 0.0)))
        name = str(self.config.get("field", "ref_logprob"))
        return [_with_members(item, name, lambda m: -float(m.fields["completion_ids"].sum())) for item in items]


class SyntheticEnvironment(Worker):
    """Episodes of 2 to `length` steps, `seconds` each step for a whole batch. An episode lives on one rank.

    Rank 0 takes `slow_s` longer. With `die_at` it kills itself in the second step of that iteration, the first time
    that it is started.
    """

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "drop"

    def setup(self) -> None:
        """Starts with no episode."""
        self._steps: dict[str, int] = {}

    @stage
    def reset(self, items: list[Item]) -> list[Item]:
        """Begins an episode for each seed."""
        self._steps |= dict.fromkeys((item.id for item in items), 0)
        return [item.with_fields(observation=float(item.seq[0]), done=False, actions=[]) for item in items]

    @stage
    def step(self, items: list[Item]) -> list[Item]:
        """Takes each episode's action."""
        slow_s = 0.0 if self.context.rank else float(self.config.get("slow_s", 0.0))
        time.sleep(float(self.config.get("seconds", 0.0)) + slow_s)
        stepped = [self._step(item) for item in items]
        dies = not self.context.rank and not self.context.attempt and items[0].iteration == self.config.get("die_at")
        if dies and any(self._steps[item.id] > 1 for item in items):
            os.kill(os.getpid(), signal.SIGKILL)
        return stepped

    def _step(self, item: Item) -> Item:
        self._steps[item.id] += 1  # a KeyError here is an episode that came to another rank
        actions = [*item.fields["actions"], item.fields["action"]]
        last = 2 + int(noise(item.iteration, *item.seq) * (int(self.config.get("length", 5)) - 1))
        return item.with_fields(observation=sum(actions), actions=actions, done=self._steps[item.id] >= last)


class SyntheticPolicy(Worker):
    """Acts on observations, `seconds` a batch. With `die_at` it dies in that iteration."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"

    @stage
    def act(self, items: list[Item]) -> list[Item]:
        """Each episode with an action."""
        time.sleep(float(self.config.get("seconds", 0.0)))
        _die(self, items)
        return [_acted(item) for item in items]


class SyntheticHand(Worker):
    """Passes items on, with one of the rounds `left` less and one more of the stages `seen`.

    `does` says what else it does with the items of some source places, by "place": "drop" gives a tombstone, "swallow"
    nothing, "double" the item twice, "part" two children.
    """

    @stage
    def work(self, items: list[Item]) -> list[Item]:
        """What became of the items."""
        return [made for item in items for made in self._made(item)]

    def _made(self, item: Item) -> list[Item]:
        left = max(0, int(item.fields.get("left", 0)) - 1)
        seen = item.with_fields(left=left, seen=int(item.fields.get("seen", 0)) + 1)
        match self.config.get("does", {}).get(str(item.seq[0])):
            case "drop":
                return [item.as_tombstone("dropped")]
            case "swallow":
                return []
            case "double":
                return [seen, seen]
            case "part":
                return [seen.child(index, 2, "part") for index in range(2)]
            case _:
                return [seen]


class SyntheticEngine(Worker):
    """Acts as `SyntheticPolicy` does, as an engine that batches continuously: up to `lanes` turns side by side, each
    of 1 to `length` steps, `seconds` a step. With `forgets` it returns with an item left."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"

    @stage
    def act(self, inbox: Inbox) -> Iterator[Item]:
        """Each episode with an action, the shortest turns first."""
        lanes, length = int(self.config.get("lanes", 4)), int(self.config.get("length", 3))
        if self.config.get("forgets"):
            return
        running: dict[str, tuple[Item, int]] = {}
        while True:
            for item in inbox.take(lanes - len(running)):
                steps = 1 + int(noise(*item.seq, len(item.fields["actions"])) * length)
                running[item.id] = item, steps
            if not running:
                return
            time.sleep(float(self.config.get("seconds", 0.0)))
            running = {name: (item, steps - 1) for name, (item, steps) in running.items()}
            for item in [item for item, steps in running.values() if not steps]:
                del running[item.id]
                _die(self, [item])
                yield _acted(item)


class SyntheticDecoder(Worker):
    """Samples completions token by token, up to `lanes` side by side, `seconds` a step; weights may change between two.

    A prompt has `length` tokens to come; `token_versions` says with which version each was made.
    """

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"

    def setup(self) -> None:
        """Starts without weights."""
        self._version = -1

    @stage
    def generate(self, inbox: Inbox) -> Iterator[Item]:
        """Each prompt as a group of one completion, as soon as it is whole."""
        lanes, length = int(self.config.get("lanes", 4)), int(self.config.get("length", 8))
        running: dict[str, tuple[Item, list[int]]] = {}
        while True:
            self.context.safe_point()
            running |= {item.id: (item, []) for item in inbox.take(lanes - len(running))}
            if not running:
                return
            time.sleep(float(self.config.get("seconds", 0.0)))
            for item, versions in list(running.values()):
                versions.append(self._version)
                if len(versions) == length:
                    del running[item.id]
                    ids = np.arange(length, dtype=np.int32)
                    yield item.child(
                        0,
                        1,
                        "prompt",
                        completion_ids=ids,
                        token_versions=versions,
                        policy_version=versions[0],
                        reward=1.0,
                    )

    def load_weights(self, weights: Mapping[str, NDArray[np.float64]], version: int) -> None:
        """Notes the version."""
        self._version = version


def _die(worker: Worker, items: list[Item]) -> None:
    """Ends the process where a first life is told to die in this iteration, at an episode's second or third turn."""
    now = not worker.context.attempt and items[0].iteration == worker.config.get("die_at")
    if now and any(len(item.fields["actions"]) > item.seq[0] % 2 for item in items):
        os.kill(os.getpid(), signal.SIGKILL)


def _acted(item: Item) -> Item:
    return item.with_fields(action=round(float(item.fields["observation"]) * 0.5 + 1.0, 6))


def _with_members(group: Item, name: str, value: Callable[[Item], float]) -> Item:
    return replace(group, members=tuple(member.with_fields(**{name: value(member)}) for member in group.members))
