"""Source order: items that arrive in any order, released by their `seq`.

A `seq` is a path: the position at the source, then the index among the children of each parent. A child's groups name
its parent and how many children that has, so what comes next is known without waiting for the end of the iteration.
"""

from collections.abc import Sequence
from dataclasses import replace

from m2flow.worker import Item

Seq = tuple[int, ...]


def seq_of_group(members: Sequence[Seq]) -> Seq:
    """The place of a group among groups: what its members' places have in common; of a lone member, its parent's."""
    if len(members) == 1:
        return members[0][:-1] or members[0]
    common: list[int] = []
    for parts in zip(*members, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return tuple(common) or min(members)


def place_id(iteration: int, place: Seq) -> str:
    """The id of the item at a place, and the key of the group of its children."""
    return f"{iteration}:{'.'.join(map(str, place))}"


def num_children(item: Item, place: Seq) -> int:
    """How many children the item at a place has of which `item` is one, or is of one; 0 where its groups do not say."""
    key = place_id(item.iteration, place)
    return next((group.size for group in item.groups.values() if group.key == key), 0)


def moved(item: Item, place: Seq, new: Seq, iteration: int) -> Item:
    """An item that is at a place, or came of the item there, as it is once that is at a new place of an iteration.

    Its members move along. It stays in the groups that were made there or below, and in no other. What is of another
    place stays as it is.
    """
    if item.seq[: len(place)] != place:
        return item
    depths = range(len(place), len(item.seq))
    keys = {place_id(item.iteration, item.seq[:n]): place_id(iteration, new + item.seq[len(place) : n]) for n in depths}
    return replace(
        item,
        seq=new + item.seq[len(place) :],
        iteration=iteration,
        groups={by: replace(g, key=keys[g.key]) for by, g in item.groups.items() if g.key in keys},
        members=tuple(moved(member, place, new, iteration) for member in item.members),
    )


class SourceOrder:
    """Releases the items of one iteration in windows of `window` by source order; 1 is strict, 0 as they arrive.

    A consumer that is dealt every `stride`-th source item from `offset` on sees a sequence without gaps. Windows wider
    than 1 count whole source items (a group each); items that are deeper than that are put in strict order.
    """

    def __init__(self, window: int, *, offset: int = 0, stride: int = 1) -> None:
        self._window = window
        self._offset = offset
        self._stride = stride
        self._next: Seq = (offset,)
        self._early: dict[Seq, Item] = {}
        self._released = 0

    def push(self, item: Item) -> list[Item]:
        """Takes an item; returns the items whose turn it is now, in order."""
        if self._window == 0:
            return [item]
        assert item.seq not in self._early, f"{item.id} came twice"
        self._early[item.seq] = item
        if self._window > 1 and len(item.seq) == 1:
            return self._within_window()
        released = []
        while (found := self._first()) is not None:
            released.append(self._early.pop(found))
            self._next = self._after(released[-1])
        return released

    @property
    def num_past(self) -> int:
        """Source items of which everything has been released."""
        return (self._next[0] - self._offset) // self._stride

    def finish(self) -> list[Item]:
        """Ends the iteration; returns what is left, in order."""
        left = [self._early[seq] for seq in sorted(self._early)]
        self._early.clear()
        return left

    def _first(self) -> Seq | None:
        """The early item at the next place: the place itself, or the first of its children."""
        for seq in self._early:
            depth = len(self._next)
            if seq[:depth] == self._next and not any(seq[depth:]):
                return seq
        return None

    def _after(self, item: Item) -> Seq:
        seq = item.seq
        while len(seq) > 1:
            parent = seq[:-1]
            size = num_children(item, parent)
            if not size or seq[-1] + 1 < size:
                return (*parent, seq[-1] + 1)
            seq = parent
        return (seq[0] + self._stride,)

    def _within_window(self) -> list[Item]:
        """What is early no longer: of the window that is not full yet, and of each that begins as one fills."""
        released: list[Item] = []
        while True:
            window = self._released // self._window
            due = [seq for seq in sorted(self._early) if self._index(seq) // self._window <= window]
            if not due:
                return released
            released += [self._early.pop(seq) for seq in due]
            self._released += len(due)

    def _index(self, seq: Seq) -> int:
        return (seq[0] - self._offset) // self._stride
