"""The items of a channel as its index knows them, without their payloads' bytes."""

from collections.abc import Iterable, Sized
from dataclasses import dataclass

from m2flow.comm._views import Filter

# Weights are sums of floats: what differs by less is equal.
SLACK = 1e-9

# What an item's numbers, the lengths of its fields and the name of its block take in a message, or more.
_BESIDE_BYTES = 128


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
    units: int = 0
    lease: int = 0
    # The leases by which it was given to those who have gone with it.
    lost: tuple[int, ...] = ()
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
