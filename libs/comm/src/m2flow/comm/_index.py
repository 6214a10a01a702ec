"""The index of a channel: order, weights, leases and who waits, in one process, without any payload.

It is a state machine: it does no io, has no clock and holds no lock. Its owner calls it from one thread and each caller
brings the function that answers it, at once or when what it asked for is there. Whatever changes, those waiting whom
the change can serve are served before the call returns, so that nobody sleeps beside an item.
"""

import operator
import os
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from m2flow.comm._entries import SLACK, Entry, Filter, drop, filters_of, fitting, prefix
from m2flow.comm._frames import MAX_MESSAGE_BYTES
from m2flow.comm._homes import Homes
from m2flow.comm._members import Members
from m2flow.comm._views import Merged, Queue, View
from m2flow.comm._waiting import Caller, Get, Put, Refusal, Waiting

_NOBODY_TAKES = "every consumer has left it"
# After those whom a put has waited for.
_FULL = "to take an item: the channel is full"
_ANYONE = "any consumer"


@dataclass(slots=True)
class Counts:
    """What has happened in a channel so far."""

    put: int = 0
    acked: int = 0
    dropped: int = 0
    tombstones: int = 0
    regiven: int = 0


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
        for role, names in (("producers", producers), ("consumers", consumers)):
            if isinstance(names, str):
                raise ValueError(f"channel {name!r}: got {role} {names!r}, want a list of names: give it [{names!r}]")
        if isinstance(capacity, bool) or not hasattr(capacity, "__index__") or capacity < 0:
            raise ValueError(f"channel {name!r}: got capacity {capacity!r}, want an int: 1 or more, or 0 for no bound")
        if route not in ("any", "by_key"):
            raise ValueError(f"channel {name!r}: got route {route!r}, want 'any' or 'by_key'")
        self.name = name
        self.capacity = operator.index(capacity)
        self.members = Members(producers, consumers)
        self.counts = Counts()
        self.closed = False
        if route == "by_key" and not consumers:
            raise ValueError(f"channel {name!r}: got no consumers, want at least one to route keys to")
        self._homes = Homes(self.members.consumers) if route == "by_key" else None
        self._queue: Queue = Queue()
        self._waiting = Waiting()
        self._leases: dict[Hashable, dict[int, Entry]] = {}
        # What is yet to be acknowledged, by the leases that ended with their connections.
        self._lost: dict[int, Entry] = {}
        # The ids that a connection acknowledged by such leases, until its next get is told.
        self._void: dict[Hashable, dict[str, None]] = {}
        self._num_orders = 0
        # Leases are numbered from anywhere: one of a channel that had this name before is none of this one's.
        self._num_leases = int.from_bytes(os.urandom(5), "little")
        self._seen: dict[int, set[str]] = {}
        self._remaining: dict[int, int] = {}
        # Something of what was ended or closed waits for room: until it has some, nobody is told of the end.
        self._end_waits = False
        # No message that items came in was longer, nor is any of them.
        self._longest_bytes = 0

    # What members ask.

    def put(self, caller: Caller, entries: Sequence[Entry], *, wait: bool, size_bytes: int = 0) -> None:
        """Queues entries, answered once all are in; without `wait`, refused as a whole when there is no room.

        `size_bytes` is as much as any of them takes in an answer, or more.
        """
        refusal = self._refuses_put(caller, entries)
        if refusal is None:
            self.members.puts(caller.member, caller.session)
            if not wait and not self._has_room(len(entries)):
                # Whoever waits for more than there is takes what there is, as when a put waits.
                self._serve_all(flush=True)
                self._admit()
                if not self._has_room(len(entries)):
                    refusal = Refusal("ChannelFullError")
        if refusal is not None:
            drop(entries)
            caller.answer((), refusal)
            return
        if size_bytes > self._longest_bytes:
            self._longest_bytes = size_bytes
        self._waiting.puts[caller.asked] = Put(caller, deque(entries))
        self._admit()

    def get(
        self,
        caller: Caller,
        wanted: Filter,
        weight: float,
        at_least: float | None = None,
        most_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Leases entries of total `weight`, or the first one for 0, answered when they are there.

        With `at_least` the answer comes as soon as so much is there, for 0 at once, and has what is there by then; what
        would make it longer than `most_bytes` stays queued, but for the first.
        """
        if caller.member not in self.members.consumers:
            caller.answer((), self._not_a("consumer", caller.member, self.members.consumers))
            return
        if self._void and caller.session in self._void:
            first, *others = self._void.pop(caller.session)
            caller.answer((), Refusal("LeaseLostError", f"{first!r}" + (f" and {len(others)} more" if others else "")))
            return
        if self.members.takes(caller.member, caller.session):
            self._share_out()
            # Who stood in for it may wait for nothing now.
            self._settle()
        if self._homes is not None:
            wanted = wanted._replace(home=caller.member)
        get = Get(caller, wanted, weight, at_least, most_bytes)
        given = self._serve(get)
        if given is None:
            self._waiting.add(get)
            return
        if given and self._waiting.gets:
            self._serve_some(self._left_by(given))
        self._admit()

    def ack(self, session: Hashable, leases: Sequence[int], *, give_back: bool) -> None:
        """Ends leases for good, or gives their entries back. Those that have ended already are ignored.

        Where one had ended with its connection, and its entry is given out again, the next `get` is told.
        """
        held = self._leases.get(session, {})
        entries = [entry for lease in leases if (entry := held.pop(lease, None)) is not None]
        if not held:
            self._leases.pop(session, None)
        if len(entries) < len(leases):
            entries += self._leased_before(leases)
            void = [self._lost[lease].id for lease in leases if lease in self._lost]
            if void and not give_back:
                self._void.setdefault(session, {}).update(dict.fromkeys(void))
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
        if caller.member not in self.members.known:
            self.end_channel()
        for state in owed or ():
            state.closed = True
        if consumer is not None:
            consumer.closed = True
            for get in self._waiting.of(caller.session):
                self._waiting.remove(get)
                get.caller.answer((), Refusal("ChannelClosedError", "this consumer has left it"))
            self._takes_no_more(caller.session)
            if self.members.none_takes():
                self._refuse_waiting_puts(_NOBODY_TAKES)
        self._forget_ended()
        caller.answer((), None)
        self._settle()

    def cancel(self, session: Hashable, request: int) -> None:
        """Withdraws a request that waits, answering whom it waited for; one already answered is left alone."""
        first = next(iter(self._waiting.puts), None)
        put = self._waiting.puts.pop((session, request), None)
        get = self._waiting.asked.get((session, request))
        if put is not None:
            drop(put.entries)
            put.caller.answer((), Refusal("TimeoutError_", _FULL, tuple(self.members.consumers) or (_ANYONE,)))
            if first == (session, request) or self._end_waits:
                self._admit()
        elif get is not None:
            self._waiting.remove(get)
            # Where all is ended, those whose puts wait for room.
            waited_for = self.members.owing(get.wanted.iteration) or [
                put.caller.member for put in self._waiting.puts.values()
            ]
            get.caller.answer((), Refusal("TimeoutError_", peers=tuple(dict.fromkeys(waited_for))))

    # What the owner says.

    def left(self, session: Hashable, member: str) -> None:
        """Notes that a connection is gone: its leases are given out again, in order."""
        for put in [put for put in self._waiting.puts.values() if put.caller.session == session]:
            drop(self._waiting.puts.pop(put.caller.asked).entries)
        for get in self._waiting.of(session):
            self._waiting.remove(get)
        self.members.left(member, session)
        self._void.pop(session, None)
        for lease, entry in self._leases.get(session, {}).items():
            entry.lost = (*entry.lost, lease)
            self._lost[lease] = entry
        self._takes_no_more(session)
        self._settle()

    def end_channel(self) -> None:
        """Ends the channel: nothing more is put, consumers drain it."""
        self.closed = True
        self._refuse_waiting_puts("it was closed")
        self._forget_ended()
        self._settle()

    def discard(self) -> None:
        """Ends the channel and drops what is in it, leased items too."""
        everything = self._queue.all()
        self._queue.remove(everything)
        leased = [entry for held in self._leases.values() for entry in held.values()]
        self._leases.clear()
        self._lost.clear()
        self._void.clear()
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
        return len(self._waiting.asked)

    def num_states(self) -> int:
        """Returns how many views, iterations, waiters and lost leases are remembered: what must not grow with use."""
        return (
            self._queue.num_views() + len(self._remaining) + len(self._waiting.gets) + len(self._lost) + len(self._void)
        )

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
                return Refusal("IterationOverError", f"every producer has ended iteration {iteration}: put before end")
        return None

    def _has_room(self, count: int) -> bool:
        return not self.capacity or (not self._waiting.puts and len(self._queue) + count <= self.capacity)

    def _admit(self) -> None:
        """Moves entries from those waiting to put into the queue while there is room, and tells an end that waited."""
        self._fill()
        if self._end_waits:
            self._end_waits = False
            self._forget_ended()
            if self._serve_all():
                self._admit()

    def _fill(self) -> None:
        """Moves entries from those waiting to put into the queue while there is room, first come first."""
        puts = self._waiting.puts
        while puts:
            put = next(iter(puts.values()))
            entries = put.entries
            room = self.capacity - len(self._queue) if self.capacity else len(entries)
            fresh = self._enqueue([entries.popleft() for _ in range(min(room, len(entries)))])
            if fresh and self._waiting.gets:
                self._serve_some(self._passed_by(fresh))
            if not entries:
                del puts[put.caller.asked]
                put.caller.answer((), None)
            elif len(self._queue) >= self.capacity and not self._serve_all():
                # Full. Whoever waits for more than there is takes what there is, or both would wait for ever.
                return

    def _refuse_waiting_puts(self, why: str) -> None:
        puts, self._waiting.puts = self._waiting.puts, OrderedDict()
        for put in puts.values():
            drop(put.entries)
            put.caller.answer((), Refusal("ChannelClosedError", why))

    def _enqueue(self, entries: Iterable[Entry]) -> list[Entry]:
        """Queues entries but those seen already; returns the others."""
        homes = self._homes
        filters: tuple[Filter, ...] = ()
        key, iteration = None, None
        fresh = self._fresh(entries)
        for order, entry in enumerate(fresh, self._num_orders + 1):
            entry.order = order
            if entry.key != key or entry.iteration != iteration:
                key, iteration = entry.key, entry.iteration
                filters = filters_of(key, iteration, "" if homes is None else homes.of(key))
            entry.filters = filters
        self._num_orders += len(fresh)
        self._queue.append(fresh)
        return fresh

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

    def _passed_by(self, entries: Iterable[Entry]) -> set[Filter]:
        """Returns what may be wanted by whoever takes some entries."""
        homes = self._homes
        found: set[Filter] = set()
        filters: tuple[Filter, ...] = ()
        for entry in entries:
            # Those of one message mostly pass the same.
            if entry.filters is not filters:
                filters = entry.filters
                taker = None if homes is None else homes.taker_of[filters[0].home]
                found.update(filters if taker is None else filters_of(entry.key, entry.iteration, taker))
        return found

    def _left_by(self, given: Iterable[Entry]) -> Iterable[Filter]:
        """Returns the wants that may be served now that entries were given: what is left may be all that comes."""
        return list(self._waiting.gets) if 0 < self.capacity <= len(self._queue) else self._passed_by(given)

    def _serve_some(self, filters: Iterable[Filter], *, flush: bool = False) -> bool:
        """Serves whom it can of those who want something, then those whom that has made servable."""
        served = False
        while filters:
            given: list[Entry] = []
            # What is too little for one is too little for all who wait for as much of the same, however many there are.
            too_much: dict[Filter, float] = {}
            for get in self._waiting.in_order(filters):
                if get.enough >= too_much.get(get.wanted, float("inf")):
                    continue
                entries = self._serve(get, flush=flush)
                if entries is None:
                    too_much[get.wanted] = get.enough
                else:
                    self._waiting.remove(get)
                    given += entries
                    served = True
            filters, flush = self._left_by(given) if given and self._waiting.gets else (), False
        return served

    def _settle(self) -> None:
        """Serves whoever a change has made servable, then lets in what the room allows."""
        self._serve_all()
        self._admit()

    def _serve_all(self, *, flush: bool = False) -> bool:
        return self._serve_some(list(self._waiting.gets), flush=flush)

    def _serve(self, get: Get, *, flush: bool = False) -> Sequence[Entry] | None:
        """Answers a get if it can be, with `flush` by what is there; returns what it gave, None where it cannot be."""
        queue, homes = self._queue, self._homes
        view = queue.view(get.wanted) if homes is None else queue.view_of(homes.taken_by[get.wanted.home], get.wanted)
        if view is None:
            refusal = self._nothing_comes(get.wanted)
            if refusal is None and get.at_least != 0:
                return None
            get.caller.answer((), refusal)
            return ()
        if view.weight < get.enough * (1 - SLACK) and not (flush or self._flushes(view, get.wanted)):
            return None
        entries = prefix(view, get.weight)
        if len(entries) * self._longest_bytes > get.most_bytes:
            entries = fitting(entries, get.most_bytes)
        self._queue.remove(entries)
        held = self._leases.setdefault(get.caller.session, {})
        for lease, entry in enumerate(entries, self._num_leases + 1):
            entry.lease = lease
            held[lease] = entry
        self._num_leases += len(entries)
        get.caller.answer(entries, None)
        return entries

    def _flushes(self, view: View | Merged, wanted: Filter) -> bool:
        """Says whether a view is given out although it holds less than was asked for: more may never come."""
        if self.closed or self.members.all_closed() or self.members.lost_owing(wanted.iteration):
            return True
        full = 0 < self.capacity <= len(self._queue)
        if full and (len(view) == len(self._queue) or any(put.entries for put in self._waiting.puts.values())):
            # Nothing comes in before somebody has taken something.
            return True
        if wanted.iteration is not None:
            return self.members.over(wanted.iteration)
        return all(self.members.over(entry.iteration) for entry in view)

    def _nothing_comes(self, wanted: Filter) -> Refusal | None:
        refusal: Refusal | None = None
        if wanted.iteration is not None and self.members.over(wanted.iteration):
            refusal = Refusal("IterationEnded")
        elif self.closed or self.members.all_closed():
            refusal = Refusal("ChannelClosedError", "it was closed and is drained")
        elif lost := self.members.lost_owing(wanted.iteration):
            return Refusal("PeerLostError", peers=tuple(lost))
        if refusal is not None and self._waits_to_be_put(wanted):
            self._end_waits = True
            return None
        return refusal

    def _waits_to_be_put(self, wanted: Filter) -> bool:
        """Says whether something that passes a filter, of any home where it has none, waits for room."""
        homes = self._homes
        return any(
            wanted.key in (None, entry.key)
            and wanted.iteration in (None, entry.iteration)
            and (homes is None or not wanted.home or wanted.home == homes.taker_of[homes.of(entry.key)])
            for put in self._waiting.puts.values()
            for entry in put.entries
        )

    # Leaving.

    def _takes_no_more(self, session: Hashable) -> None:
        """Lets others take what is for one who is gone, and queues what it has leased again."""
        self._share_out()
        self._requeue(list(self._leases.pop(session, {}).values()))

    def _leased_before(self, leases: Iterable[int]) -> list[Entry]:
        """Takes out what is leased over connections whose end nobody has noticed yet."""
        return [held.pop(lease) for lease in leases for held in self._leases.values() if lease in held]

    def _share_out(self) -> None:
        if self._homes is not None:
            self._homes.share_out(self.members.living())

    def _requeue(self, entries: list[Entry]) -> None:
        if not entries:
            return
        entries.sort(key=attrgetter("order"))
        self.counts.regiven += len(entries)
        for entry in entries:
            entry.lease = 0
        self._queue.restore(entries)

    def _finished(self, entries: Sequence[Entry]) -> None:
        self.counts.acked += len(entries)
        drop(entries)
        for entry in entries:
            self._remaining[entry.iteration] -= 1
        if self._lost:
            for lease in [lease for entry in entries for lease in entry.lost]:
                del self._lost[lease]
        for iteration in {entry.iteration for entry in entries}:
            self._forget_iteration(iteration)

    def _forget_iteration(self, iteration: int) -> None:
        """Drops what is remembered of an iteration once it is over and acknowledged; its ids cannot come again."""
        if self._remaining.get(iteration):
            return
        self._remaining.pop(iteration, None)
        if self.closed or self.members.all_closed() or self.members.over(iteration):
            if self._waits_to_be_put(Filter(None, iteration)):
                self._end_waits = True
            else:
                self._seen.pop(iteration, None)

    def _forget_ended(self) -> None:
        for iteration in list(self._seen):
            self._forget_iteration(iteration)

    def _not_a(self, role: str, member: str, members: Iterable[str]) -> Refusal:
        return Refusal("CommError", f"{member!r} is no {role} of this channel, want one of {', '.join(members)}")
