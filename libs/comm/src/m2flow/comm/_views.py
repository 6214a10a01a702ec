"""The queue of a channel, seen by key and by iteration at once.

An entry is in the views of all the filters it passes: all, its iteration, and with a key that key, alone and within the
iteration. Each view keeps the order of arrival and the sum of weights, so that any `get` finds its items without a
search, and a view that runs empty leaves nothing behind.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
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
    """Returns the filters that an item passes, by shape; one without a key, only those that ask for none."""
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
    """All queued entries. Views of one shape, such as by key, are kept from the first time that one is asked for."""

    def __init__(self) -> None:
        self._entries: dict[int, E] = {}
        self._views: dict[Filter, View[E]] = {}
        # Which of an entry's filters have views.
        self._shapes: list[int] = []
        self.weight = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def view(self, wanted: Filter) -> View[E] | None:
        """Returns the entries that pass a filter; None when there are none."""
        shape = (wanted.key is not None) * 2 + (wanted.iteration is not None)
        if shape not in self._shapes:
            self._shapes.append(shape)
            for entry in self.all():
                for passed in entry.filters[shape : shape + 1]:
                    self._add(passed, entry)
        return self._views.get(wanted)

    def all(self) -> list[E]:
        """Returns every queued entry, in order."""
        return [self._entries[order] for order in sorted(self._entries)]

    def append(self, entries: Sequence[E]) -> None:
        """Adds entries whose orders are the newest."""
        for entry in entries:
            self._entries[entry.order] = entry
            self.weight += entry.weight
        for shape in self._shapes:
            wanted: Filter | None = None
            view: View[E] = View()
            for entry in entries:
                if shape >= len(entry.filters):
                    continue
                # Those of one message mostly go to one view.
                if entry.filters[shape] is not wanted:
                    wanted = entry.filters[shape]
                    view = self._view(wanted)
                view.entries[entry.order] = entry
                view.weight += entry.weight

    def _view(self, wanted: Filter) -> View[E]:
        view = self._views.get(wanted)
        if view is None:
            view = self._views[wanted] = View()
        return view

    def _add(self, wanted: Filter, entry: E) -> None:
        view = self._view(wanted)
        view.entries[entry.order] = entry
        view.weight += entry.weight

    def restore(self, entries: Iterable[E]) -> None:
        """Adds entries that come back; cheapest when they are given last first."""
        for entry in entries:
            self._entries[entry.order] = entry
            self.weight += entry.weight
            for shape in self._shapes:
                for wanted in entry.filters[shape : shape + 1]:
                    self._view(wanted).restore(entry)

    def remove(self, entries: Iterable[E]) -> None:
        """Takes entries out of all their views."""
        views = self._views
        for entry in entries:
            order = entry.order
            del self._entries[order]
            self.weight -= entry.weight
            filters = entry.filters
            for shape in self._shapes:
                if shape < len(filters):
                    view = views[filters[shape]]
                    del view.entries[order]
                    if view.entries:
                        view.weight -= entry.weight
                    else:
                        del views[filters[shape]]
        if not self._entries:
            # An empty sum is exactly zero again, whatever rounding the weights left.
            self.weight = 0.0

    def num_views(self) -> int:
        """Returns how many views hold something: the state that keys and iterations cost."""
        return len(self._views)
