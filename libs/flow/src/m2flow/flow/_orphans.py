"""Episodes that died with the process that held them."""

import threading
from collections.abc import Iterable, Sequence

from m2flow.worker import Item


class Orphans:
    """Tells, in a process that was started anew, which items belong to episodes of the process before it.

    A process may die when what begins an episode is not committed yet, but the step that follows is: the episode begins
    anew here, and its next step must not be taken for one of the new. So whoever has seen no more of an item than its
    begin does not know it in a later round.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        # The stages that items came to here, a visit each, by iteration and place.
        self._visits: dict[int, dict[tuple[int, ...], list[str]]] = {}

    def bury(self, iterations: Iterable[int]) -> None:
        """Gives up what was begun in these iterations before this process was there."""
        with self._mutex:
            self._visits = {iteration: {} for iteration in iterations}

    def among(
        self, iteration: int, stage: str, items: Sequence[Item], rounds: Sequence[int], *, enters: bool
    ) -> list[Item]:
        """The items whose episodes are lost; the others count as begun from now on.

        `enters`: by this stage an item comes to the worker for the first time, in its first round.
        """
        with self._mutex:
            if iteration not in self._visits:
                return []
            lost = []
            for item, round_ in zip(items, rounds, strict=True):
                visits = self._visits[iteration].setdefault(item.seq, [])
                known = len(visits) > 1 or stage in visits if round_ else enters or visits
                if known:
                    visits.append(stage)
                else:
                    lost.append(item)
            return lost
