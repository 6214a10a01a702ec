"""A worker that holds its devices for a while: what the device lock is tested with."""

import time

from m2flow.worker.base import Worker
from m2flow.worker.turns import DeviceLock


class Holder(Worker):
    """Each rank is a unit of its own; one that dies is restarted without its call."""

    on_death = "drop"

    def setup(self) -> None:
        """Has a way to the lock."""
        self._lock = DeviceLock(self.context.endpoint)

    def hold(self, seconds: float) -> str:
        """Takes a turn on its devices and keeps it."""
        context = self.context
        owner = f"{context.group}.{context.rank}"
        with self._lock.turn(owner, context.device_ids, (0, context.rank)):
            time.sleep(seconds)
        return "held"
