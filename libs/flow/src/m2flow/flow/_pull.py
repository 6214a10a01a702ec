"""The inbox of a stage that batches by itself, as long as one call lasts: worker's `Inbox`."""

from collections import deque
from collections.abc import Callable, Iterable

from m2flow.worker import Item


class Pull:
    """Gives the items in hand first, then those that `more(most)` has."""

    def __init__(self, items: Iterable[Item], more: Callable[[int], list[Item]]) -> None:
        self._in_hand = deque(items)
        self._more = more

    def take(self, most: int) -> list[Item]:
        """Up to `most` of the items that are there now. Blocks for the channel's answer."""
        self._in_hand.extend(self._more(most - len(self._in_hand)))
        return [self._in_hand.popleft() for _ in range(min(most, len(self._in_hand)))]
