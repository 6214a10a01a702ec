"""Which plan a run has: a mode, a file, or the one that the scheduler finds from what the first iterations measured."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from google.protobuf import json_format
from google.protobuf.message import Message

from m2flow import sched
from m2flow.apps.atomic import replace_file
from m2flow.apps.errors import CheckFailed
from m2flow.apps.run_directory import RunDirectory
from m2flow.flow import Graph, PlanError, check_plan, hybrid_plan, load_plan, spatial_plan, temporal_plan
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.worker import Cluster

__all__ = [
    "AutoPlanning",
    "FixedPlanning",
    "Planning",
    "cluster_spec",
    "fixed_plan",
    "plan_json",
    "probes",
    "write_plan",
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
    """Where the driver gets its plan from, before the first iteration and between iterations."""

    plan: flow_pb2.ExecutionPlan

    def observe(self, timeline: flow_pb2.Timeline) -> bool:
        """Takes in one iteration under `plan`; returns whether `plan` is another one now."""
        ...


class FixedPlanning:
    """One plan for the whole run."""

    def __init__(self, plan: flow_pb2.ExecutionPlan) -> None:
        self.plan = plan

    def observe(self, timeline: flow_pb2.Timeline) -> bool:
        """Returns False: nothing that is measured changes the plan."""
        return False


class AutoPlanning:
    """Runs some iterations under each of some plans, then asks the scheduler for the best and stays with it.

    These iterations are training steps like any other: every synchronous plan computes the same. The first iteration
    under a plan is its warm-up and is not counted. The profile and the explanation are kept in the run directory.
    What is measured is folded into `profile`, which names model, hardware and version.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        profile: sched_pb2.Profile,
        run: RunDirectory,
        *,
        profile_iterations: int,
        say: Say,
    ) -> None:
        self._graph, self._cluster, self._run = graph, cluster, run
        self._iterations, self._say = profile_iterations, say
        self._probes = probes(graph, cluster)
        self._seen = 0
        self._profile = profile
        self._settled = False
        self.plan = self._probes[0]

    def observe(self, timeline: flow_pb2.Timeline) -> bool:
        """Takes in one iteration; True when the next one is under another plan."""
        if self._settled:
            return False
        probe, iteration = divmod(self._seen, self._iterations)
        self._seen += 1
        if iteration > 0:
            self._profile = sched.fold_spans(self._profile, timeline, self._graph.to_proto(), self.plan)
        if iteration + 1 < self._iterations:
            return False
        if probe + 1 < len(self._probes):
            self.plan = self._probes[probe + 1]
            return True
        return self._settle()

    def _settle(self) -> bool:
        self._settled = True
        request = sched_pb2.PlanRequest(
            workflow=self._graph.to_proto(), profile=self._profile, cluster=cluster_spec(self._cluster)
        )
        answer = sched.explain(request)
        replace_file(self._run.profile, plan_json(self._profile))
        replace_file(self._run.explanation, answer.text + "\n")
        self._say(answer.text)
        chosen = _first_that_runs(self._graph, self._cluster, answer.response)
        if chosen is None:
            reason = answer.response.infeasible or "none of its plans can run here"
            self._say(f"plan=auto: no plan was found ({reason}): going on with {self.plan.mode}")
            return False
        changed = chosen != self.plan
        self.plan = chosen
        return changed


def fixed_plan(plan: str, graph: Graph, cluster: Cluster) -> flow_pb2.ExecutionPlan:
    """Returns the plan of a mode's name or of a file. Raises CheckFailed when there is none that can run here."""
    try:
        if plan in MODES:
            made = MODES[plan](graph, cluster)
        elif Path(plan).is_file():
            made = load_plan(Path(plan))
        else:
            raise CheckFailed([f"plan: got {plan!r}, want auto, {', '.join(MODES)}, or an existing file: correct it"])
        check_plan(graph, made, cluster)
    except PlanError as error:
        raise CheckFailed([f"plan={plan}: {reason}" for reason in error.reasons]) from None
    return made


def probes(graph: Graph, cluster: Cluster) -> list[flow_pb2.ExecutionPlan]:
    """Returns the plans that are worth measuring: all in turns on all devices, then side by side where that can be."""
    plans = [temporal_plan(graph, cluster)]
    if len(cluster.devices) > 1:
        plans.append(MODES["spatial"](graph, cluster))
    return plans


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
        node.memory_bytes = sum(device.memory_bytes for device in devices if device.kind == "cpu")
    return spec


def write_plan(run: RunDirectory, plan: flow_pb2.ExecutionPlan) -> None:
    """Writes plan.json, which `plan=` takes back. A failed write leaves the old one."""
    replace_file(run.plan, plan_json(plan))


def plan_json(message: Message) -> str:
    """Returns a plan or a profile as the JSON that the command line takes back."""
    return json_format.MessageToJson(message, preserving_proto_field_name=True) + "\n"


def _first_that_runs(graph: Graph, cluster: Cluster, response: sched_pb2.PlanResponse) -> flow_pb2.ExecutionPlan | None:
    ranked: Sequence[sched_pb2.RankedPlan] = response.plans
    for candidate in ranked:
        try:
            check_plan(graph, candidate.plan, cluster)
        except PlanError:
            continue
        return candidate.plan
    return None
