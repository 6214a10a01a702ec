"""Items: as they are put, as they are taken, and on the wire in columns: what those of a message share is said once."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from m2flow.comm._frames import ProtocolError
from m2flow.comm.payload import Tree
from m2flow.proto.comm.v1 import comm_pb2

# The columns beside the payloads, and what an item has for which there is no entry.
_DEFAULTS = {"ids": "", "keys": "", "weights": 0.0, "tombstones": "", "iterations": 0, "producers": "", "leases": 0}

# Sums of weights are floats: above it one would not be told from none.
MAX_WEIGHT = 2.0**53


class Put(NamedTuple):
    """One item to put: its tree or, where `tombstone` says why, none. `id` is unique within the iteration.

    An item whose id was seen in its iteration is dropped; an empty id is never dropped. `weight` is what `get_batch`
    counts in; `key` what `get` may ask for.
    """

    item: Tree = None
    id: str = ""
    iteration: int = 0
    weight: float = 1.0
    key: str = ""
    tombstone: str = ""


class Lease:
    """An item that this consumer has until it acknowledges it; should it die before, another is given the item.

    `item` is decoded when it is first asked for. Its arrays lie in the producer's shared memory and are read-only:
    the next reader of an unacknowledged item must find what the producer wrote. Where the channel stays within one
    process the item is the producer's own object, which for the same reason nobody may change.
    """

    __slots__ = ("_content", "id", "iteration", "key", "number", "producer", "tombstone", "weight")

    def __init__(
        self,
        id: str,
        key: str,
        weight: float,
        tombstone: str,
        iteration: int,
        producer: str,
        number: int,
        content: Tree,
        read: Callable[[Tree], Tree] | None,
    ) -> None:
        self.id = id
        self.key = key
        self.weight = weight
        self.tombstone = tombstone
        self.iteration = iteration
        self.producer = producer
        self.number = number
        # Replaced as one: several threads may ask for the item.
        self._content = content, read

    @property
    def item(self) -> Tree:
        """The item's tree; None for a tombstone. Raises PayloadError where it cannot be decoded here."""
        item, read = self._content
        if read is not None:
            item = None if self.tombstone else read(item)
            self._content = item, None
        return item

    def __repr__(self) -> str:
        return f"Lease(id={self.id!r}, iteration={self.iteration}, key={self.key!r}, tombstone={self.tombstone!r})"


def can_be_summed(weights: Sequence[float]) -> bool:
    """Says whether weights are numbers from 0 to MAX_WEIGHT."""
    return all(0 <= weight <= MAX_WEIGHT for weight in weights)


def add_columns(items: comm_pb2.Items, **columns: Sequence[Any]) -> None:
    """Writes columns by their names: one value where all are equal, none where all are the default."""
    for name, values in columns.items():
        first = values[0]
        if values[-1] != first or values.count(first) != len(values):
            getattr(items, name).extend(values)
        elif first != _DEFAULTS[name]:
            getattr(items, name).append(first)


def describe(puts: Sequence[Put], items: comm_pb2.Items) -> None:
    """Writes what items are put with; raises ValueError naming what they cannot be put with."""
    _, ids, iterations, weights, keys, tombstones = zip(*puts, strict=True)
    try:
        if can_be_summed(weights):
            # In place: a message that is given to another's constructor is copied, its items one by one.
            add_columns(items, ids=ids, keys=keys, weights=weights, tombstones=tombstones, iterations=iterations)
            return
    except (TypeError, ValueError):
        pass
    raise ValueError(next(filter(None, map(_fault, puts)), "put: got what no message can hold"))


def _fault(put: Put) -> str:
    """Says what is wrong with what an item is put with; empty where nothing is."""
    for name in ("id", "key", "tombstone"):
        value = getattr(put, name)
        if not isinstance(value, str):
            return f"put: got {name} {value!r}, want a str: give it {str(value)!r}"
        if value != value.encode("utf-8", "replace").decode():
            return f"put: got {name} {value!r}, want one that UTF-8 can spell: it has half a surrogate pair"
    try:
        if not 0 <= operator.index(put.iteration) < 1 << 64:
            return f"put: got iteration {put.iteration}, want 0 or more: count iterations from 0"
    except TypeError:
        return f"put: got iteration {put.iteration!r}, want an int"
    try:
        in_bounds = 0 <= put.weight <= MAX_WEIGHT
    except TypeError:
        in_bounds = False
    return "" if in_bounds else f"put: got weight {put.weight!r}, want a number from 0 to {MAX_WEIGHT:.0f}"


def add_payloads(items: comm_pb2.Items, payloads: Sequence[bytes | comm_pb2.Block]) -> None:
    """Writes the items' payloads."""
    try:
        items.payloads.extend(payloads)  # type: ignore[arg-type]
    except TypeError:
        # There are blocks among them: seldom, where there are many.
        del items.payloads[:]
        items.payloads.extend([payload if isinstance(payload, bytes) else b"" for payload in payloads])
        items.blocks.extend([payload for payload in payloads if isinstance(payload, comm_pb2.Block)])


def rows(items: comm_pb2.Items) -> Iterator[tuple[str, str, float, str, int, str, int, bytes | comm_pb2.Block]]:
    """Returns each item's id, key, weight, tombstone, iteration, producer, lease, and its bytes or their block.

    Raises ProtocolError for columns that do not fit, and weights that cannot be summed.
    """
    # Slices: to iterate over a message's column is to ask for its values one by one.
    payloads: list[bytes | comm_pb2.Block] = items.payloads[:]  # type: ignore[assignment]
    blocks = items.blocks[:]
    count = len(payloads)
    if payloads.count(b"") != len(blocks):
        raise ProtocolError(f"got {len(blocks)} blocks, want {payloads.count(b'')}, one an item without bytes")
    if blocks:
        left = iter(blocks)
        payloads = [payload or next(left) for payload in payloads]
    columns: list[Sequence[Any]] = []
    for name, default in _DEFAULTS.items():
        values = getattr(items, name)[:]
        if name == "weights" and not can_be_summed(values):
            raise ProtocolError(f"got weights {values}, want 0 to {MAX_WEIGHT:.0f}")
        if len(values) != count:
            if len(values) > 1:
                raise ProtocolError(
                    f"got a column of {len(values)} for {count} items, want one each, one for all, or none"
                )
            values = (values or [default]) * count
        columns.append(values)
    return zip(*columns, payloads, strict=True)
