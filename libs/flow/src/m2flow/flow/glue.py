"""Glue at work: gathers, maps, filters, barriers, merges and joins, run where their stream is consumed.

Each operation is a small state machine over one iteration: `push` takes an item and returns what it releases, `finish`
releases what the end of the iteration sets free. A tombstone passes by functions and takes its place in gathers.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from m2flow.flow._importable import load
from m2flow.flow.errors import RunError
from m2flow.flow.microflow import Op
from m2flow.flow.order import Seq, SourceOrder, moved, place_id, seq_of_group
from m2flow.worker import Group, Item

# The reason of a tombstone that stands for an item on the other side of a split.
SPLIT = "split"
# The reason of a tombstone that tells the head of a loop that an item has left it.
LEFT = "left"
# Reasons of tombstones for items that live on elsewhere: nothing is lost.
MARKS = frozenset({SPLIT, LEFT})


class Operation(ABC):
    """One operation during one iteration; one that `holds` keeps items and releases them later."""

    holds = False

    @abstractmethod
    def push(self, item: Item, port: str) -> list[Item]:
        """Takes an item that came by `port`; returns the items that it sets free, in order."""

    def finish(self) -> list[Item]:
        """Ends the iteration; returns the items that were waiting for it."""
        return []

    def missing(self) -> list[int]:
        """Items still to come for each output that has begun; empty where nothing is known."""
        return []


class Map(Operation):
    """A function on each item."""

    def __init__(self, op: Op) -> None:
        self._function = load(op.function)
        self._op = op

    def push(self, item: Item, port: str) -> list[Item]:
        """Returns the function's item."""
        if item.tombstone:
            return [item]
        made = self._function(item)
        if not isinstance(made, Item) or made.seq != item.seq:
            raise RunError(
                f"{self._op.name}: {self._op.function} gave {_words(made)} for item {item.id}, "
                "want an Item of the same seq: return item.with_fields(...)"
            )
        return [made]


class Filter(Operation):
    """A test on each item; what fails it becomes a tombstone, or goes without one where the operation has no reason."""

    def __init__(self, op: Op) -> None:
        self._predicate = load(op.function)
        self._keep = op.branch != "no"
        self._reason = op.reason

    def push(self, item: Item, port: str) -> list[Item]:
        """Returns the item, or its tombstone."""
        if item.tombstone or bool(self._predicate(item)) == self._keep:
            return [item]
        return [item.as_tombstone(self._reason)] if self._reason else []


class Gather(Operation):
    """Waits for the items of each group; a whole one goes on as a single item with its living members in order."""

    holds = True

    def __init__(self, op: Op, lost: Counter[str]) -> None:
        self._by = op.by
        self._name = op.name
        self._local = op.local
        self._lost = lost
        self._waiting: dict[str, list[Item]] = {}
        self._sizes: dict[str, int] = {}

    def push(self, item: Item, port: str) -> list[Item]:
        """Returns the group that the item completes, if it does."""
        group = item.groups.get(self._by)
        if group is None:
            if item.tombstone:  # lost before its group was made: it stands for all of it
                return [item]
            known = ", ".join(item.groups) or "none"
            raise RunError(
                f"{self._name}: item {item.id} has groups {known}, want {self._by!r}: "
                f"make its kind with parent.child(..., by={self._by!r})"
            )
        self._check(item, group)
        members = self._waiting.setdefault(group.key, [])
        members.append(item)
        self._sizes[group.key] = group.size
        if len(members) < group.size:
            return []
        del self._waiting[group.key], self._sizes[group.key]
        return [self._whole(members)]

    def finish(self) -> list[Item]:
        """Raises RunError where a group is not complete: somebody swallowed an item."""
        for key, members in self._waiting.items():
            raise RunError(
                f"{self._name}: group {key} ended the iteration with {len(members)} of {self._sizes[key]} items: "
                "a stage must give every child, or child.as_tombstone(reason) for one that it drops"
            )
        return []

    def _check(self, item: Item, group: Group) -> None:
        """Raises RunError where a group is not the last that the item was made for, or not to be seen as a whole."""
        parent = place_id(item.iteration, item.seq[:-1])
        if group.key == parent:
            return
        for by, inner in item.groups.items():
            if inner.key == parent:
                raise RunError(
                    f"{self._name}: item {item.id} is one of {inner.size} of {parent} by {by!r}, "
                    f"want these gathered first: gather by {by!r}, then by {self._by!r}"
                )
        if self._local:
            raise RunError(
                f"{self._name}: group {group.key} of item {item.id} may hold what became of several source items, "
                "which go to several ranks here, or are counted by a quota behind: give the stage that gathers one "
                "rank, or make the group's members of one item by item.child"
            )

    def missing(self) -> list[int]:
        """What each waiting group lacks."""
        return [self._sizes[key] - len(members) for key, members in self._waiting.items()]

    def _whole(self, members: list[Item]) -> Item:
        members.sort(key=lambda member: member.seq)
        living = tuple(member for member in members if not member.tombstone)
        outer = {by: group for by, group in members[0].groups.items() if by != self._by}
        seq = seq_of_group([member.seq for member in members])
        if not living:  # the first stands for all from here on; the others end here
            self._lost.update(member.tombstone for member in members[1:])
            return replace(members[0], seq=seq, groups=outer)
        self._lost.update(member.tombstone for member in members if member.tombstone)
        return Item(seq=seq, iteration=members[0].iteration, groups=outer, members=living)


