"""What the driver knows of one rank: what it was asked and has not answered, how it ends, whether it comes again."""

import threading
from collections import deque
from typing import NamedTuple

from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._wire import group_of
from m2flow.worker.wiring import Link

LAST_LOG_LINES = 40


class Asked(NamedTuple):
    """A request, and when it was made."""

    request: pb.SessionRequest
    time_s: float


class KnownRank:
    """One rank as the driver knows it, which it first started at `start_s`.

    `unanswered` are the requests that it has not answered, by call id. While it is `ending` it has been told to stop,
    and has not said that it has.
    """

    def __init__(self, link: Link, order: pb.StartWorker, on_death: str, start_s: float) -> None:
        self.link = link
        self.start_s = start_s
        self.order = order
        self.on_death = on_death
        self.pid = 0
        self.stopped = threading.Event()
        self.leaving = False
        self.restarting = False
        self.ending = False
        self.num_failures = 0
        self.attached: list[pb.SessionRequest] = []
        self.unanswered: dict[int, Asked] = {}
        self.log: deque[str] = deque(maxlen=LAST_LOG_LINES)

    def phase(self) -> str:
        """What it does now: the first of its own calls runs, before those of attached objects."""
        if not self.pid or self.restarting:
            return "start"
        asked = self._in_order()
        own = [request.call.method for request in asked if request.HasField("call") and not request.call.attached]
        beside = [
            f"{request.attach.name}.start"
            if request.HasField("attach")
            else f"{request.call.attached}.{request.call.method}"
            for request in asked
        ]
        return [*own, *beside, "idle"][0]

    def ask(self, request: pb.SessionRequest, time_s: float) -> None:
        """Notes a request that it is to answer."""
        self.unanswered[request.id] = Asked(request, time_s)

    def answered(self, call_id: int) -> bool:
        """Drops a request that needs no answer any more; whether there was one."""
        return self.unanswered.pop(call_id, None) is not None

    def waits(self, now_s: float) -> list[str]:
        """What it is in, for how long, in a line; none where nobody waits for it."""
        if not self.unanswered and self.pid:
            return []
        since_s = min(asked.time_s for asked in self.unanswered.values()) if self.pid else self.start_s
        behind = f", {len(self.unanswered) - 1} more behind it" if len(self.unanswered) > 1 else ""
        name = f"{group_of(self.order.group)}.{self.order.rank}"
        return [f"{name}: in {self.phase()} for {now_s - since_s:.0f} s{behind}"]

    def may_restart(self, max_failures: int) -> bool:
        """Whether its death, after it was up, is followed by another start."""
        return self.on_death != "stop" and self.pid != 0 and not self.leaving and self.num_failures < max_failures

    def to_repeat(self) -> list[pb.SessionRequest]:
        """What a fresh start has to be told: the attached objects first, then what was never answered."""
        made = {request.id: request for request in self.attached}
        return [*made.values(), *(request for request in self._in_order() if request.id not in made)]

    def forget_calls(self) -> list[int]:
        """Drops the worker's own unanswered calls; their ids."""
        own = [one.id for one in self._in_order() if one.HasField("call") and not one.call.attached]
        for call_id in own:
            self.answered(call_id)
        return own

    def _in_order(self) -> list[pb.SessionRequest]:
        """What it has not answered, by age; ids count up."""
        return [self.unanswered[call_id].request for call_id in sorted(self.unanswered)]
