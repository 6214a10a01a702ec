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
    blocks = [payload for payload in payloads if isinstance(payload, comm_pb2.Block)]
    if blocks:
        items.blocks.extend(blocks)
        payloads = [payload if isinstance(payload, bytes) else b"" for payload in payloads]
    items.payloads.extend(payloads)  # type: ignore[arg-type]


def rows(items: comm_pb2.Items) -> Iterator[tuple[str, str, float, str, int, str, int, bytes | comm_pb2.Block]]:
    """Returns each item's id, key, weight, tombstone, iteration, producer, lease, and its bytes or their block.

    Raises ProtocolError for columns that do not fit, and weights that cannot be summed.
    """
    payloads: list[bytes | comm_pb2.Block] = list(items.payloads)
    count = len(payloads)
    if payloads.count(b"") != len(items.blocks):
        raise ProtocolError(f"got {len(items.blocks)} blocks, want {payloads.count(b'')}, one an item without bytes")
    if not can_be_summed(items.weights):
        raise ProtocolError(f"got weights {list(items.weights)}, want 0 to {MAX_WEIGHT:.0f}")
    if items.blocks:
        blocks = iter(items.blocks)
        payloads = [payload or next(blocks) for payload in payloads]
    columns: list[Sequence[Any]] = []
    for name, default in _DEFAULTS.items():
        values = getattr(items, name)
        found = len(values)
        if 1 < found != count:
            raise ProtocolError(f"got a column of {found} for {count} items, want one each, one for all, or none")
        columns.append(values if found == count else [values[0] if found else default] * count)
    return zip(*columns, payloads, strict=True)
