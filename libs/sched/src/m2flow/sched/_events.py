"""The discrete-event run of an execution plan: chunks, turns, switches, tails and publications on a clock.

It knows nothing of the plan's tree and shares no formula with the closed form: stages take chunks of their
granularity, or each of their ranks its share of one, when input, room and devices are there; groups that share
devices take turns by (iteration, position), and what one waits for is given to none after it; an offloaded group pays
onload and offload in each turn; a long-tailed stage lets its items out along its curve.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_EPS = 1e-9


@dataclass(frozen=True)
class Task:
    """A node, or a publication, as the simulator sees it.

    Args:
        name: By which others know who runs beside them.
        devices: Ids that it occupies while it runs.
        chunks: Number of chunks in an iteration: of a group in lanes, of shares that a lane takes.
        fraction: Of the iteration's items in one chunk; the last chunk may be smaller.
        position: In the order of turns.
        hold: Keeps its devices until its iteration ends, and begins when all before it on these are through.
        onload_s, offload_s: Paid at the start and the end of every turn.
        needs: Producers as (task, whether all of the iteration must have arrived).
        gathers: By producer whose items are gathered on the way, the fraction of them that a fraction of groups takes.
        room: For consumers with a bounded edge: (task, fraction of the iteration that the edge holds).
        seconds: Of a chunk of a fraction of the iteration, given the names running beside it.
        emits: Fractions of the chunk's time at which the j-th of len(emits) equal parts is out; empty: at its end.
        lanes: Chunks that it works on at once, one a rank; each rank pays the onload of its own.
    """

    name: str
    devices: frozenset[int]
    chunks: int
    fraction: float
    position: int
    hold: bool
    onload_s: float
    offload_s: float
    needs: tuple[tuple[int, bool], ...]
    room: tuple[tuple[int, float], ...]
    seconds: Callable[[float, frozenset[str]], float]
    emits: Sequence[float] = ()
    gathers: Mapping[int, Callable[[float], float]] = field(default_factory=dict)
    lanes: int = 1


class Event(NamedTuple):
    """Something that a lane of a task did, "onload" or "busy", or all of them: "offload"."""

    task: int
    lane: int
    kind: str
    start_s: float
    end_s: float
    iteration: int
    fraction: float


@dataclass(slots=True)
class _State:
    iteration: int = 0
    started: int = 0
    done: int = 0
    running: set[int] = field(default_factory=set)  # lanes at work
    loaded: set[int] = field(default_factory=set)
    holds: bool = False
    leaving: bool = False
    out: dict[int, float] = field(default_factory=dict)  # by iteration: the fraction that has come out
    taken: dict[int, float] = field(default_factory=dict)  # by iteration: the fraction of the input that was taken


class Clockwork:
    """Runs tasks for a number of iterations.

    Args:
        tasks: In any order.
        iterations: How many.
        in_flight: Iterations that may be under way at once: 1 + staleness.
        record: Whether to keep events.
        neighbours: Whether a task's seconds depend on who runs beside it.
    """

    def __init__(
        self, tasks: Sequence[Task], iterations: int, in_flight: int, record: bool, neighbours: bool = True
    ) -> None:
        self._neighbours = neighbours
        self._tasks, self._iterations, self._in_flight = tasks, iterations, in_flight
        self._order = sorted(range(len(tasks)), key=lambda i: tasks[i].position)
        self._states = [_State() for _ in tasks]
        self._conflicts = [
            [j for j, other in enumerate(tasks) if j != i and other.devices & task.devices]
            for i, task in enumerate(tasks)
        ]
        self._bounded = {consumer for task in tasks for consumer, _ in task.room}
        self._earlier = [
            [j for j in others if tasks[j].position < tasks[i].position] for i, others in enumerate(self._conflicts)
        ]
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._now = 0.0
        self._record = record
        self._finished = [0] * iterations
        self.events: list[Event] = []
        self.ends: list[float] = [0.0] * iterations

    def run(self) -> list[float]:
        """Returns when each iteration ended, in seconds.

        Raises:
            RuntimeError: some task can never start: the plan deadlocks; the message names who waits.
        """
        self._dispatch()
        while self._heap:
            self._now, _, action = heapq.heappop(self._heap)
            action(self._now)
            while self._heap and self._heap[0][0] <= self._now + _EPS:
                heapq.heappop(self._heap)[2](self._now)
            self._dispatch()
        waiting = [t.name for t, s in zip(self._tasks, self._states, strict=True) if s.iteration < self._iterations]
        if waiting:
            raise RuntimeError(f"the plan never ends: {waiting} wait for input, room or devices that do not come")
        return self.ends

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def _dispatch(self) -> None:
        """Starts whoever can start; that may make room for a producer that comes before it in the order."""
        while self._start_all():
            pass

    def _start_all(self) -> bool:
        """Gives devices to whoever can start, by ticket; what an earlier ticket waits for is given to no later one.

        Says whether one started that makes room.
        """
        order, room, waiting = self._order, False, set[int]()
        if self._in_flight > 1:
            order = sorted(order, key=lambda i: (self._states[i].iteration, self._tasks[i].position))
        for index in order:
            state = self._states[index]
            while self._has_lane(index) and self._ready(index):
                if not state.holds and any(self._states[j].holds or j in waiting for j in self._conflicts[index]):
                    waiting.add(index)
                    break
                state.holds = True
                room |= index in self._bounded
                self._start(index)
        return room

    def _has_lane(self, index: int) -> bool:
        """Whether a lane and a chunk are there."""
        state, task = self._states[index], self._tasks[index]
        if state.leaving or len(state.running) == task.lanes or state.started == task.chunks:
            return False
        return state.iteration < self._iterations

    def _ready(self, index: int) -> bool:
        """Whether input and room for the next chunk are there, and the turn has come where turns are an iteration long:
        those before it on its devices are through."""
        state, task = self._states[index], self._tasks[index]
        if state.iteration >= self._in_flight and self._finished[state.iteration - self._in_flight] < len(self._tasks):
            return False
        if task.hold and any(self._states[j].iteration <= state.iteration for j in self._earlier[index]):
            return False
        wanted = min(1.0, (state.started + 1) * task.fraction)
        for producer, whole in task.needs:
            out = self._states[producer].out.get(state.iteration, 0.0)
            needed = task.gathers[producer](wanted) if producer in task.gathers else wanted
            if out < (1.0 if whole else needed) - _EPS:
                return False
        ahead = state.started * task.fraction
        for consumer, room in task.room:
            held = min(1.0, ahead + task.fraction) - self._states[consumer].taken.get(state.iteration, 0.0)
            if held > room + _EPS:
                return False
        return True

    def _start(self, index: int) -> None:
        state, task = self._states[index], self._tasks[index]
        part = min(1.0, (state.started + 1) * task.fraction) - state.started * task.fraction
        state.started += 1
        state.taken[state.iteration] = min(1.0, state.started * task.fraction)
        begin = self._now
        lane = next(number for number in range(task.lanes) if number not in state.running)
        if lane not in state.loaded and task.onload_s:
            self._note(index, lane, "onload", begin, begin + task.onload_s, 0.0)
            begin += task.onload_s
        state.loaded.add(lane)
        state.running.add(lane)
        beside: frozenset[str] = frozenset()
        if self._neighbours:
            others = zip(self._tasks, self._states, strict=True)
            beside = frozenset(t.name for t, s in others if s.running and t is not task)
        seconds = task.seconds(part, beside)
        self._note(index, lane, "busy", begin, begin + seconds, part)
        for j, moment in enumerate(task.emits[:-1], start=1):
            self._at(begin + moment * seconds, self._emission(state, j / len(task.emits)))
        self._at(begin + seconds, lambda now: self._end(index, lane, now))

    @staticmethod
    def _emission(state: _State, fraction: float) -> Callable[[float], None]:
        iteration = state.iteration

        def emit(_: float) -> None:
            state.out[iteration] = fraction

        return emit

    def _end(self, index: int, lane: int, now: float) -> None:
        state, task = self._states[index], self._tasks[index]
        state.done += 1
        state.running.remove(lane)
        over = state.done == task.chunks
        state.out[state.iteration] = 1.0 if over else state.done * task.fraction
        if state.running or (task.hold and not over):
            return
        if task.offload_s:
            state.leaving = True
            self._note(index, 0, "offload", now, now + task.offload_s, 0.0)
            self._at(now + task.offload_s, lambda _: self._release(index, over))
        else:
            self._release(index, over)

    def _release(self, index: int, over: bool) -> None:
        state = self._states[index]
        state.holds = state.leaving = False
        state.loaded.clear()
        if over:
            self._finished[state.iteration] += 1
            if self._finished[state.iteration] == len(self._tasks):
                self.ends[state.iteration] = self._now
            state.iteration, state.started, state.done = state.iteration + 1, 0, 0

    def _note(self, index: int, lane: int, kind: str, start: float, end: float, fraction: float) -> None:
        if self._record:
            self.events.append(Event(index, lane, kind, start, end, self._states[index].iteration, fraction))
