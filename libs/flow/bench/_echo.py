"""A stage that does nothing."""

import time

from m2flow.worker import Item, Worker, stage


class Echo(Worker):
    """Gives back what it takes."""

    @stage
    def work(self, items: list[Item]) -> list[Item]:
        """The items."""
        return items

    def cpu_s(self) -> float:
        """The CPU seconds of this process so far."""
        return time.process_time()
