"""Exclusive turns on shared devices: who holds what, who waits, and who is next.

The holder is a *unit* that moves in step, named by its owner: a whole sharded group, or one independent replica. It
takes all its devices or none. Among units that wait, the turn goes by ticket, (iteration, position in the plan's
order), then by arrival: a device that an earlier ticket waits for is not given to a later one, so nobody starves, and
since a unit takes everything at once nobody deadlocks. A unit that holds already is let in again at once, whichever of
its ranks asks, and its devices are free when the last of them has let go or died.

`LockTable` is the state alone, on a clock that the caller gives; `m2flow.worker.turns` serves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Ticket = tuple[int, int]


@dataclass(frozen=True)
class Waiter:
    """One request in the queue: `since_s` on the table's clock."""

    request: int
    owner: str
    peer: str
    devices: frozenset[int]
    ticket: Ticket
    since_s: float


@dataclass(frozen=True)
class Hold:
    """One grant in force."""

    request: int
    owner: str
    peer: str
    devices: frozenset[int]
    ticket: Ticket
    since_s: float
    waited_s: float


@dataclass(frozen=True)
class LockStats:
    """Who holds, who waits (first in line first), and how much was granted, waited and held in all."""

    holds: tuple[Hold, ...]
    waiters: tuple[Waiter, ...]
    num_grants: int
    waited_s: float
    held_s: float


class LockTable:
    """The lock's state; every method takes the time and says which requests it granted."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._holds: dict[int, Hold] = {}
        self._num_grants = 0
        self._waited_s = 0.0
        self._held_s = 0.0

    def ask(
        self, request: int, owner: str, devices: Sequence[int], ticket: Ticket, *, peer: str, now_s: float
    ) -> list[int]:
        """Queues a request under a number of the caller's and returns the requests that are granted by now.

        Raises ValueError on no devices, or on others than those that the owner holds or waits for already: a unit
        takes all its devices or none.
        """
        wanted = frozenset(devices)
        if not wanted:
            raise ValueError(f"device lock: {owner} got no devices, want at least one")
        known = self._devices_of(owner)
        if known not in (None, wanted):
            raise ValueError(
                f"device lock: {owner} has a turn on {sorted(known or ())} and asks for {sorted(wanted)}: "
                "want all its devices in one turn"
            )
        waiter = Waiter(request, owner, peer, wanted, ticket, now_s)
        if any(hold.owner == owner for hold in self._holds.values()):
            return [self._grant(waiter, now_s)]
        self._waiters.append(waiter)
        return self._serve(now_s)

    def release(self, request: int, *, now_s: float) -> list[int]:
        """Ends a hold, or gives up a wait; an unknown number is one that ended with its peer."""
        self._waiters = [waiter for waiter in self._waiters if waiter.request != request]
        hold = self._holds.pop(request, None)
        if hold is not None:
            self._held_s += now_s - hold.since_s
        return self._serve(now_s)

    def lose(self, peer: str, *, now_s: float) -> list[int]:
        """Ends all that a dead peer held or waited for."""
        self._waiters = [waiter for waiter in self._waiters if waiter.peer != peer]
        for hold in [hold for hold in self._holds.values() if hold.peer == peer]:
            del self._holds[hold.request]
            self._held_s += now_s - hold.since_s
        return self._serve(now_s)

    def in_the_way(self) -> set[int]:
        """The requests whose holds keep another from its turn."""
        wanted = frozenset[int]().union(*(waiter.devices for waiter in self._waiters))
        return {hold.request for hold in self._holds.values() if hold.devices & wanted}

    def stats(self) -> LockStats:
        """The state now."""
        line = tuple(sorted(self._waiters, key=_turn))
        return LockStats(tuple(self._holds.values()), line, self._num_grants, self._waited_s, self._held_s)

    def _devices_of(self, owner: str) -> frozenset[int] | None:
        turns: list[Hold | Waiter] = [*self._holds.values(), *self._waiters]
        return next((turn.devices for turn in turns if turn.owner == owner), None)

    def _serve(self, now_s: float) -> list[int]:
        taken: dict[int, str] = {number: hold.owner for hold in self._holds.values() for number in hold.devices}
        granted = []
        for waiter in sorted(self._waiters, key=_turn):
            if all(taken.get(number, waiter.owner) == waiter.owner for number in waiter.devices):
                granted.append(self._grant(waiter, now_s))
            # Granted or not, the devices are spoken for: a later ticket must not slip in before this one.
            for number in waiter.devices:
                taken.setdefault(number, waiter.owner)
        self._waiters = [waiter for waiter in self._waiters if waiter.request not in self._holds]
        return granted

    def _grant(self, waiter: Waiter, now_s: float) -> int:
        waited_s = now_s - waiter.since_s
        self._holds[waiter.request] = Hold(
            waiter.request, waiter.owner, waiter.peer, waiter.devices, waiter.ticket, now_s, waited_s
        )
        self._num_grants += 1
        self._waited_s += waited_s
        return waiter.request


def _turn(waiter: Waiter) -> tuple[Ticket, int]:
    return waiter.ticket, waiter.request
