"""Items on the wire: in columns, so that what the items of a message share is said once, and lists move whole."""

from collections.abc import Iterator, Sequence
from typing import Any

from m2flow.comm._frames import ProtocolError
from m2flow.proto.comm.v1 import comm_pb2

# The columns beside the payloads, and what an item has for which there is no entry.
_DEFAULTS = {"ids": "", "keys": "", "weights": 0.0, "tombstones": "", "iterations": 0, "producers": "", "leases": 0}

# Sums of weights are floats: above it one would not be told from none.
MAX_WEIGHT = 2.0**53


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
