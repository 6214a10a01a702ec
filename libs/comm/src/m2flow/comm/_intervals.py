"""A set of whole numbers that mostly grows at its end, kept as the runs it consists of."""

import bisect


class Intervals:
    """Remembers numbers in as little memory as they have gaps."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, number: int) -> None:
        """Adds a number; a second time changes nothing."""
        if number in self:
            return
        at = bisect.bisect_right(self._starts, number)
        joins_left = at > 0 and self._ends[at - 1] == number - 1
        joins_right = at < len(self._starts) and self._starts[at] == number + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_left:
            self._ends[at - 1] = number
        elif joins_right:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._ends.insert(at, number)

    def __contains__(self, number: int) -> bool:
        at = bisect.bisect_right(self._starts, number)
        return at > 0 and number <= self._ends[at - 1]

    def __len__(self) -> int:
        """Returns the number of runs."""
        return len(self._starts)
