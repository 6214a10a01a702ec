"""What stages take and give: small trees that know their place in the source order.

An item's `seq` is its position at the source; a child appends its index, so that the order of a whole iteration is
the order of its `seq`s, whatever order things arrive in. `groups` says what a gather has to wait for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from m2flow.comm import register


@register
@dataclass(frozen=True)
class Group:
    """What a gather waits for: `size` items whose groups hold this `key`."""

    key: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"group {self.key!r}: got size {self.size}, want at least 1: a group holds its members")


@register
@dataclass(frozen=True)
class Item:
    """One unit of a stream.

    `seq` is its position in source order, `iteration` the iteration that it belongs to, `fields` its data under the
    field's words (prompt_ids, completion_ids, reward ...), `groups` the gathers that wait for it by their `by`,
    `members` the items of a gathered group, `tombstone` why it carries no data ("" where it does).
    """

    seq: tuple[int, ...]
    iteration: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    members: tuple["Item", ...] = ()
    tombstone: str = ""

    @property
    def id(self) -> str:
        """The name of this place in this iteration, such as "3:5.2"."""
        return f"{self.iteration}:{'.'.join(map(str, self.seq))}"

    def with_fields(self, **fields: Any) -> "Item":
        """The same item with these fields added or replaced."""
        return replace(self, fields={**self.fields, **fields})

    def child(self, index: int, size: int, by: str, **fields: Any) -> "Item":
        """The `index`-th of `size` items that come of this one, to be gathered by `by`.

        It keeps this item's fields and groups, with `fields` added or replaced. Raises ValueError where the index is
        not within the size.
        """
        if not 0 <= index < size:
            raise ValueError(f"child of {self.id}: got index {index} of {size}, want 0 to {size - 1}")
        return Item(
            seq=(*self.seq, index),
            iteration=self.iteration,
            fields={**self.fields, **fields},
            groups={**self.groups, by: Group(self.id, size)},
        )

    def as_tombstone(self, reason: str) -> "Item":
        """The same place without data, so that a gather still completes. Raises ValueError on an empty reason."""
        if not reason:
            raise ValueError(f"tombstone of {self.id}: got no reason, want one: it is counted and shown")
        return replace(self, fields={}, members=(), tombstone=reason)
