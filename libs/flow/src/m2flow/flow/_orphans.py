"""Episodes that died with the process that held them."""

import threading
from collections.abc import Iterable, Sequence

from m2flow.flow.order import Seq
from m2flow.worker import Item


class Orphans:
    """Tells, in a process that was started anew, which items belong to episodes of the process before it.

    A process may die when what begins an episode is not committed yet, but the step that follows is: the episode begins
    anew here, and its next step must not be taken for one of the new. So an item is known in a later round only to who
    has had it inside the loop.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        # The places that began here, by iteration, and whether each has come to a stage inside a loop.
        self._begun: dict[int, dict[Seq, bool]] = {}

    def bury(self, iterations: Iterable[int]) -> None:
        """Gives up what was begun in these iterations before this process was there."""
        with self._mutex:
            self._begun = {iteration: {} for iteration in iterations}

    def among(
        self, iteration: int, items: Sequence[Item], rounds: Sequence[int], *, enters: bool, in_loop: bool
    ) -> list[Item]:
        """The items whose episodes are lost; the others count as begun from now on.

        `enters`: by this stage an item comes to the worker for the first time, in its first round. `in_loop`: to this
        stage it comes in every round that takes this way.
        """
        with self._mutex:
            if iteration not in self._begun:
                return []
            begun, lost = self._begun[iteration], []
            for item, round_ in zip(items, rounds, strict=True):
                known = begun.get(item.seq, False) if round_ else enters or item.seq in begun
                if known:
                    begun[item.seq] = begun.get(item.seq, False) or in_loop
                else:
                    lost.append(item)
            return lost
