"""The queue of a channel, seen by key and by iteration at once.

An entry is in the views of all the filters it passes: all, its iteration, and with a key that key, alone and within the
iteration. Each view keeps the order of arrival and the sum of weights, so that any `get` finds its items without a
search, and a view that runs empty leaves nothing behind.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar


class Filter(NamedTuple):
    """Which items a `get` asks for; None is any."""

    key: str | None
    iteration: int | None
    # The consumer that the key is put on; empty in a channel without routes.
    route: str = ""


@lru_cache(maxsize=1024)
def filters_of(key: str, iteration: int, route: str) -> tuple[Filter, ...]:
    """Returns the filters that an item passes; one without a key, only those that ask for none."""
    anyhow = (Filter(None, None, route), Filter(None, iteration, route))
    return (*anyhow, Filter(key, None, route), Filter(key, iteration, route)) if key else anyhow


class Queued(Protocol):
    """What a queue needs to know of an entry: `order` grows with arrival, `filters` are those it passes."""

    order: int
    weight: float
    filters: tuple[Filter, ...]


E = TypeVar("E", bound=Queued)


class View(Generic[E]):
    """The queued entries that pass one filter, in order."""

    __slots__ = ("entries", "weight")

    def __init__(self) -> None:
        self.entries: OrderedDict[int, E] = OrderedDict()
        self.weight = 0.0

    def __iter__(self) -> Iterator[E]:
        return iter(self.entries.values())

    def restore(self, entry: E) -> None:
        """Puts an entry back where its order belongs: mostly before all others."""
        oldest = next(iter(self.entries), entry.order)
        self.entries[entry.order] = entry
        self.weight += entry.weight
        if entry.order < oldest:
            self.entries.move_to_end(entry.order, last=False)
        elif len(self.entries) > 1:
            self.entries = OrderedDict(sorted(self.entries.items()))


class Queue(Generic[E]):
    """All queued entries."""

    def __init__(self) -> None:
        self._views: dict[Filter, View[E]] = {}
        self._size = 0
        self.weight = 0.0

    def __len__(self) -> int:
        return self._size

    def view(self, wanted: Filter) -> View[E] | None:
        """Returns the entries that pass a filter; None when there are none."""
        return self._views.get(wanted)

    def all(self) -> list[E]:
        """Returns every queued entry, in order within each route."""
        routes = [view for wanted, view in self._views.items() if wanted.key is None and wanted.iteration is None]
        return [entry for view in routes for entry in view]

    def append(self, entry: E) -> None:
        """Adds an entry whose order is the newest."""
        order, weight, views = entry.order, entry.weight, self._views
        self._size += 1
        self.weight += weight
        for wanted in entry.filters:
            view = views.get(wanted)
            if view is None:
                view = views[wanted] = View()
            view.entries[order] = entry
            view.weight += weight

    def restore(self, entries: Iterable[E]) -> None:
        """Adds entries that come back; cheapest when they are given last first."""
        for entry in entries:
            self._size += 1
            self.weight += entry.weight
            for wanted in entry.filters:
                self._views.setdefault(wanted, View()).restore(entry)

    def remove(self, entry: E) -> None:
        """Takes an entry out of all its views."""
        order, weight, views = entry.order, entry.weight, self._views
        self._size -= 1
        # An empty sum is exactly zero again, whatever rounding the weights left.
        self.weight = self.weight - weight if self._size else 0.0
        for wanted in entry.filters:
            view = views[wanted]
            del view.entries[order]
            if view.entries:
                view.weight -= weight
            else:
                del views[wanted]

    def num_views(self) -> int:
        """Returns how many views hold something: the state that keys and iterations cost."""
        return len(self._views)
