"""The index of a channel: order, weights, leases and who waits, in one process, without any payload.

It is a state machine: it does no io, has no clock and holds no lock. Its owner calls it from one thread and each caller
brings the function that answers it, at once or when what it asked for is there. Whatever changes, those waiting whom
the change can serve are served before the call returns, so that nobody sleeps beside an item.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from m2flow.comm._members import Members
from m2flow.comm._views import Filter, Queue, View, filters_of

# Weights are sums of floats: what differs by less is equal.
_SLACK = 1e-9

_NOBODY_TAKES = "every consumer has left it"


class Held:
    """A payload whose memory somebody must be told of, once its item is acknowledged or dropped."""

    __slots__ = ()

    def drop(self) -> None:
        """Ends the index's own hold."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Entry:
    """An item; its payload is whatever its owner keeps for it, a `Held` or not."""

    id: str
    key: str
    weight: float
    iteration: int
    producer: str
    tombstone: str
    payload: object
    order: int = 0
    lease: int = 0
    filters: tuple[Filter, ...] = ()


class Refusal(NamedTuple):
    """Why a request failed: the name of an error class, its text, and the peers it is about."""

    type: str
    message: str = ""
    peers: tuple[str, ...] = ()


@dataclass(slots=True)
class Counts:
    """What has happened in a channel so far."""

    put: int = 0
    acked: int = 0
    dropped: int = 0
    tombstones: int = 0
    regiven: int = 0


Answer = Callable[[Sequence[Entry], Refusal | None], None]


class Caller(NamedTuple):
    """Who asks: `session` is its connection, `member` its name, `request` unique within the session."""

    session: Hashable
    member: str
    request: int
    answer: Answer


@dataclass(slots=True, eq=False)
class _Put:
    caller: Caller
    entries: deque[Entry]


@dataclass(slots=True, eq=False)
class _Get:
    caller: Caller
    wanted: Filter
    weight: float
    at_least: float | None
    ticket: int = 0

    @property
    def enough(self) -> float:
        return self.weight if self.at_least is None else self.at_least


@dataclass(slots=True)
class _Waiting:
    """Those who wait, by what they wait for; each also by its caller, so that it can be withdrawn."""

    puts: deque[_Put] = field(default_factory=deque)
    gets: dict[Filter, OrderedDict[int, _Get]] = field(default_factory=dict)
    num_gets: int = 0
    tickets: int = 0

    def add(self, get: _Get) -> None:
        self.tickets += 1
        get.ticket = self.tickets
        self.num_gets += 1
        self.gets.setdefault(get.wanted, OrderedDict())[get.ticket] = get

    def remove(self, get: _Get) -> None:
        queue = self.gets[get.wanted]
        del queue[get.ticket]
        self.num_gets -= 1
        if not queue:
            del self.gets[get.wanted]

    def of(self, session: Hashable) -> list[_Get]:
        return [get for queue in self.gets.values() for get in queue.values() if get.caller.session == session]

    def in_order(self, filters: Iterable[Filter]) -> list[_Get]:
        found = [get for wanted in filters if wanted in self.gets for get in self.gets[wanted].values()]
        return sorted(found, key=lambda get: get.ticket) if len(found) > 1 else found


