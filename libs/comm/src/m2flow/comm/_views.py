"""The queue of a channel, seen by key and by iteration at once.

An entry is in the views of all the filters it passes: all, its iteration, and with a key that key, alone and within the
iteration. Each view keeps the order of arrival and the sum of weights, so that any `get` finds its items without a
search, and a view that runs empty leaves nothing behind.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import takewhile
from operator import attrgetter

from m2flow.comm._entries import Entry, Filter

# Weights are summed as whole numbers of 2**-60: a sum of floats would drift with all that comes and goes.
_UNITS_PER_WEIGHT = 2.0**60
_ORDER = attrgetter("order")


class View:
    """The queued entries that pass one filter, in order.

    What came back is kept apart from what arrived: it finds its place among its like, however much is queued.
    """

    __slots__ = ("arrived", "returned", "units")

    def __init__(self) -> None:
        self.arrived: OrderedDict[int, Entry] = OrderedDict()
        self.returned: OrderedDict[int, Entry] | None = None
        self.units = 0

    @property
    def weight(self) -> float:
        """The sum of the weights."""
        return self.units / _UNITS_PER_WEIGHT

    def __len__(self) -> int:
        return len(self.arrived) + len(self.returned or ())

    def __iter__(self) -> Iterator[Entry]:
        if not self.returned:
            return iter(self.arrived.values())
        return merge(self.arrived.values(), self.returned.values(), key=_ORDER)

    def restore(self, entries: Sequence[Entry]) -> None:
        """Puts entries back, in order; of what came back before it moves what lies between them and an end."""
        queued = self.returned = self.returned or OrderedDict()
        first, last = entries[0].order, entries[-1].order
        from_start = bool(queued) and last - next(iter(queued)) < next(reversed(queued)) - first
        if from_start:
            moved = list(takewhile(lambda order: order < last, queued))
        else:
            moved = list(takewhile(lambda order: order > first, reversed(queued)))
        for entry in entries:
            queued[entry.order] = entry
            self.units += entry.units
        if from_start or moved:
            moved += [entry.order for entry in entries]
            for order in sorted(moved, reverse=from_start):
                queued.move_to_end(order, last=not from_start)


class Merged:
    """Several views, seen as one in order."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views

    @property
    def weight(self) -> float:
        """The sum of the weights."""
        return sum(view.units for view in self._views) / _UNITS_PER_WEIGHT

    def __len__(self) -> int:
        return sum(map(len, self._views))

    def __iter__(self) -> Iterator[Entry]:
        return merge(*self._views, key=_ORDER)


class Queue:
    """All queued entries. Views of one shape, such as by key, are kept from the first time that one is asked for."""

    def __init__(self) -> None:
        self._views: dict[Filter, View] = {}
        # Which of an entry's filters have views: the first one always, so that every entry is in one of them.
        self._shapes = [0]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def weight(self) -> float:
        """The sum of all weights."""
        return sum(view.units for view in self._of_all()) / _UNITS_PER_WEIGHT

    def view(self, wanted: Filter) -> View | None:
        """Returns the entries that pass a filter; None when there are none."""
        shape = (wanted.key is not None) * 2 + (wanted.iteration is not None)
        if shape not in self._shapes:
            everything = self.all()
            self._shapes.append(shape)
            self._append(shape, everything)
        return self._views.get(wanted)

    def view_of(self, homes: Sequence[str], wanted: Filter) -> View | Merged | None:
        """Returns the entries that pass a filter in any of some homes; None when there are none."""
        found = [self.view(Filter(wanted.key, wanted.iteration, home)) for home in homes]
        views = [view for view in found if view is not None]
        return Merged(views) if len(views) > 1 else views[0] if views else None

    def all(self) -> list[Entry]:
        """Returns every queued entry, in order."""
        return sorted((entry for view in self._of_all() for entry in view), key=_ORDER)

    def _of_all(self) -> list[View]:
        """Returns the views of the first shape, one a home."""
        return [view for passed, view in self._views.items() if passed.key is None and passed.iteration is None]

    def append(self, entries: Sequence[Entry]) -> None:
        """Adds entries whose orders are the newest."""
        self._size += len(entries)
        weight, units = 0.0, 0
        for entry in entries:
            # Those of one message mostly weigh the same.
            if entry.weight != weight:
                weight = entry.weight
                units = int(weight * _UNITS_PER_WEIGHT)
            entry.units = units
        for shape in self._shapes:
            self._append(shape, entries)

    def _append(self, shape: int, entries: Sequence[Entry]) -> None:
        filters: tuple[Filter, ...] = ()
        view: View | None = None
        for entry in entries:
            # Those of one message mostly go to one view.
            if entry.filters is not filters:
                filters = entry.filters
                view = self._view(filters[shape]) if shape < len(filters) else None
            if view is not None:
                view.arrived[entry.order] = entry
                view.units += entry.units

    def _view(self, wanted: Filter) -> View:
        view = self._views.get(wanted)
        if view is None:
            view = self._views[wanted] = View()
        return view

    def restore(self, entries: Sequence[Entry]) -> None:
        """Adds entries that come back, in order."""
        self._size += len(entries)
        returning: dict[Filter, list[Entry]] = {}
        for entry in entries:
            for shape in self._shapes:
                for passed in entry.filters[shape : shape + 1]:
                    returning.setdefault(passed, []).append(entry)
        for passed, of_view in returning.items():
            self._view(passed).restore(of_view)

    def remove(self, entries: Sequence[Entry]) -> None:
        """Takes entries out of all their views."""
        self._size -= len(entries)
        for shape in self._shapes:
            self._remove(shape, entries)

    def _remove(self, shape: int, entries: Sequence[Entry]) -> None:
        filters: tuple[Filter, ...] = ()
        view: View | None = None
        for entry in entries:
            if entry.filters is not filters:
                filters = entry.filters
                view = self._views[filters[shape]] if shape < len(filters) else None
            if view is not None:
                try:
                    del view.arrived[entry.order]
                except KeyError:
                    assert view.returned is not None
                    del view.returned[entry.order]
                view.units -= entry.units
                if not view.arrived and not view.returned:
                    del self._views[filters[shape]]

    def num_views(self) -> int:
        """Returns how many views hold something: the state that keys and iterations cost."""
        return len(self._views)
