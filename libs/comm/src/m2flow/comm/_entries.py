"""The items of a channel as its index knows them, without their payloads' bytes, and what asks for them."""

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

# Weights are sums of floats: what differs by less is equal.
SLACK = 1e-9

# What an item's numbers, the lengths of its fields and the name of its block take in a message, or more.
_BESIDE_BYTES = 128
# Filters of longer keys are made anew: those that are kept outlive their items.
_MAX_KEPT_KEY = 256


class Filter(NamedTuple):
    """Which items a `get` asks for; None is any."""

    key: str | None
    iteration: int | None
    # The consumer whose home the key is; of a `get` that waits, who asks. Empty in a channel without routes.
    home: str = ""


def filters_of(key: str, iteration: int, home: str) -> tuple[Filter, ...]:
    """Returns the filters that an item passes, by shape; one without a key, only those that ask for none."""
    return (_kept_filters_of if len(key) <= _MAX_KEPT_KEY else _filters_of)(key, iteration, home)


def _filters_of(key: str, iteration: int, home: str) -> tuple[Filter, ...]:
    anyhow = (Filter(None, None, home), Filter(None, iteration, home))
    return (*anyhow, Filter(key, None, home), Filter(key, iteration, home)) if key else anyhow


_kept_filters_of = lru_cache(maxsize=1024)(_filters_of)


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
    # It grows with arrival.
    order: int = 0
    # The weight as the queue sums it, which fills this in.
    units: int = 0
    lease: int = 0
    # The leases by which it was given to those who have gone with it.
    lost: tuple[int, ...] = ()
    # Those that it passes.
    filters: tuple[Filter, ...] = ()

    @property
    def size_bytes(self) -> int:
        """What it takes in a message or more: its names in UTF-8, and its payload unless that lies elsewhere."""
        names = len(self.id) + len(self.key) + len(self.producer) + len(self.tombstone)
        return _BESIDE_BYTES + 4 * names + (len(self.payload) if isinstance(self.payload, Sized) else 0)


def prefix(entries: Iterable[Entry], weight: float) -> list[Entry]:
    """Returns the first entries up to a weight: never more, unless the first alone is heavier."""
    taken: list[Entry] = []
    total, most = 0.0, weight * (1 + SLACK)
    for entry in entries:
        total += entry.weight
        if taken and (total > most or not weight):
            break
        taken.append(entry)
    return taken


def fitting(entries: list[Entry], most_bytes: int) -> list[Entry]:
    """Returns the first entries of which one answer can consist: at least one."""
    total = 0
    for count, entry in enumerate(entries):
        total += entry.size_bytes
        if count and total > most_bytes:
            return entries[:count]
    return entries


def drop(entries: Iterable[Entry]) -> None:
    """Lets go of the memory of items that nobody will take."""
    for entry in entries:
        if isinstance(entry.payload, Held):
            entry.payload.drop()