class ChannelIndex:
    """The state of one channel. `capacity` bounds the items that wait to be taken; 0 is no bound."""

    def __init__(
        self,
        name: str,
        *,
        capacity: int,
        producers: Sequence[str],
        consumers: Sequence[str],
        route: Literal["any", "by_key"] = "any",
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.members = Members(producers, consumers)
        self.counts = Counts()
        self.closed = False
        if route == "by_key" and not consumers:
            raise ValueError(f"channel {name!r}: got no consumers, want at least one to route keys to")
        self._by_key = route == "by_key"
        self._queue: Queue[Entry] = Queue()
        self._waiting = _Waiting()
        self._leases: dict[Hashable, dict[int, Entry]] = {}
        self._num_orders = 0
        # Leases are numbered from anywhere: one of a channel that had this name before is none of this one's.
        self._num_leases = int.from_bytes(os.urandom(5), "little")
        self._seen: dict[int, set[str]] = {}
        self._remaining: dict[int, int] = {}

    # What members ask.

    def put(self, caller: Caller, entries: Sequence[Entry], *, wait: bool) -> None:
        """Queues entries, answered once all are in; without `wait`, refused as a whole when there is no room."""
        refusal = self._refuses_put(caller, entries)
        if refusal is None and not wait and not self._has_room(len(entries)):
            refusal = Refusal("ChannelFullError")
        if refusal is not None:
            drop(entries)
            caller.answer((), refusal)
            return
        self.members.puts(caller.member, caller.session)
        self._waiting.puts.append(_Put(caller, deque(entries)))
        self._admit()

    def get(self, caller: Caller, wanted: Filter, weight: float, at_least: float | None = None) -> None:
        """Leases entries of total `weight`, or the first one for 0, answered when they are there.

        With `at_least` the answer comes as soon as so much is there, for 0 at once, and has what is there by then.
        """
        if caller.member not in self.members.consumers:
            caller.answer((), self._not_a("consumer", caller.member, self.members.consumers))
            return
        returned = self.members.takes(caller.member, caller.session)
        if self._by_key:
            if returned:
                self._reroute()
            wanted = wanted._replace(route=caller.member)
        get = _Get(caller, wanted, weight, at_least)
        if self._serve(get):
            self._admit()
        else:
            self._waiting.add(get)

    def ack(self, session: Hashable, leases: Iterable[int], *, give_back: bool) -> None:
        """Ends leases for good, or gives their entries back. Unknown ones were given to others meanwhile: ignored."""
        held = self._leases.get(session, {})
        entries = [entry for lease in leases if (entry := held.pop(lease, None)) is not None]
        if not held:
            self._leases.pop(session, None)
        if give_back:
            self._requeue(entries)
            self._settle()
            return
        self._finished(entries)

    def end(self, caller: Caller, iteration: int) -> None:
        """Notes that a producer has put all of an iteration; the last one flushes what is queued of it."""
        if caller.member not in self.members.producers:
            caller.answer((), self._not_a("producer", caller.member, self.members.producers))
            return
        for state in self.members.puts(caller.member, caller.session):
            state.ended.add(iteration)
        self._forget_iteration(iteration)
        caller.answer((), None)
        if self.members.over(iteration):
            self._settle()

    def close(self, caller: Caller) -> None:
        """Lets a member leave; from one who is none, ends the channel for all."""
        owed = self.members.producers.get(caller.member)
        consumer = self.members.consumers.get(caller.member)
        if owed is None and consumer is None:
            self.end_channel()
        for state in owed or ():
            state.closed = True
        if consumer is not None:
            consumer.closed = True
            for get in self._waiting.of(caller.session):
                self._waiting.remove(get)
                get.caller.answer((), Refusal("ChannelClosedError", "this consumer has left it"))
            self._requeue(list(self._leases.pop(caller.session, {}).values()))
            self._reroute()
            if self.members.none_takes():
                self._refuse_waiting_puts(_NOBODY_TAKES)
        self._forget_ended()
        caller.answer((), None)
        self._settle()

    def cancel(self, session: Hashable, request: int) -> None:
        """Withdraws a request that waits, answering whom it waited for; one already answered is left alone."""
        for put in self._waiting.puts:
            if put.caller.session == session and put.caller.request == request:
                self._waiting.puts.remove(put)
                drop(put.entries)
                put.caller.answer((), Refusal("TimeoutError_", peers=tuple(self.members.consumers)))
                return
        for get in self._waiting.of(session):
            if get.caller.request == request:
                self._waiting.remove(get)
                peers = tuple(self.members.owing(get.wanted.iteration))
                get.caller.answer((), Refusal("TimeoutError_", peers=peers))
                return

    # What the owner says.

    def left(self, session: Hashable, member: str) -> None:
        """Notes that a connection is gone: its leases are given out again, in order."""
        for put in [put for put in self._waiting.puts if put.caller.session == session]:
            self._waiting.puts.remove(put)
            drop(put.entries)
        for get in self._waiting.of(session):
            self._waiting.remove(get)
        self.members.left(member, session)
        self._requeue(list(self._leases.pop(session, {}).values()))
        self._reroute()
        self._settle()

    def end_channel(self) -> None:
        """Ends the channel: nothing more is put, consumers drain it."""
        self.closed = True
        self._refuse_waiting_puts("it was closed")
        self._settle()

    def discard(self) -> None:
        """Ends the channel and drops what is in it, leased items too."""
        everything = self._queue.all()
        self._queue.remove(everything)
        leased = [entry for held in self._leases.values() for entry in held.values()]
        self._leases.clear()
        drop([*everything, *leased])
        self.end_channel()

    def announce_successor(self, lost: str, successor: str) -> None:
        """Lets consumers wait for `successor` where `lost` died or will die, which must be a producer."""
        self.members.announce_successor(lost, successor)

    # What anyone may look at.

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def queued_weight(self) -> float:
        return self._queue.weight

    @property
    def num_leased(self) -> int:
        return sum(map(len, self._leases.values()))

    @property
    def num_waiting_puts(self) -> int:
        return len(self._waiting.puts)

    @property
    def num_waiting_gets(self) -> int:
        return self._waiting.num_gets

    def num_states(self) -> int:
        """Returns how many views, iterations and waiters are remembered: what must not grow with use."""
        return self._queue.num_views() + len(self._remaining) + len(self._waiting.gets)

    # Putting.

    def _refuses_put(self, caller: Caller, entries: Sequence[Entry]) -> Refusal | None:
        owed = self.members.producers.get(caller.member)
        if owed is None:
            return self._not_a("producer", caller.member, self.members.producers)
        if self.closed or all(state.closed for state in owed):
            return Refusal("ChannelClosedError", "it was closed: put before close")
        if self.members.none_takes():
            return Refusal("ChannelClosedError", _NOBODY_TAKES)
        for iteration in {entry.iteration for entry in entries}:
            if self.members.over(iteration):
                return Refusal("CommError", f"every producer has ended iteration {iteration}: put before end")
        return None

    def _has_room(self, count: int) -> bool:
        return not self.capacity or (not self._waiting.puts and len(self._queue) + count <= self.capacity)

    def _admit(self) -> None:
        """Moves entries from those waiting to put into the queue while there is room, first come first."""
        puts = self._waiting.puts
        while puts:
            entries = puts[0].entries
            room = self.capacity - len(self._queue) if self.capacity else len(entries)
            touched = self._enqueue([entries.popleft() for _ in range(min(room, len(entries)))])
            if self._waiting.gets and touched:
                self._serve_some(touched)
            if not entries:
                put = puts.popleft()
                put.caller.answer((), None)
            elif len(self._queue) >= self.capacity and not self._serve_all():
                # Full. Whoever waits for more than there is takes what there is, or both would wait for ever.
                return

    def _refuse_waiting_puts(self, why: str) -> None:
        puts, self._waiting.puts = self._waiting.puts, deque()
        for put in puts:
            drop(put.entries)
            put.caller.answer((), Refusal("ChannelClosedError", why))

    def _enqueue(self, entries: Iterable[Entry]) -> set[Filter]:
        """Queues entries but those seen already; returns the filters that the others pass."""
        touched: set[Filter] = set()
        filters: tuple[Filter, ...] = ()
        key, iteration = None, None
        fresh = self._fresh(entries)
        for order, entry in enumerate(fresh, self._num_orders + 1):
            entry.order = order
            if entry.key != key or entry.iteration != iteration:
                key, iteration = entry.key, entry.iteration
                filters = filters_of(key, iteration, self._route_of(key))
                touched.update(filters)
            entry.filters = filters
        self._num_orders += len(fresh)
        self._queue.append(fresh)
        return touched

    def _fresh(self, entries: Iterable[Entry]) -> list[Entry]:
        """Counts entries, and drops those whose id was seen in their iteration."""
        fresh: list[Entry] = []
        remaining, seen_in = self._remaining, self._seen
        for entry in entries:
            iteration = entry.iteration
            if entry.id:
                seen = seen_in.get(iteration)
                if seen is None:
                    seen = seen_in[iteration] = set()
                if entry.id in seen:
                    self.counts.dropped += 1
                    drop((entry,))
                    continue
                seen.add(entry.id)
            if entry.tombstone:
                self.counts.tombstones += 1
            remaining[iteration] = remaining.get(iteration, 0) + 1
            fresh.append(entry)
        self.counts.put += len(fresh)
        return fresh

    # Taking.

    def _serve_some(self, filters: Iterable[Filter]) -> bool:
        served = False
        # What is too little for one is too little for all who wait for as much of the same, however many there are.
        too_much: dict[Filter, float] = {}
        for get in self._waiting.in_order(filters):
            if get.enough >= too_much.get(get.wanted, float("inf")):
                continue
            if self._serve(get):
                self._waiting.remove(get)
                served = True
            else:
                too_much[get.wanted] = get.enough
        return served

    def _settle(self) -> None:
        """Serves whoever a change has made servable, then lets in what the room allows."""
        self._serve_all()
        self._admit()

    def _serve_all(self) -> bool:
        return self._serve_some(list(self._waiting.gets))

    def _serve(self, get: _Get) -> bool:
        """Answers a get if it can be; says whether it did."""
        view = self._queue.view(get.wanted)
        if view is None:
            refusal = self._nothing_comes(get.wanted.iteration)
            if refusal is None and get.at_least != 0:
                return False
            get.caller.answer((), refusal)
            return True
        if view.weight < get.enough * (1 - _SLACK) and not self._flushes(view, get.wanted):
            return False
        entries = _prefix(view, get.weight)
        self._queue.remove(entries)
        held = self._leases.setdefault(get.caller.session, {})
        for lease, entry in enumerate(entries, self._num_leases + 1):
            entry.lease = lease
            held[lease] = entry
        self._num_leases += len(entries)
        get.caller.answer(entries, None)
        return True

    def _flushes(self, view: View[Entry], wanted: Filter) -> bool:
        """Says whether a view is given out although it holds less than was asked for: more may never come."""
        if self.closed or self.members.all_closed() or self.members.lost_owing(wanted.iteration):
            return True
        if 0 < self.capacity <= len(self._queue) and self._waiting.puts and self._waiting.puts[0].entries:
            return True
        if wanted.iteration is not None:
            return self.members.over(wanted.iteration)
        return all(self.members.over(entry.iteration) for entry in view)

    def _nothing_comes(self, iteration: int | None) -> Refusal | None:
        if iteration is not None and self.members.over(iteration):
            return Refusal("IterationEnded")
        if self.closed or self.members.all_closed():
            return Refusal("ChannelClosedError", "it was closed and is drained")
        lost = self.members.lost_owing(iteration)
        return Refusal("PeerLostError", peers=tuple(lost)) if lost else None

    # Leaving.

    def _requeue(self, entries: list[Entry]) -> None:
        entries.sort(key=lambda entry: -entry.order)
        self.counts.regiven += len(entries)
        for entry in entries:
            entry.lease = 0
            entry.filters = filters_of(entry.key, entry.iteration, self._route_of(entry.key))
        self._queue.restore(entries)

    def _reroute(self) -> None:
        """Gives each key's queued entries to who takes it now that a consumer has left, or is back."""
        if not self._by_key:
            return
        moved = [entry for entry in self._queue.all() if self._route_of(entry.key) != entry.filters[0].route]
        self._queue.remove(moved)
        for entry in moved:
            entry.filters = filters_of(entry.key, entry.iteration, self._route_of(entry.key))
        self._queue.restore(reversed(moved))

    def _route_of(self, key: str) -> str:
        return self.members.route_of(key) if self._by_key else ""

    def _finished(self, entries: Sequence[Entry]) -> None:
        self.counts.acked += len(entries)
        drop(entries)
        for entry in entries:
            self._remaining[entry.iteration] -= 1
        for iteration in {entry.iteration for entry in entries}:
            self._forget_iteration(iteration)

    def _forget_iteration(self, iteration: int) -> None:
        """Drops what is remembered of an iteration once it is over and acknowledged; its ids cannot come again."""
        if not self._remaining.get(iteration):
            self._remaining.pop(iteration, None)
            if self.members.over(iteration):
                self._seen.pop(iteration, None)

    def _forget_ended(self) -> None:
        for iteration in list(self._seen):
            self._forget_iteration(iteration)

    def _not_a(self, role: str, member: str, members: Iterable[str]) -> Refusal:
        return Refusal("CommError", f"{member!r} is no {role} of this channel, want one of {', '.join(members)}")


def _prefix(view: View[Entry], weight: float) -> list[Entry]:
    """Returns the first entries up to a weight: never more, unless the first alone is heavier."""
    taken: list[Entry] = []
    total, most = 0.0, weight * (1 + _SLACK)
    for entry in view:
        total += entry.weight
        if taken and (total > most or not weight):
            break
        taken.append(entry)
    return taken


def drop(entries: Iterable[Entry]) -> None:
    """Lets go of the memory of items that nobody will take."""
    for entry in entries:
        if isinstance(entry.payload, Held):
            entry.payload.drop()
