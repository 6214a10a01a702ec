"""One iteration, as the driver sees it: items go in at the source, results come out at the sink."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from m2flow.comm import CommError, Endpoint, TimeoutError_
from m2flow.flow._clocks import Clocks
from m2flow.flow._inbox import Inbox
from m2flow.flow._mail import inbox_channel
from m2flow.flow._outlet import Outlet, Tally
from m2flow.flow._pulse import Pulse
from m2flow.flow._quota import QuotaBoard
from m2flow.flow.errors import RunStopped
from m2flow.flow.glue import MARKS
from m2flow.flow.microflow import DRIVER, MicroFlow, Op, pack
from m2flow.flow.order import Seq
from m2flow.flow.result import IterationResult
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import AttachedGroup, CallHandle, Item

# Gives the items from a place on, as many as it likes, none where the source is dry.
More = Callable[[int], Sequence[Item]]

# How often a wait on channels looks whether the run has failed meanwhile.
_LOOK_S = 0.2
# How long the word of a failure may take to arrive once its effect was seen.
_FAILURE_S = 10.0
# How many results the driver takes with one request.
_AT_ONCE = 256


class Pending:
    """An iteration under way, made by `Runtime.submit`; `result` waits for it."""

    def __init__(
        self,
        flow: MicroFlow,
        iteration: int,
        endpoint: Endpoint,
        runners: Mapping[str, AttachedGroup],
        under_way: Sequence["Pending"],
        *,
        board: QuotaBoard,
        more: More | None,
        clocks: Clocks,
        epoch_ns: int,
        on_over: Callable[["Pending"], None],
        stir: Callable[[], None],
    ) -> None:
        """`under_way` are those that are not over; the caller keeps that list. `on_over` hears of the end of this one,
        `stir` of every sign of life before."""
        self.iteration = iteration
        self._flow = flow
        self._endpoint = endpoint
        self._runners = runners
        self._under_way = under_way
        self._board = board
        self._more = more
        self._clocks = clocks
        self._epoch_ns = epoch_ns
        self._on_over = on_over
        self._start_ns = time.monotonic_ns() - epoch_ns
        source = next(stage.name for stage in flow.stages if stage.kind == "source")
        self._outlet = Outlet(flow, source, endpoint, Tally())
        self._pulse = Pulse(flow, endpoint, stir)
        self._quotas = [op for stage in flow.stages for op in stage.inbox.ops if op.kind == "first"]
        self._num_fed = 0
        self._handles: list[CallHandle] = []
        self._result: IterationResult | None = None

    def begin(self, items: Sequence[Item]) -> None:
        """Starts the stages and feeds the first wave of items. Blocks only where the source's inbox is bounded.

        Raises ValueError, and starts nothing, where the items are not in their places.
        """
        self._check(items)
        for runner in self._runners.values():
            runner.begin(self.iteration, self._numbers(), pack(self._flow))
        self._feed(items)
        if not self._quotas:
            self._outlet.end(self.iteration)

    def result(self) -> IterationResult:
        """What the iteration gave. Blocks.

        Raises WorkerFailed with the first cause where a worker failed, RunStopped where the run was stopped.
        """
        if self._result is None:
            self._result = self._collect()
            self._board.forget(self.iteration)
            self._on_over(self)
        return self._result

    def _collect(self) -> IterationResult:
        self._ask()
        if self._quotas:
            self._feed_until_full()
        lost: Counter[str] = Counter()
        outputs = self._drain(lost)
        for handle in self._handles:
            handle.wait()
        self._raise_failure()
        timeline = pb.Timeline()
        for handle in self._handles:
            for answer in handle.result():
                spans = pb.Timeline.FromString(answer["spans"]).spans
                timeline.spans.extend(self._clocks.aligned(span) for span in spans)
                lost.update(answer["lost"])
        end_ns = time.monotonic_ns() - self._epoch_ns
        timeline.spans.sort(key=lambda span: (span.start_ns, span.end_ns))
        tombstones = {reason: count for reason, count in lost.items() if reason not in MARKS}
        return IterationResult(self.iteration, outputs, timeline, tombstones, self._start_ns, end_ns)

    def waits(self) -> list[str]:
        """What waits in front of which stage, a line each. Blocks for the channels' answers."""
        return [f"iteration {self.iteration}: {line}" for line in self._pulse.waits()]

    def _feed(self, items: Sequence[Item]) -> None:
        self._check(items)
        while True:
            try:
                self._outlet.put(items, [0] * len(items), self.iteration, timeout_s=_LOOK_S)
                break
            except TimeoutError_:
                self._ask()
                self._raise_failure()
        self._num_fed += len(items)

    def _ask(self) -> None:
        """Asks all ranks for the end of the iteration, once: so the driver hears of a failure, and who was restarted
        goes on."""
        self._handles = self._handles or [
            runner.finish(self.iteration, self._numbers(), pack(self._flow)) for runner in self._runners.values()
        ]

    def _numbers(self) -> list[int]:
        """The iterations that are under way, in order."""
        return sorted({self.iteration, *(pending.iteration for pending in self._under_way)})

    def _check(self, items: Sequence[Item]) -> None:
        for number, item in enumerate(items, start=self._num_fed):
            if item.seq != (number,) or item.iteration != self.iteration:
                want = f"Item(({number},), {self.iteration}, fields)"
                raise ValueError(f"submit: got item {item.id}, want {self.iteration}:{number}: make it with {want}")

    def _feed_until_full(self) -> None:
        while not all(self._is_full(op) for op in self._quotas):
            items = self._more(self._num_fed) if self._more is not None else []
            if not items:
                break
            self._feed(items)
        self._outlet.end(self.iteration)

    def _is_full(self, op: Op) -> bool:
        while (verdict := self._board.decided(self.iteration, op, self._num_fed, _LOOK_S)) is None:
            self._raise_failure()
        return verdict

    def _drain(self, lost: Counter[str]) -> list[Item]:
        """Takes what reaches the sink until its producers have ended the iteration, or a worker has failed."""
        sink = next(stage for stage in self._flow.stages if stage.kind == "sink")
        if not sink.inbox.ports:
            return []
        channel = self._endpoint.channel(inbox_channel(self._flow.generation, sink.name), host=DRIVER)
        # Nobody computes on chunks here: what has arrived is taken with one request, not with one for each.
        sink = replace(sink, eager=True, share=_AT_ONCE)
        inbox = Inbox(self._flow, sink, channel, self.iteration, rank=0, quota=None)
        outputs: list[Item] = []
        dead: set[tuple[Seq, str]] = set()  # one that came by several of the program's results is one
        while True:
            try:
                chunk = inbox.next(timeout_s=_LOOK_S)
            except TimeoutError_:
                self._raise_failure()
                continue
            except CommError:
                self._await_failure()
                raise
            if chunk is None:
                break
            outputs += chunk.items
            dead |= {(item.seq, item.tombstone) for item in chunk.dead}
            inbox.ack(chunk)
        inbox.ack_rest()
        lost.update(inbox.lost)
        lost.update(reason for _, reason in dead)
        return sorted(outputs, key=lambda item: item.seq)

    def _await_failure(self) -> None:
        """Gives whoever broke a channel the time to be heard of."""
        end = time.monotonic() + _FAILURE_S
        while time.monotonic() < end:
            self._raise_failure()
            time.sleep(_LOOK_S)

    def _raise_failure(self) -> None:
        """Raises the failure of a rank that has failed; RunStopped where one says that it was stopped."""
        self._pulse.feel()
        for handle in self._handles:
            if handle.done() and any(answer.get("stopped") for answer in handle.result()):
                raise RunStopped(f"iteration {self.iteration}: the run was stopped while {handle.name} waited for it")
