"""The runtime on the driver's side: it starts groups under a plan, begins iterations and waits for their end.

Between the stages nothing passes through it: it feeds the source's items in and takes what reaches the sink.
"""

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations

from m2flow.flow._clocks import Clocks
from m2flow.flow._mail import gate_channel, inbox_channel
from m2flow.flow._services import serve
from m2flow.flow.checking import check_plan
from m2flow.flow.errors import RunError, RunStopped
from m2flow.flow.graph import Graph
from m2flow.flow.passes import lower
from m2flow.flow.pending import More, Pending
from m2flow.flow.result import IterationResult
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import AttachedGroup, CallTimeout, GroupSpec, Item, Placement, Session, WorkerGroup

# How long a rank may take to say that its stages have ended, before it is stopped all the same.
_STOP_S = 1.0
_RUNNER = "m2flow.flow.runner:RankRunner"


class Runtime:
    """One program under one plan at a time, on the workers of one session."""

    def __init__(self, graph: Graph, plan: pb.ExecutionPlan, session: Session) -> None:
        """Checks the plan; nothing starts. Raises PlanError with every reason why it cannot run."""
        check_plan(graph, plan, session.cluster)
        self.graph = graph
        self.plan = plan
        self.groups: dict[str, WorkerGroup] = {}
        self._session = session
        self._flow = lower(graph, plan)
        self._runners: dict[str, AttachedGroup] = {}
        self._epoch_ns = time.monotonic_ns()
        self._clocks = Clocks()
        self._next = 0
        self._under_way: list[Pending] = []
        # The groups that are on their devices for calls.
        self._loaded: list[str] = []
        self._stopped = False
        self._board = serve(session)
        session.watchdog.add_witness(lambda now_s: [line for pending in self._under_way for line in pending.waits()])

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self.stop()
        else:
            # An interrupt, perhaps in the middle of `apply`: no stage is waited for, and the session ends all groups.
            self._stopped = True
            self._close_channels()

    def start(self, iteration: int = 0, *, carried: Mapping[str, Sequence[Item]] | None = None) -> None:
        """Starts the groups, and gives receivers the weights of their source as version `iteration`. Blocks.

        `iteration` is the first that will run. `carried` is what `carried` gave in a run that this one goes on from.
        Raises WorkerFailed where a worker does not start.
        """
        self._next = iteration
        wanted = [(self._spec(group.name), Placement(group.ranks)) for group in self._flow.groups]
        self._attach(self._session.start_all(wanted))
        self._carry(carried or {})
        self._open_channels()
        self._publish(iteration, self.groups.keys())

    def run(self, iteration: int, items: Sequence[Item], *, more: More | None = None) -> IterationResult:
        """Runs one iteration on the source's items and returns what it gave. Blocks; raises as `Pending.result` does.

        Items have the places (0,), (1,) ... in order; ValueError where they have not. A program with a quota asks
        `more(place)` for further items from that place on, until the quota is full or there are none.
        """
        return self.submit(iteration, items, more=more).result()

    def submit(self, iteration: int, items: Sequence[Item], *, more: More | None = None) -> Pending:
        """Begins an iteration; as many may be under way as the plan's staleness allows, and one more.

        Iterations are numbered without gaps. Blocks only where the source's inbox is bounded.
        """
        self._check_submit(iteration)
        pending = Pending(
            self._flow,
            iteration,
            self._session.endpoint,
            self._runners,
            self._under_way,
            board=self._board,
            more=more,
            clocks=self._clocks,
            epoch_ns=self._epoch_ns,
            on_over=self._under_way.remove,
            stir=self._session.watchdog.stir,
        )
        pending.begin(items)
        self._under_way.append(pending)
        self._next = iteration + 1
        return pending

    @contextmanager
    def loaded(self, *names: str) -> Iterator[None]:
        """Keeps groups on their devices, with their newest weights, for calls between iterations. Blocks at first.

        Groups that a plan never offloads are there at any time, and need it not. Raises RunError while an iteration is
        under way, for unknown groups, and for groups that take turns on the same devices; nothing runs meanwhile.
        """
        self._refuse_now("loaded")
        if unknown := sorted({*names} - self._runners.keys()):
            raise RunError(f"loaded: got groups {unknown}, want some of {', '.join(self._runners)}")
        self._refuse_together([*self._loaded, *names])
        runners = [self._runners[name] for name in names]
        self._loaded += names
        try:
            for handle in [runner.load(self._next, self._flow) for runner in runners]:
                handle.wait()
            yield
        finally:
            self._loaded = [name for name in self._loaded if name not in names]
            for handle in [runner.unload() for runner in runners]:
                handle.wait()

    def apply(self, plan: pb.ExecutionPlan) -> None:
        """Changes the plan between iterations. Blocks.

        Groups whose ranks or devices change are re-placed with their state (`Session.replace_all`), or published to;
        the others keep running, and what quotas carry over stays. Raises PlanError where the plan cannot run, and
        RunError while an iteration is under way or a group is loaded; the old plan then stays.
        """
        self._refuse_now("apply")
        self._refuse_loaded("apply")
        check_plan(self.graph, plan, self._session.cluster)
        old, flow = self._flow, replace(lower(self.graph, plan), generation=self._flow.generation + 1)
        moved = [group for group in flow.groups if group.ranks != old.group(group.name).ranks]
        carried = self.carried()
        for handle in [self._runners[group.name].stop() for group in moved]:
            handle.wait()
        heirs = self._session.replace_all([(self.groups[group.name], Placement(group.ranks)) for group in moved])
        self._close_channels()
        self.plan, self._flow = plan, flow
        self._attach(heirs)
        self._carry(carried)
        self._open_channels()
        self._publish(self._next, {group.name for group in moved})

    def carried(self) -> dict[str, list[Item]]:
        """What quotas keep for the next iteration, by quota: what a run that goes on from here starts with. Blocks.

        Raises RunError while an iteration is under way.
        """
        self._refuse_now("carried")
        kept: dict[str, list[Item]] = {}
        for group in self._carriers():
            for found in self._runners[group].carried().result():
                kept |= found
        return {name: items for name, items in kept.items() if items}

    def stop(self) -> None:
        """Ends the stages and stops the groups. Blocks; the second time it does nothing."""
        if self._stopped:
            return
        self._stopped = True
        self._close_channels()
        if self._session.failure is None:
            for handle in [runner.stop() for runner in self._runners.values()]:
                with suppress(CallTimeout):  # a stage in the middle of a long call is stopped with its group
                    handle.wait(_STOP_S)
            for group in self.groups.values():
                self._session.stop(group)

    def _check_submit(self, iteration: int) -> None:
        self._refuse_idle(f"iteration {iteration}")
        self._refuse_loaded("submit")
        if iteration != self._next:
            raise ValueError(f"submit: got iteration {iteration}, want {self._next}, the next one")
        if len(self._under_way) > self._flow.staleness:
            first = self._under_way[0].iteration
            raise RunError(
                f"submit: iteration {first} is under way and the plan's staleness is {self._flow.staleness}: "
                f"take its result before iteration {iteration}"
            )

    def _spec(self, name: str) -> GroupSpec:
        spec = self.graph.specs[name]
        if not isinstance(spec, GroupSpec):
            raise RunError(f"group {name}: got a {type(spec).__name__}, want a GroupSpec: make it with .group")
        return replace(spec, name=name)

    def _attach(self, started: Sequence[WorkerGroup]) -> None:
        for one in started:
            self.groups[one.name] = one
            self._runners[one.name] = one.attach("flow", _RUNNER, self._epoch_ns)
            self._clocks.measure(one.name, self._runners[one.name])
        for group in self._flow.groups:
            self._runners[group.name].rest(self._flow).wait()

    def _carriers(self) -> list[str]:
        """The groups whose stages have quotas in their inboxes."""
        quotas = [stage for stage in self._flow.stages if any(op.kind == "first" for op in stage.inbox.ops)]
        return list(dict.fromkeys(stage.group for stage in quotas))

    def _carry(self, carried: Mapping[str, Sequence[Item]]) -> None:
        for group in self._carriers():
            self._runners[group].carry(carried).wait()

    def _refuse_idle(self, asked: str) -> None:
        if self._stopped or not self._runners:
            raise RunStopped(f"{asked}: the runtime is not running, want start() before it")

    def _refuse_loaded(self, asked: str) -> None:
        if self._loaded:
            names = ", ".join(self._loaded)
            raise RunError(f"{asked}: runtime.loaded() keeps {names} on their devices, want its `with` to end first")

    def _refuse_together(self, names: Sequence[str]) -> None:
        flow = self._flow
        locked = {name for stage in flow.stages if stage.locked for name in (stage.group, stage.to)}
        for name, other in combinations(names, 2):
            common = sorted(set(flow.group(name).devices) & set(flow.group(other).devices))
            if common and {name, other} <= locked:
                raise RunError(f"loaded: {name} and {other} take turns on devices {common}, want one at a time")

    def _refuse_now(self, asked: str) -> None:
        self._refuse_idle(asked)
        if self._under_way:
            first = self._under_way[0].iteration
            raise RunError(f"{asked}: iteration {first} is under way, want its result taken first")

    def _publish(self, version: int, renewed: Set[str]) -> None:
        """Has groups that were renewed give their weights to their receivers and get those of their source. Blocks."""
        publishes = [stage for stage in self._flow.stages if stage.to]
        senders = [stage.group for stage in publishes if stage.group in renewed]
        receivers = [stage.to for stage in publishes if not renewed.isdisjoint((stage.to, stage.group))]
        handles = [self._runners[name].send_weights(version, self._flow) for name in dict.fromkeys(senders)]
        handles += [self._runners[name].receive_weights(version, self._flow) for name in dict.fromkeys(receivers)]
        for handle in handles:
            handle.wait()

    def _open_channels(self) -> None:
        flow, endpoint = self._flow, self._session.endpoint
        for stage in flow.stages:
            if stage.inbox.ports:
                producers = [name for port in stage.inbox.ports for name in flow.endpoints(port)]
                endpoint.host_channel(
                    inbox_channel(flow.generation, stage.name),
                    capacity=stage.inbox.capacity,
                    producers=list(dict.fromkeys(producers)),
                    consumers=flow.endpoints(stage.name),
                )
            if stage.after:
                endpoint.host_channel(
                    gate_channel(flow.generation, stage.name),
                    producers=list(dict.fromkeys(name for before in stage.after for name in flow.endpoints(before))),
                    consumers=flow.endpoints(stage.name),
                )

    def _close_channels(self) -> None:
        flow, endpoint = self._flow, self._session.endpoint
        for stage in flow.stages:
            if stage.inbox.ports:
                endpoint.drop_channel(inbox_channel(flow.generation, stage.name))
            if stage.after:
                endpoint.drop_channel(gate_channel(flow.generation, stage.name))
