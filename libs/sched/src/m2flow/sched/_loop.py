"""A feedback loop on a clock, as the runtime runs it: no batch waits for its slowest item.

Every rank of a part takes what has come to it, up to its share, and sends items on as they finish; items keep to their
ranks, and only so many are in the loop at once: the others enter as some leave. After a call a rank needs a hand-off
until it begins again or lets others in: it puts its outputs and asks for more; its last items arrive in the middle of
that. Ranks on common devices take turns: a rank comes to its devices with work in hand, and leaves them, each time with
its onload and its offload, when nothing more has come.

Items differ, where it is known: in how often they pass a part, and in how long they take there. Those that run side by
side are out after a time in proportion to that, and a call is as long as its longest item says. A part that pulls takes
what comes while it runs, and works on all that are with it at once, as fast as in a call of that many.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import ceil, gcd

_EPS = 1e-9
_UNITS = 256  # items that are followed one by one: of more, several go together


@dataclass(frozen=True)
class Part:
    """One stage of a loop.

    Args:
        ranks: The devices of each rank.
        share: Items that a rank takes in one call at most.
        hold: Keeps its devices from call to call, as long as there is work.
        onload_s, offload_s: Paid whenever a rank comes to its devices, and leaves them.
        hand_off_s: From the end of a call until the next one begins, where items are there.
        seconds: Of one call of the whole group, every rank with so many items: more than 0.
        emits: For a call of n items the fractions of its time at which they are out, ascending.
        passes: How often each item goes through, by place in source order; empty: once a round.
        relative: How long each item takes against the mean, where items run side by side; empty: `emits` says when.
        pulls: Items join and leave while it runs.
    """

    ranks: Sequence[frozenset[int]]
    share: int
    hold: bool
    onload_s: float
    offload_s: float
    hand_off_s: float
    seconds: Callable[[int], float]
    emits: Callable[[int], Sequence[float]]
    passes: Sequence[int] = ()
    relative: Sequence[float] = ()
    pulls: bool = False


@dataclass(slots=True, eq=False)
class _Rank:
    part: int
    devices: frozenset[int]
    queue: deque[int] = field(default_factory=deque)  # by unit
    outside: deque[int] = field(default_factory=deque)  # units that have yet to enter the loop here
    running: bool = False
    holds: bool = False
    loaded: bool = False
    rivals: list["_Rank"] = field(default_factory=list)
    left: dict[int, float] = field(default_factory=dict)  # of a part that pulls: by unit, the work that is left
    since: float = 0.0  # when it was that much


def run_loop(parts: Sequence[Part], items: int, rounds: int, in_flight: int = 0) -> tuple[float, list[float]]:
    """Seconds until `items` items have each gone `rounds` times round the parts, and when each had, ascending.

    `in_flight` of them are in the loop at once at most; 0 is any number. Of many items, or of ranks that never meet and
    do the same, some stand for all.
    """
    differ = any(part.passes or part.relative for part in parts)
    apart = 1 if differ and items <= _UNITS else _apart(parts)
    bundle = ceil(ceil(items / apart) / _UNITS)
    units = ceil(items / apart / bundle)
    most = ceil(in_flight / len(parts[0].ranks) / bundle) or units
    return _Loop(parts, apart, units, bundle, rounds, most).run()


def _apart(parts: Sequence[Part]) -> int:
    """The number of equal sets of ranks whose items and devices never meet.

    Item n is with rank n mod r of a part of r ranks: it meets the ranks that are n modulo the divisor of all r.
    """
    apart = gcd(*(len(part.ranks) for part in parts))
    owner: dict[int, int] = {}
    for part in parts:
        for number, devices in enumerate(part.ranks):
            if any(owner.setdefault(device, number % apart) != number % apart for device in devices):
                return 1
    return apart


class _Loop:
    """The ranks of one set, and the units (a few items that go together) that are with them."""

    def __init__(self, parts: Sequence[Part], apart: int, units: int, bundle: int, rounds: int, most: int) -> None:
        self._parts, self._bundle = parts, bundle
        self._ranks = [[_Rank(p, devices) for devices in part.ranks[::apart]] for p, part in enumerate(parts)]
        every = [rank for ranks in self._ranks for rank in ranks]
        for rank in every:
            rank.rivals = [r for r in every if r is not rank and r.devices & rank.devices]
        self._waiting: dict[_Rank, None] = {}  # ranks with work and no devices, by arrival
        self._gone = [[0] * units for _ in parts]  # how often a unit has passed each part
        self._passes = [_spread(part.passes, units) or [rounds] * units for part in parts]
        self._relative = [_spread(part.relative, units) for part in parts]
        self._longest = [cache(partial(longest_of, relative)) for relative in self._relative]
        self._done: list[float] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now = 0.0
        heads = self._ranks[0]
        for unit in range(units):
            heads[unit % len(heads)].outside.append(unit)
        for rank in heads:
            for _ in range(min(most, len(rank.outside))):
                self._arrive(rank.outside.popleft(), 0)

    def run(self) -> tuple[float, list[float]]:
        self._dispatch()
        while self._heap:
            self._now, _, action = heapq.heappop(self._heap)
            action()
            while self._heap and self._heap[0][0] <= self._now + _EPS:
                heapq.heappop(self._heap)[2]()
            self._dispatch()
        return self._now, self._done

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def _out(self, unit: int, part: int) -> None:
        """Sends a unit that a part is done with on its way: to the next that it passes, or out of the loop."""
        self._gone[part][unit] += 1
        behind = [(part + step) % len(self._parts) for step in range(1, len(self._parts) + 1)]
        following = next((p for p in behind if self._gone[p][unit] < self._passes[p][unit]), None)
        if following is None:
            self._done.append(self._now)
            head = self._ranks[0][unit % len(self._ranks[0])]
            if not head.outside:
                return
            unit, following = head.outside.popleft(), 0
        self._at(self._now + self._parts[part].hand_off_s / 2, partial(self._arrive, unit, following))

    def _arrive(self, unit: int, part: int) -> None:
        rank = self._ranks[part][unit % len(self._ranks[part])]
        if rank.left:
            self._join(rank, [unit])
            return
        rank.queue.append(unit)
        if not rank.running:
            self._waiting.setdefault(rank)

    def _dispatch(self) -> None:
        """Gives devices to whoever has work: the earlier part first, then who came first."""
        for rank in sorted(self._waiting, key=lambda r: r.part):
            if not any(rival.holds for rival in rank.rivals):
                del self._waiting[rank]
                onload_s = 0.0 if rank.loaded else self._parts[rank.part].onload_s
                rank.running = rank.holds = rank.loaded = True
                self._at(self._now + onload_s, partial(self._begin, rank))

    def _begin(self, rank: _Rank) -> None:
        part, relative = self._parts[rank.part], self._relative[rank.part]
        if part.pulls:
            units, rank.queue = list(rank.queue), deque()
            self._join(rank, units)
            return
        units = [rank.queue.popleft() for _ in range(min(len(rank.queue), max(1, part.share // self._bundle)))]
        seconds = part.seconds(len(units) * self._bundle)
        if relative:
            seconds *= max(relative[unit] for unit in units) / self._longest[rank.part](len(units))
            times = [relative[unit] for unit in units]
            fractions: Sequence[float] = [time / max(times) for time in times]
        else:
            fractions = part.emits(len(units) * self._bundle)[self._bundle - 1 :: self._bundle]
        for unit, fraction in zip(units, fractions, strict=True):
            self._at(self._now + fraction * seconds, partial(self._out, unit, rank.part))
        self._at(self._now + seconds + part.hand_off_s, partial(self._again, rank))

    def _join(self, rank: _Rank, units: Sequence[int]) -> None:
        """Lets units into a part that pulls."""
        self._work(rank)
        relative = self._relative[rank.part]
        rank.left |= {unit: relative[unit] if relative else 1.0 for unit in units}
        self._await_next(rank)

    def _work(self, rank: _Rank) -> None:
        """Takes the work off that was done since the last time, as many units as there were being with the part."""
        if rank.left:
            done = (self._now - rank.since) / self._parts[rank.part].seconds(len(rank.left) * self._bundle)
            rank.left = {unit: left - done for unit, left in rank.left.items()}
        rank.since = self._now

    def _await_next(self, rank: _Rank) -> None:
        """Comes back when the first unit is done, unless something else happens to the rank before."""
        seconds = min(rank.left.values()) * self._parts[rank.part].seconds(len(rank.left) * self._bundle)
        self._at(self._now + max(seconds, 0.0), partial(self._finish, rank, dict(rank.left)))

    def _finish(self, rank: _Rank, before: dict[int, float]) -> None:
        if rank.left != before:
            return
        self._work(rank)
        least = min(rank.left.values())  # of a unit that is done, but for rounding
        for unit in [unit for unit, left in rank.left.items() if left <= least + _EPS]:
            del rank.left[unit]
            self._out(unit, rank.part)
        if rank.left:
            self._await_next(rank)
        else:
            self._at(self._now + self._parts[rank.part].hand_off_s, partial(self._again, rank))

    def _again(self, rank: _Rank) -> None:
        """After a call: another one where more has come, else the devices are free."""
        part = self._parts[rank.part]
        if rank.queue and part.hold:
            self._begin(rank)
        else:
            self._at(self._now + part.offload_s, partial(self._leave, rank))

    def _leave(self, rank: _Rank) -> None:
        rank.running = rank.holds = False
        rank.loaded = not (self._parts[rank.part].onload_s or self._parts[rank.part].offload_s)
        if rank.queue:
            self._waiting.setdefault(rank)


def _spread(values: Sequence[float], units: int) -> list[float]:
    """One value for each of so many units, of those that were measured; none where there are none."""
    return [values[unit * len(values) // units] for unit in range(units)] if values else []


def longest_of(relative: Sequence[float], count: int) -> float:
    """The longest of so many items, the mean over all choices of them from these."""
    weight, mean = count / len(relative), 0.0
    for place, value in enumerate(sorted(relative, reverse=True)):
        mean += weight * value
        left = len(relative) - place
        if left == count:
            break
        weight *= (left - count) / (left - 1)
    return mean
