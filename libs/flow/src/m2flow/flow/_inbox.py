"""What reaches a stage: items from one channel, through glue and source order, cut into chunks.

Leases are kept until the outputs that they caused have been put. Where the stage is the head of a feedback loop, the
inbox also knows when the loop is empty: when every producer outside has said that its items are in, and as many have
left as entered. Where a rank comes back after its death, what it counted must come again: it keeps the lease of each
item that entered until that item leaves, and both leases end together. Only so many items are in the loop at once as
the plan says, the others wait at its head: then the first episodes are over early, and whoever takes them need not wait
for the last.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from m2flow.comm import Channel, IterationEnded, Lease, LeaseLostError, PeerLostError, TimeoutError_
from m2flow.flow._mail import ENTERED, parse_id
from m2flow.flow.errors import RunError
from m2flow.flow.glue import LEFT, MARKS, Glue, Quota
from m2flow.flow.microflow import MicroFlow, MicroStage, Op
from m2flow.flow.order import Seq, SourceOrder
from m2flow.worker import Item

# More items than an inbox holds.
_ALL = 1 << 30
# How often to look whether a producer that died has come back.
RESTART_S = 0.05


@dataclass
class Chunk:
    """A piece of a stage's work: living items, tombstones that pass it by, and the leases behind both."""

    items: list[Item]
    dead: list[Item] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    rounds: dict[Seq, int] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)

    def absorb(self, other: "Chunk") -> None:
        """Takes another chunk in."""
        self.items = sorted([*self.items, *other.items], key=lambda item: item.seq)
        self.dead += other.dead
        self.leases += other.leases
        self.rounds |= other.rounds
        self.inputs += other.inputs

    def round_of(self, item: Item) -> int:
        """The round of the input that an output comes of: the one whose place its own place starts with."""
        return next((self.rounds[item.seq[:n]] for n in range(len(item.seq), 0, -1) if item.seq[:n] in self.rounds), 0)


