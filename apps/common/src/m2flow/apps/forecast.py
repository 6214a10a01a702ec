"""What a run knows of its own seconds: a profile that grows with each iteration, and what it says of a plan."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from google.protobuf import json_format

from m2flow import sched
from m2flow.apps.atomic import replace_file
from m2flow.apps.errors import RunDirectoryError
from m2flow.apps.identity import hardware, package_version
from m2flow.apps.paths import expanded
from m2flow.flow import Graph
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.files import to_json
from m2flow.worker import GroupSpec

__all__ = ["Forecast", "ProfileStore", "new_profile"]

# Settings of a worker that its seconds do not depend on.
_TIMELESS = frozenset({"seed", "resume"})


def new_profile(name: str, groups: Mapping[str, GroupSpec]) -> sched_pb2.Profile:
    """Returns an empty profile of this workload, on this machine, by this version.

    Its `model` is `name` and a digest of what the workers are and how they are set.
    """
    made = {
        group: [spec.target, {key: value for key, value in dict(spec.config).items() if key not in _TIMELESS}]
        for group, spec in groups.items()
    }
    digest = hashlib.sha256(json.dumps(made, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return sched_pb2.Profile(model=f"{name}-{digest}", hardware=hardware(), version=package_version())


class ProfileStore:
    """Profiles of earlier runs, one file each for model, hardware and version; of another of these, none is used."""

    def __init__(self, directory: str) -> None:
        """`directory` is made when something is kept; empty: nothing is kept, nothing is found."""
        self._directory = expanded(directory) if directory else None

    def path(self, empty: sched_pb2.Profile) -> Path | None:
        """Returns where a profile of `empty`'s identity is, or would be."""
        if self._directory is None:
            return None
        digest = hashlib.sha256(f"{empty.hardware}\0{empty.version}".encode()).hexdigest()[:12]
        return self._directory / f"{empty.model}-{digest}.json"

    def find(self, empty: sched_pb2.Profile) -> sched_pb2.Profile:
        """Returns what earlier runs measured; `empty` where there is nothing, or nothing that can be read."""
        path = self.path(empty)
        if path is None or not path.is_file():
            return empty
        try:
            found = json_format.Parse(path.read_text(encoding="utf-8"), sched_pb2.Profile())
        except (OSError, UnicodeDecodeError, json_format.ParseError):
            return empty
        alike = sched.usable(found, model=empty.model, hardware=empty.hardware, version=empty.version)
        return found if alike else empty

    def keep(self, profile: sched_pb2.Profile) -> None:
        """Takes the place of what was stored. On failure the old file stays and RunDirectoryError says why."""
        path = self.path(profile)
        if path is not None and profile.samples:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunDirectoryError(
                    f"{path.parent}: cannot be made ({error.strerror}): set run.profiles"
                ) from error
            replace_file(path, to_json(profile))


class Forecast:
    """Folds what iterations measure into a profile, and predicts, explains and replans from it."""

    def __init__(self, graph: Graph, cluster: sched_pb2.ClusterSpec, profile: sched_pb2.Profile) -> None:
        self._request = sched_pb2.PlanRequest(workflow=graph.to_proto(), profile=profile, cluster=cluster)
        self._groups = {s.name: s.group for s in graph.stages.values() if s.kind == flow_pb2.STAGE_KIND_WORK}

    @property
    def profile(self) -> sched_pb2.Profile:
        """What is known so far."""
        return self._request.profile

    @property
    def complete(self) -> bool:
        """Whether every stage that does work has been measured."""
        return self._groups.keys() <= {sample.stage for sample in self.profile.samples}

    def covers(self, plans: Iterable[flow_pb2.ExecutionPlan]) -> bool:
        """Whether every stage that does work has been measured on as many devices as each of `plans` gives it."""
        measured = {(sample.stage, sample.devices) for sample in self.profile.samples}
        return all(
            (stage, len(own.device_ids)) in measured
            for plan in plans
            for own in plan.groups
            for stage, group in self._groups.items()
            if group == own.group
        )

    def learn(self, timeline: flow_pb2.Timeline, plan: flow_pb2.ExecutionPlan) -> None:
        """Takes in an iteration that ran under `plan`."""
        folded = sched.fold_spans(self.profile, timeline, self._request.workflow, plan)
        self._request.profile.CopyFrom(folded)

    def seconds(self, plan: flow_pb2.ExecutionPlan) -> float | None:
        """Returns the predicted seconds of an iteration under `plan`; None while a stage has not been measured."""
        if not self.complete:
            return None
        return sched.simulate(sched_pb2.SimulateRequest(request=self._request, plan=plan)).iteration_s

    def explained(self) -> sched_pb2.ExplainResponse:
        """Returns the best plans, and why they are."""
        return sched.explain(self._request)

    def replan(self, plan: flow_pb2.ExecutionPlan, *, remaining_iterations: int, switch_s: float) -> sched.Replan:
        """Returns whether leaving `plan` pays, switching included."""
        return sched.replan(
            self._request, plan, remaining_iterations=remaining_iterations, switch_s=switch_s, margin=0.1
        )