class Barrier(Operation):
    """Holds everything until the iteration ends, then releases it in source order, through a function of them all."""

    holds = True

    def __init__(self, op: Op) -> None:
        self._function = load(op.function) if op.function else None
        self._op = op
        self._held: list[Item] = []

    def push(self, item: Item, port: str) -> list[Item]:
        """Returns nothing."""
        self._held.append(item)
        return []

    def finish(self) -> list[Item]:
        """Returns all items."""
        living = sorted((item for item in self._held if not item.tombstone), key=lambda item: item.seq)
        dead = [item for item in self._held if item.tombstone]
        if self._function is not None and living:
            made = list(self._function(living))
            if [item.seq for item in made] != [item.seq for item in living]:
                raise RunError(
                    f"{self._op.name}: {self._op.function} took {len(living)} items and gave {len(made)}, "
                    "want the same items in the same order"
                )
            living = made
        self._held = []
        return sorted([*living, *dead], key=lambda item: item.seq)


class Enter(Operation):
    """What enters a loop and what comes back to its head, as it arrives."""

    def push(self, item: Item, port: str) -> list[Item]:
        """Returns the item."""
        return [item]


class Merge(Operation):
    """Several streams in one; of a split item only the living half goes on, and what died before the split once."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._came: dict[Seq, tuple[str, bool]] = {}

    def push(self, item: Item, port: str) -> list[Item]:
        """Returns the item unless it only marks the other half of a split.

        Raises RunError where a place comes by two ways; in a loop each comes again and again.
        """
        if item.tombstone == SPLIT:
            return []
        dead = bool(item.tombstone)
        other, was_dead = (port, dead) if self._op.looped else self._came.setdefault(item.seq, (port, dead))
        if other == port:
            return [item]
        if dead and was_dead:
            return []
        raise RunError(
            f"{self._op.name}: item {item.id} came by {other} and by {port}, want different items, "
            "such as the halves of a split: the same item by several ways is for flow.join"
        )


class Join(Operation):
    """The same item by several ways: goes on with all its fields once it came by each."""

    holds = True

    def __init__(self, op: Op) -> None:
        self._ports = op.inputs
        self._waiting: dict[Seq, dict[str, Item]] = {}

    def push(self, item: Item, port: str) -> list[Item]:
        """Returns the united item when this was its last way."""
        came = self._waiting.setdefault(item.seq, {})
        came[port] = item
        if len(came) < len(self._ports):
            return []
        del self._waiting[item.seq]
        return [_united([came[port] for port in self._ports])]

    def finish(self) -> list[Item]:
        """Raises RunError where an item did not come by every way."""
        for seq, came in self._waiting.items():
            lacking = [port for port in self._ports if port not in came]
            raise RunError(f"join: item {seq} came by {', '.join(came)} and not by {', '.join(lacking)}")
        return []

    def missing(self) -> list[int]:
        """What each waiting item lacks."""
        return [len(self._ports) - len(came) for came in self._waiting.values()]


class Quota(Operation):
    """The first items, by source order, that pass a test; they are numbered anew, so that no place is empty.

    `carried` holds what was over from the iteration before, and what is over from this one. `report` hears, as places
    are decided in order, how many items of the source were, with all that became of them, and how many passed. Members
    of a group are numbered with it. A new number is of no group: others of that may not be among the first.
    """

    holds = True

    def __init__(
        self, op: Op, iteration: int, carried: list[Item], report: Callable[[int, int], None], lost: Counter[str]
    ) -> None:
        self._op = op
        self._iteration = iteration
        self._test = load(op.function) if op.function else None
        self._order = SourceOrder(1)
        self._carried = carried
        self._report = report
        self._lost = lost
        self._passed = 0
        self._first: list[Item] | None = list(carried)
        carried.clear()

    def push(self, item: Item, port: str) -> list[Item]:
        """Returns the items that are decided by now and are among the first."""
        out = []
        for kept in self._first or ():
            out += self._admit(kept)
        self._first = None
        for decided in self._order.push(item):
            out += self._decide(decided)
        self._report(self._order.num_past, self._passed)
        return out

    def finish(self) -> list[Item]:
        """Returns what the end of the iteration decides: what was carried, where nothing came."""
        kept, self._first = self._first or (), None
        assert not self._order.finish(), f"{self._op.name}: a place was skipped"
        return [made for item in kept for made in self._admit(item)]

    def _decide(self, item: Item) -> list[Item]:
        if item.tombstone:
            self._lost[item.tombstone] += 1
            return []
        if self._test is not None and not self._test(item):
            self._lost[self._op.name] += 1
            return []
        return self._admit(item)

    def _admit(self, item: Item) -> list[Item]:
        if self._passed >= self._op.count:
            if self._op.carry_surplus:
                self._carried.append(item)
            else:
                self._lost["surplus"] += 1
            return []
        self._passed += 1
        return [moved(item, item.seq, (self._passed - 1,), self._iteration)]


class Glue:
    """The operations between a stage's far producers and the stage itself, for one iteration."""

    def __init__(self, ops: Sequence[Op], head: str, quota: Callable[[Op, Counter[str]], Quota] | None = None) -> None:
        """`ops` in order; `head` names the operation, or the producer, whose items reach the stage."""
        self.lost: Counter[str] = Counter()
        self._head = head
        self._quota = quota
        self._takers: dict[str, list[str]] = {}
        for op in ops:
            for port in op.inputs:
                self._takers.setdefault(port, []).append(op.name)
        self._nodes = {op.name: self._operation(op) for op in ops}

    def push(self, item: Item, port: str) -> list[Item]:
        """Takes an item of a producer; returns what reaches the stage."""
        out = [item] if port == self._head else []
        for taker in self._takers.get(port, ()):
            for made in self._nodes[taker].push(item, port):
                out += self.push(made, taker)
        return out

    @property
    def draws(self) -> bool:
        """Whether a quota is among the operations: what it wants comes only once it has decided what is there."""
        return any(isinstance(node, Quota) for node in self._nodes.values())

    def holds(self, port: str) -> bool:
        """Whether an item of a producer may be kept here, to be released later."""
        return any(self._nodes[taker].holds or self.holds(taker) for taker in self._takers.get(port, ()))

    def finish(self) -> list[Item]:
        """Ends the iteration; returns what reaches the stage because of it, the first time that it is asked."""
        out = []
        for name, node in self._nodes.items():  # in order, so that what one releases is in before the next ends
            for made in node.finish():
                out += self.push(made, name)
        return out

    def demand(self, items: int) -> int:
        """A number of inputs below which `items` more items cannot reach the stage: never more than are needed."""
        waiting = [node for node in self._nodes.values() if isinstance(node, Gather | Join)]
        if len(waiting) > 1:  # one input may serve several of them: no bound is safe but one
            return 1
        lacks = sorted(lack for node in waiting for lack in node.missing())[:items]
        return sum(lacks) + items - len(lacks)

    def _operation(self, op: Op) -> Operation:
        lost = self.lost if op.counts else Counter[str]()
        match op.kind:
            case "map":
                return Map(op)
            case "filter":
                return Filter(op)
            case "gather":
                return Gather(op, lost)
            case "barrier":
                return Barrier(op)
            case "enter":
                return Enter()
            case "merge":
                return Merge(op)
            case "join":
                return Join(op)
            case "first" if self._quota is not None:
                return self._quota(op, lost)
        raise AssertionError(f"unknown glue {op.kind!r}")


def _united(items: list[Item]) -> Item:
    dead = next((item for item in items if item.tombstone), None)
    if dead is not None:
        return dead
    fields: dict[str, Any] = {}
    for item in items:
        fields |= item.fields
    members = items[0].members
    if members:
        others = [{member.seq: member for member in item.members} for item in items]
        members = tuple(_united([other[m.seq] for other in others if m.seq in other]) for m in members)
    return replace(items[0], fields=fields, members=members)


def _words(value: object) -> str:
    return f"an Item of seq {value.seq}" if isinstance(value, Item) else f"a {type(value).__name__}"