class Inbox:
    """One iteration of a stage's input on one rank."""

    def __init__(
        self,
        flow: MicroFlow,
        stage: MicroStage,
        channel: Channel,
        iteration: int,
        *,
        rank: int,
        quota: Callable[[Op, Counter[str]], Quota] | None,
    ) -> None:
        """`quota` makes the operation of a quota, which outlives the iteration and reports to the driver; the sink
        has none."""
        inbox = stage.inbox
        outside = [port for port in inbox.ports if port not in inbox.feedback]
        num_ranks = flow.num_ranks(stage.name)
        self._flow = flow
        self._stage = stage
        self._channel = channel
        self._iteration = iteration
        self._key = str(rank) if inbox.routed else None
        self._glue = Glue(inbox.ops, inbox.head, quota)
        stride = num_ranks if inbox.routed else 1
        self._order = SourceOrder(inbox.window, offset=rank if inbox.routed else 0, stride=stride)
        self._ready: deque[Item] = deque()
        # What waits at the head of a loop until another item has left it.
        self._outside: deque[Item] = deque()
        # An episode dies in two rounds where its process was killed after it had told one consumer of the first.
        self._dead: set[tuple[str, Seq]] = set()
        self._leases: dict[str, list[Lease]] = {}
        # The processes that put items into a loop from outside.
        self._entering = sum(flow.num_ranks(port) for port in outside)
        # Living items that this stage was given from outside and that have not left the loop, waiting ones included.
        self._live = 0
        # The places of all that entered the loop, and what was told of those that left it, or died in it.
        self._entered: set[Seq] = set()
        self._told: set[tuple[Seq, int]] = set()
        self._recounts = bool(inbox.feedback) and flow.group(stage.group).restarts
        # The leases of what is inside the loop, by place, and of what was counted and has no counterpart.
        self._inside: dict[Seq, Lease] = {}
        self._counted: list[Lease] = []
        # Places whose output is yet to be put; leases of other rounds of theirs, after a death, wait for that.
        self._in_hand: set[Seq] = set()
        self._waiting: list[Lease] = []
        # What is done with, to be committed by the next request for items.
        self._done: list[Lease] = []
        self.ended = not inbox.ports

    @property
    def lost(self) -> Counter[str]:
        """Tombstones that ended in a gather here, by reason."""
        return self._glue.lost

    def next(self, *, timeout_s: float | None = None) -> Chunk | None:
        """The next chunk, or None when the iteration has ended. Blocks; raises TimeoutError_ after `timeout_s`."""
        while True:
            self._look_round()
            if self._stage.inbox.feedback and not self.ended:
                self._pull(self._stage.share, timeout_s, wait=not self._ready)
            chunk = self._cut(self._stage.share)
            if chunk is not None or self.ended:
                self._commit_done()
                return chunk
            if not self._stage.inbox.feedback:
                self._pull(self._stage.share, timeout_s)

    def arrived(self, most: int) -> Chunk | None:
        """What there is for an eager stage now, up to `most` items; None where there is nothing. Does not wait."""
        most = min(most, self._stage.share)
        self._look_round()
        if (most > self._num_ready() or self._stage.inbox.feedback) and not self.ended:
            self._pull(most, None, wait=False)
        self._commit_done()
        return self._cut(most)

    def ack(self, chunk: Chunk) -> None:
        """Commits a chunk, after its outputs were put; `next`, `arrived` or `ack_rest`, which follows, says so."""
        self.sent(chunk.items)
        inside = {lease.number for lease in self._inside.values()}
        self._done += [lease for lease in chunk.leases if lease.number not in inside]

    def sent(self, items: Iterable[Item]) -> None:
        """Notes that outputs are on their way; before they are, no other round of theirs is given out."""
        for item in items if self._in_hand else ():
            self._in_hand -= {item.seq[:depth] for depth in range(1, len(item.seq) + 1)}

    def ack_rest(self) -> None:
        """Commits, at the end, what was taken and led to no chunk, and what was kept for a recount."""
        self._done += [lease for leases in self._leases.values() for lease in leases]
        self._done += [*self._inside.values(), *self._counted]
        self._commit_done()
        self._leases.clear()
        self._inside.clear()
        self._counted.clear()

    def _commit_done(self) -> None:
        """Commits what is done with, where no request for items took it along."""
        if self._done:
            self._channel.ack(self._done)
            self._done = []

    def _pull(self, most: int, timeout_s: float | None, *, wait: bool = True) -> None:
        """Takes from the channel what brings no more than `most` items."""
        # The head of a loop takes all that is there: its items keep to its rank, and it sees who comes back.
        missing = _ALL if self._stage.inbox.feedback else most - self._num_ready()
        if self._stage.eager or self._glue.draws:  # what has arrived is enough: nobody knows whether more will come
            demand, at_least = missing, int(wait)
        else:
            demand = at_least = self._glue.demand(missing)
        done, self._done = self._done, []
        try:
            leases = self._channel.get_batch(
                demand, at_least=at_least, key=self._key, iteration=self._iteration, ack=done, timeout_s=timeout_s
            )
        except IterationEnded:
            self._finish()
            return
        except LeaseLostError:
            # What was done comes again, and what it gives is dropped by its ids.
            return
        except PeerLostError as lost:
            if not self._flow.comes_back(lost.peer):
                raise
            time.sleep(RESTART_S if wait else 0.0)
            if timeout_s is not None:
                # It may be given up meanwhile: who asks with a time-out looks for that between its waits.
                name = self._channel.name
                raise TimeoutError_(channel=name, key=None, peer=lost.peer, elapsed_s=RESTART_S) from lost
            return
        for lease in leases:
            self._take(lease)

    def _take(self, lease: Lease) -> None:
        item: Item = lease.item
        if item.tombstone == ENTERED:
            self._entering -= 1
            self._counted.append(lease)
            return
        if item.seq in self._in_hand:
            self._waiting.append(lease)
            return
        address = parse_id(lease.id)
        back = address.port in self._stage.inbox.feedback
        if item.tombstone and not back:
            if (address.port, item.seq) in self._dead:
                self._done.append(lease)
                return
            self._dead.add((address.port, item.seq))
        if self._recounts:
            self._in_hand.add(item.seq)
        self._leases.setdefault(item.id, []).append(lease)
        made, may_follow = self._glue.push(item, address.port), self._glue.holds(address.port)
        if back:  # what goes no further here, such as the mark of a split that is merged, has left
            made = self._come_back(made if made or may_follow else [item.as_tombstone(LEFT)], lease, address.round)
        elif self._recounts and not item.tombstone:
            self._inside[item.seq] = lease
        if not made and not may_follow:
            self._let_go(item, lease)
        if back:
            self._ready.extend(made)
            self._admit()
        else:
            self._enter(made)

    def _come_back(self, items: list[Item], lease: Lease, round_: int) -> list[Item]:
        """Counts what has left the loop. Returns what goes on in it: the living, and news of a death on the way back.

        Whoever died inside may be told of by several ways, whoever has left by several in one round.
        """
        going = []
        for item in items:
            known = item.seq in self._entered
            if not known and not (self._recounts and item.tombstone):
                raise RunError(
                    f"{self._stage.name}: item {item.id} comes back in a loop that it has not entered: "
                    "gather inside the loop what a stage makes of an item there"
                )
            if not item.tombstone:
                going.append(item)
                continue
            left = item.tombstone in MARKS
            news = item.seq, round_ if left else -1
            if known and news not in self._told:
                self._told.add(news)
                self._live -= 1
                if not left:  # it may have died behind the way out, where nobody has heard of it
                    self._leases[lease.item.id].remove(lease)
                    self._leases[item.id] = [*self._entries(item), *self._leases.get(item.id, []), lease]
                    going.append(item)
        return going

    def _enter(self, items: Iterable[Item]) -> None:
        """Gives what came from outside its turn, and counts what lives of it where a loop begins here."""
        if self._stage.inbox.feedback:
            items = list(items)
            self._entered |= {item.seq for item in items}
            self._told |= {(item.seq, -1) for item in items if item.tombstone}
            self._live += sum(not item.tombstone for item in items)
        self._sort(items)

    def _entries(self, item: Item) -> list[Lease]:
        """The leases by which an item entered the loop, which are over with it."""
        return [self._inside.pop(seq) for seq in list(self._inside) if seq[: len(item.seq)] == item.seq]

    def _let_go(self, item: Item, lease: Lease) -> None:
        """Commits an item that goes no further here, together with its entry where it leaves a loop."""
        self._leases[item.id].remove(lease)
        self._in_hand.discard(item.seq)
        entries = self._entries(item)
        if self._recounts and not entries:
            self._counted.append(lease)
        else:
            self._done += [lease, *entries]

    def _look_round(self) -> None:
        """Takes what waited for another round, and ends the iteration of a loop in which nothing is left."""
        waiting, self._waiting = self._waiting, []
        for lease in waiting:
            self._take(lease)
        if self._stage.inbox.feedback and not (self._entering or self._live or self._ready or self._waiting):
            released = self._glue.finish()  # what waited in front of the loop for all that enters it
            self._enter(released)
            if not released:
                self._finish()

    def _finish(self) -> None:
        self._sort(self._glue.finish())
        self._ready.extend(self._order.finish())
        self.ended = True

    def _sort(self, items: Iterable[Item]) -> None:
        for released in (one for item in items for one in self._order.push(item)):
            waits = self._stage.inbox.feedback and not released.tombstone
            (self._outside if waits else self._ready).append(released)
        self._admit()

    def _admit(self) -> None:
        """Lets into a loop what it has room for."""
        most = self._stage.inbox.in_flight or _ALL
        while self._outside and self._live - len(self._outside) < most:
            self._ready.append(self._outside.popleft())

    def _num_ready(self) -> int:
        """Items that count towards a chunk: in source order a tombstone takes its place, else only the living do."""
        if self._stage.inbox.window:
            return len(self._ready)
        return sum(not item.tombstone for item in self._ready)

    def _cut(self, most: int) -> Chunk | None:
        """A chunk of what is ready, where that is enough for one."""
        count = self._num_ready()
        full = count >= most or self.ended or (self._stage.eager and count > 0)
        if not self._ready:
            return None
        if not full:
            if self._stage.inbox.window:
                return None
            dead = [item for item in self._ready if item.tombstone]
            self._ready = deque(item for item in self._ready if not item.tombstone)
            return self._chunk([], dead) if dead else None
        items: list[Item] = []
        dead = []
        while self._ready and len(items) + (len(dead) if self._stage.inbox.window else 0) < most:
            item = self._ready.popleft()
            (dead if item.tombstone else items).append(item)
        return self._chunk(items, dead)

    def _chunk(self, items: list[Item], dead: list[Item]) -> Chunk:
        chunk = Chunk(items, dead)
        for item in [*items, *dead]:
            for lease in self._leases_of(item):
                address = parse_id(lease.id)
                chunk.leases.append(lease)
                chunk.inputs.append(f"{address.port}|{address.place}")
                chunk.rounds[item.seq] = address.round
        chunk.items.sort(key=lambda item: item.seq)
        return chunk

    def _leases_of(self, item: Item) -> list[Lease]:
        found = self._leases.pop(item.id, [])
        for member in item.members:
            found += self._leases_of(member)
        return found
