"""Signs of life of an iteration that the driver cannot see: items that move from stage to stage.

The driver is off the data path, but the indexes of all channels are in it. A run whose counts move is alive; where they
stand still, the watchdog is told how much waits in front of which stage.
"""

import time
from collections.abc import Callable

from m2flow.comm import Endpoint
from m2flow.flow._mail import inbox_channel
from m2flow.flow.microflow import DRIVER, MicroFlow

# How often to look: each look costs a message for each channel.
_LOOK_S = 2.0


class Pulse:
    """The inboxes of one iteration, watched."""

    def __init__(self, flow: MicroFlow, endpoint: Endpoint, stir: Callable[[], None]) -> None:
        """`stir` hears that something moved."""
        self._channels = {
            stage.name: endpoint.channel(inbox_channel(flow.generation, stage.name), host=DRIVER)
            for stage in flow.stages
            if stage.inbox.ports
        }
        self._stir = stir
        self._moved = -1
        self._next_s = 0.0

    def feel(self) -> None:
        """Looks, if it is time to, whether anything moved since the last look."""
        if time.monotonic() < self._next_s:
            return
        stats = [channel.stats() for channel in self._channels.values()]
        moved = sum(one.put + one.acked + one.leased for one in stats)
        if moved != self._moved:
            self._moved = moved
            self._stir()
        self._next_s = time.monotonic() + _LOOK_S

    def waits(self) -> list[str]:
        """A line for each inbox that holds items, or whose items are with a stage that has not finished them."""
        found = {name: channel.stats() for name, channel in self._channels.items()}
        return [
            f"{name}: {one.queued} items wait for it, {one.leased} are with it"
            for name, one in found.items()
            if one.queued or one.leased
        ]
