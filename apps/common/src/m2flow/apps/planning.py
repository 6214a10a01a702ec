"""Which plan a run has: a mode, a file, or the one that the scheduler finds from what the first iterations measured."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from m2flow.apps.atomic import replace_file
from m2flow.apps.errors import CheckFailed
from m2flow.apps.forecast import Forecast
from m2flow.apps.run_directory import RunDirectory
from m2flow.flow import Graph, PlanError, check_plan, hybrid_plan, load_plan, spatial_plan, temporal_plan
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.files import to_json
from m2flow.worker import Cluster

__all__ = [
    "AutoPlanning",
    "FixedPlanning",
    "Planning",
    "cluster_spec",
    "difference",
    "fixed_plan",
    "probes",
]

Say = Callable[[str], None]
# Chunks of an iteration where groups work side by side: with more of them, generating in small batches costs more than
# the overlap saves (the same 64 samples on one core take 2.1 s of CPU in one batch, 5.3 s in four, 8.7 s in eight).
_NUM_CHUNKS = 4
MODES: Mapping[str, Callable[[Graph, Cluster], flow_pb2.ExecutionPlan]] = {
    "temporal": temporal_plan,
    "spatial": partial(spatial_plan, num_chunks=_NUM_CHUNKS),
    "hybrid": partial(hybrid_plan, num_chunks=_NUM_CHUNKS),
}


class Planning(Protocol):
    """Where the driver gets its plan from, before the first iteration and between iterations.

    `switch_s` are the seconds that the last change of plans took: the driver says so.
    """

    plan: flow_pb2.ExecutionPlan
    switch_s: float

    @property
    def predicted_s(self) -> float | None:
        """The seconds that the next iteration will take; None while a stage has not been measured."""
        ...

    def observe(self, timeline: flow_pb2.Timeline, *, remaining_iterations: int) -> bool:
        """Takes in one iteration under `plan`; returns whether `plan` is another one now."""
        ...


class FixedPlanning:
    """One plan for the whole run. Its iterations are measured, so that the next one's seconds can be predicted."""

    switch_s = 0.0

    def __init__(self, plan: flow_pb2.ExecutionPlan, forecast: Forecast) -> None:
        self.plan = plan
        self._forecast = forecast
        self._warm = False

    @property
    def predicted_s(self) -> float | None:
        """What earlier iterations, and earlier runs, say of the next one."""
        return self._forecast.seconds(self.plan)

    def observe(self, timeline: flow_pb2.Timeline, *, remaining_iterations: int) -> bool:
        """Returns False: nothing that is measured changes the plan. The first iteration is a warm-up."""
        if self._warm:
            self._forecast.learn(timeline, self.plan)
        self._warm = True
        return False


