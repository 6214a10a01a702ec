"""What a stage owes: each item that it takes goes on once, as itself or as all its children.

Ids and source order know items by their places alone; gathers, quotas and the heads of loops count on what is to come.
"""

from collections.abc import Iterable

from m2flow.flow.errors import RunError
from m2flow.flow.microflow import MicroStage
from m2flow.flow.order import Seq, num_children
from m2flow.worker import Item

_MOST_SHOWN = 4


class Debts:
    """The debts of one call of a stage."""

    def __init__(self, stage: MicroStage) -> None:
        self._stage = stage
        self._owed: dict[Seq, str] = {}

    def take(self, items: Iterable[Item]) -> None:
        """Notes what the stage was given."""
        self._owed |= {item.seq: item.id for item in items}

    def pay(self, item: Item) -> None:
        """Notes what the stage gives. Raises RunError where it does not owe that, or no longer."""
        if self._owed.pop(item.seq, None) is not None:
            return
        if not self._stage.keeps:
            for parent in [item.seq[:depth] for depth in range(1, len(item.seq))]:
                if parent in self._owed and (size := num_children(item, parent)):
                    name = self._owed.pop(parent)
                    self._owed |= {(*parent, index): f"{name}.{index}" for index in range(size)}
        if self._owed.pop(item.seq, None) is None:
            raise RunError(f"{self._stage.name}: the stage gave {item.id} and owes {self._names()}: {self._want()}")

    def settle(self) -> None:
        """Raises RunError where the stage returned and still owes something."""
        if self._owed:
            raise RunError(f"{self._stage.name}: the stage returned and still owes {self._names()}: {self._want()}")

    def _names(self) -> str:
        names = list(self._owed.values())
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        return ", ".join(names[:_MOST_SHOWN]) + more or "nothing more"

    def _want(self) -> str:
        want = "want each item that it takes once, as itself, or as item.as_tombstone(reason) where it drops it"
        if self._stage.keeps:
            return f"{want}; inside a loop that gathers nothing an item has no children"
        return f"{want}, or as all its children by item.child"
