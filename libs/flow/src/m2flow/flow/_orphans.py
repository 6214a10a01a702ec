"""Episodes that died with the process that held them."""

import threading
from collections.abc import Iterable, Sequence

from m2flow.worker import Item


class Orphans:
    """Tells, in a process that was started anew, which items belong to episodes of the process before it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._begun: dict[int, set[tuple[int, ...]]] = {}

    def bury(self, iterations: Iterable[int]) -> None:
        """Gives up what was begun in these iterations before this process was there."""
        with self._mutex:
            self._begun = {iteration: set() for iteration in iterations}

    def among(self, iteration: int, items: Sequence[Item], rounds: Sequence[int], *, enters: bool) -> list[Item]:
        """The items whose episodes are lost; the others count as begun from now on.

        `enters`: by this stage an item comes to the worker for the first time, in its first round.
        """
        with self._mutex:
            if iteration not in self._begun:
                return []
            begun = self._begun[iteration]
            lost = [
                item
                for item, round_ in zip(items, rounds, strict=True)
                if item.seq not in begun and (round_ or not enters)
            ]
            begun |= {item.seq for item in items} - {item.seq for item in lost}
            return lost