class AutoPlanning:
    """Runs some iterations under each of some plans, asks the scheduler for the best, and goes on with it.

    These iterations are training steps like any other: every synchronous plan computes the same. Where a plan moves
    groups to other devices, its first iteration is a warm-up and is not counted. Where earlier runs have measured what
    these plans would, the best plan is asked for at once. From then on every iteration is folded into the profile, and
    the plan changes again when a better one's gain pays for the change. Profile and explanation are kept in the run
    directory.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        forecast: Forecast,
        run: RunDirectory,
        *,
        profile_iterations: int,
        say: Say,
    ) -> None:
        self._graph, self._cluster, self._run = graph, cluster, run
        self._forecast, self._iterations, self._say = forecast, profile_iterations, say
        self._probes = probes(graph, cluster)
        self._settled, self._warming, self._measured, self._gains = False, True, 0, 0
        known = forecast.covers(self._probes)
        self.plan = self._probes.pop(0)
        self.switch_s = 0.0
        if known:
            self._probes.clear()
            self._settle()

    @property
    def predicted_s(self) -> float | None:
        """What earlier iterations, and earlier runs, say of the next one."""
        return self._forecast.seconds(self.plan)

    def observe(self, timeline: flow_pb2.Timeline, *, remaining_iterations: int) -> bool:
        """Takes in one iteration; True when the next one is under another plan."""
        if self._warming:
            self._warming = False
            return False
        self._forecast.learn(timeline, self.plan)
        self._measured += 1
        if self._measured < self._iterations:
            return False
        if self._settled:
            return self._reconsider(remaining_iterations)
        return self._take(self._probes.pop(0)) if self._probes else self._settle()

    def _take(self, plan: flow_pb2.ExecutionPlan) -> bool:
        self._warming = _devices(self.plan) != _devices(plan)
        self.plan, self._measured, self._gains = plan, 0, 0
        return True

    def _settle(self) -> bool:
        answer = self._forecast.explained()
        replace_file(self._run.profile, to_json(self._forecast.profile))
        replace_file(self._run.explanation, answer.text + "\n")
        self._say(answer.text)
        chosen = _first_that_runs(self._graph, self._cluster, answer.response)
        self._settled = True
        if chosen is None:
            reason = answer.response.infeasible or "none of its plans can run here"
            self._say(f"plan=auto: no plan was found ({reason}): going on with {self.plan.mode}")
            return False
        return self._take(chosen) if chosen != self.plan else False

    def _reconsider(self, remaining_iterations: int) -> bool:
        found = self._forecast.replan(self.plan, remaining_iterations=remaining_iterations, switch_s=self.switch_s)
        better = found.plan is not None and _runs(self._graph, self._cluster, found.plan)
        # One long iteration is no drift: a gain counts that the next iteration shows too.
        self._gains = self._gains + 1 if better else 0
        if found.plan is None or self._gains < 2:
            return False
        self._say(f"plan=auto: {found.reason}")
        return self._take(found.plan)


def fixed_plan(plan: str, graph: Graph, cluster: Cluster, *, staleness: int = 0) -> flow_pb2.ExecutionPlan:
    """Returns the plan of a mode's name, of that staleness, or of a file, which says its own.

    Raises CheckFailed when there is none that can run here.
    """
    try:
        if plan in MODES:
            made = MODES[plan](graph, cluster)
            made.staleness = staleness
        elif Path(plan).is_file():
            made = load_plan(Path(plan))
            if staleness not in (0, made.staleness):
                raise CheckFailed([f"staleness: got {staleness}, and {plan} says {made.staleness}: set it there alone"])
        else:
            raise CheckFailed([f"plan: got {plan!r}, want auto, {', '.join(MODES)}, or an existing file: correct it"])
        check_plan(graph, made, cluster)
    except PlanError as error:
        raise CheckFailed([f"plan={plan}: {reason}" for reason in error.reasons]) from None
    return made


def probes(graph: Graph, cluster: Cluster) -> list[flow_pb2.ExecutionPlan]:
    """Returns the plans that are worth measuring: in turns on all devices, and side by side where that can be.

    Each is measured at two granularities, since what a call costs before its first item decides how fine to go.
    """
    turns = temporal_plan(graph, cluster)
    plans = [turns, _in_chunks(graph, turns, _NUM_CHUNKS)]
    if len(cluster.devices) > 1:
        plans += [MODES["spatial"](graph, cluster), spatial_plan(graph, cluster, num_chunks=_NUM_CHUNKS // 2)]
    # Of few items, two granularities may be one.
    return [plan for number, plan in enumerate(plans) if plan not in plans[:number]]


def difference(before: flow_pb2.ExecutionPlan, after: flow_pb2.ExecutionPlan) -> str:
    """Returns what the second plan has and the first has not, in words: two plans may have one mode."""
    known = set(_traits(before))
    return ", ".join(trait for trait in _traits(after) if trait not in known) or "in other turns"


def _traits(plan: flow_pb2.ExecutionPlan) -> Iterator[str]:
    for group in plan.groups:
        yield f"{group.group} on {' '.join(map(str, group.device_ids))}"
    for stage in plan.stages:
        yield f"{stage.stage} by {stage.granularity}"
    for edge in plan.edges:
        bound = edge.capacity or "any number"
        yield f"{bound} from {edge.producer} to {edge.consumer}"


def _in_chunks(graph: Graph, plan: flow_pb2.ExecutionPlan, num_chunks: int) -> flow_pb2.ExecutionPlan:
    """The plan with its stages' items moving in chunks, and one chunk in a loop at once; devices and turns stay."""
    finer = flow_pb2.ExecutionPlan()
    finer.CopyFrom(plan)
    ranks = {own.group: own.num_ranks for own in plan.groups}
    for own in finer.stages:
        stage = graph.stages[own.stage]
        if stage.kind == flow_pb2.STAGE_KIND_WORK:
            own.granularity = max(ranks[stage.group], -(-own.granularity // num_chunks))
    granularity = {own.stage: own.granularity for own in finer.stages}
    for edge, loop in zip(finer.edges, graph.cycles, strict=True):  # in turns, only loops are bounded
        edge.capacity = max(granularity.get(name, 0) for name in loop)
    return finer


def cluster_spec(cluster: Cluster) -> sched_pb2.ClusterSpec:
    """Returns the devices at hand as the scheduler reads them."""
    spec = sched_pb2.ClusterSpec()
    for name in cluster.nodes:
        devices = cluster.on(name)
        node = spec.nodes.add(name=name, count=1)
        node.cores = len([device for device in devices if device.kind == "cpu"])
        for kind in dict.fromkeys(device.kind for device in devices):
            alike = [device for device in devices if device.kind == kind]
            node.devices.add(kind=kind, count=len(alike), memory_bytes=min(device.memory_bytes for device in alike))
    return spec


def _first_that_runs(graph: Graph, cluster: Cluster, response: sched_pb2.PlanResponse) -> flow_pb2.ExecutionPlan | None:
    return next((ranked.plan for ranked in response.plans if _runs(graph, cluster, ranked.plan)), None)


def _devices(plan: flow_pb2.ExecutionPlan) -> dict[str, list[int]]:
    return {group.group: list(group.device_ids) for group in plan.groups}


def _runs(graph: Graph, cluster: Cluster, plan: flow_pb2.ExecutionPlan) -> bool:
    try:
        check_plan(graph, plan, cluster)
    except PlanError:
        return False
    return True
