"""Each workload under each mode, predicted and measured: does the prediction hold, and is the ranking right?

    python libs/flow/bench/modes.py [--json FILE] [--only NAME]

Prints a row for each mode: measured seconds of an iteration, beside what the scheduler's simulation said before it,
from the stages' costs and from what the iterations before it measured. Of short iterations several are taken, first to
predict from, then as many to measure: their median counts.
"""

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _workloads import KIND, Workload, large, profile, workloads

from m2flow import sched
from m2flow.flow import PlanError, Runtime, account, check_plan, spatial_plan, temporal_plan
from m2flow.flow._spans import Recorder
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.worker import launch_run

COMMAND = "nox -s bench -- flow"
# How far measured may be from predicted, by the mode of the plan.
TARGETS = {"temporal": 0.01, "spatial": 0.03, "hybrid": 0.03}
# On 64 devices, of the plan's critical path, where nothing passes between the stages.
TARGET_64 = 0.02
# Iterations are taken until they are worth so many seconds, three at most: the runtime's own work differs by some
# milliseconds from one to the next.
_ENOUGH_S = 8.0
_MOST = 3


@dataclass(frozen=True)
class Measured:
    """An iteration's seconds, beside what was said of it before.

    `path_s` is the plan's critical path: the same where nothing passes between stages. `causeless` is the worst
    device's part of the time that has no cause, `recording` the part of it that the timeline costs: all spans of all
    ranks, one after the other.
    """

    seconds: float
    predicted_s: float
    path_s: float
    causeless: float
    recording: float


def request(workload: Workload, mode: str, known: sched_pb2.Profile) -> sched_pb2.PlanRequest:
    """What the planner is asked."""
    spec = sched_pb2.ClusterSpec()
    spec.nodes.add(name="node0", count=1).devices.add(kind=KIND, count=workload.num_devices)
    return sched_pb2.PlanRequest(workflow=workload.graph().to_proto(), profile=known, cluster=spec, mode=mode)


def plans(workload: Workload, known: sched_pb2.Profile) -> dict[str, pb.ExecutionPlan]:
    """A plan for each mode that the workload has one of."""
    found = {"temporal": temporal_plan(workload.graph(), workload.cluster())}
    for mode, word in (("spatial", "spatial"), ("hybrid", "hybrid"), ("", "auto")):
        response = sched.plan(request(workload, mode, known))
        if response.plans:
            found[word] = response.plans[0].plan
    return found


def predict(workload: Workload, plan: pb.ExecutionPlan, known: sched_pb2.Profile) -> float:
    """Seconds of an iteration by simulation."""
    return sched.simulate(sched_pb2.SimulateRequest(request=request(workload, "", known), plan=plan)).iteration_s


def probe(workload: Workload) -> sched_pb2.Profile:
    """The profile that plans are made from: the stages', and what one iteration side by side measured."""
    plan, known = spatial_plan(workload.graph(), workload.cluster()), profile(workload)
    with launch_run(workload.cluster(), launcher="inproc") as session, Runtime(workload.graph(), plan, session) as run:
        run.start()
        return sched.fold_spans(known, run.run(0, workload.items(0)).timeline, workload.graph().to_proto(), plan)


def measure(workload: Workload, plan: pb.ExecutionPlan) -> Measured:
    """Some iterations, predicted from as many before them."""
    cluster, graph, known = workload.cluster(), workload.graph(), profile(workload)
    path_s = predict(workload, plan, known)
    some = max(1, min(_MOST, round(_ENOUGH_S / path_s)))
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        for number in range(some):
            result = runtime.run(number, workload.items(number))
            known = sched.fold_spans(known, result.timeline, graph.to_proto(), plan)
        predicted_s = predict(workload, plan, known)
        results = [runtime.run(number, workload.items(number)) for number in range(some, 2 * some)]
    accounts = [account(r.timeline, r.start_ns, r.end_ns, range(workload.num_devices)) for r in results]
    causeless = max(line.unattributed for lines in accounts for line in lines)
    seconds = median(result.seconds for result in results)
    recording = max(recording_s(result.timeline) / result.seconds for result in results)
    return Measured(seconds, predicted_s, path_s, causeless, recording)


def recording_s(timeline: pb.Timeline) -> float:
    """Seconds that it takes to record as many spans, of as many items, and to bring them to the driver."""
    recorder = Recorder("group", 0, range(1), 0)
    start = time.perf_counter()
    for one in timeline.spans:
        with recorder.span(pb.SPAN_KIND_BUSY, one.stage, 0) as span:
            span.outputs.extend(recorder.noting(span, one.outputs))
            span.inputs.extend(one.inputs)
    pb.Timeline.FromString(pb.Timeline(spans=recorder.take(0)).SerializeToString())
    return time.perf_counter() - start


def row(name: str, value: float, unit: str, *, peer: str, ratio: float, target: str, holds: bool) -> dict[str, Any]:
    """A row of the bench table."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    keys = ("name", "value", "unit", "peer", "ratio", "target", "holds", "command", "machine")
    return dict(zip(keys, (name, value, unit, peer, ratio, target, holds, COMMAND, machine), strict=True))


def rows(workload: Workload) -> list[dict[str, Any]]:
    """A row for each mode, one for the ranking, one for what has no cause."""
    found, measured, known = [], {}, probe(workload)
    for mode, plan in plans(workload, known).items():
        try:
            check_plan(workload.graph(), plan, workload.cluster())
        except PlanError as refused:
            print(f"{workload.name}/{mode}: {refused}")
            continue
        one = measured[mode] = measure(workload, plan)
        ratio, target = one.seconds / one.predicted_s, TARGETS[plan.mode]
        found.append(
            row(
                f"{workload.name}/{mode}",
                one.seconds,
                "s",
                peer=f"predicted {one.predicted_s:.3f} s",
                ratio=ratio,
                target=f"within {target:.0%}",
                holds=abs(ratio - 1) <= target,
            )
        )
    best = min(measured, key=lambda mode: measured[mode].seconds)
    chosen = min(measured, key=lambda mode: measured[mode].predicted_s)
    ratio = measured[chosen].seconds / measured[best].seconds
    found.append(
        row(
            f"{workload.name}: the chosen mode",
            measured[chosen].seconds,
            "s",
            peer=f"fastest {best} {measured[best].seconds:.3f} s",
            ratio=ratio,
            target="<= 1.03x of the fastest",
            holds=ratio <= 1.03,
        )
    )
    return [*found, *shares(workload, list(measured.values()))]


def shares(workload: Workload, measured: list[Measured]) -> list[dict[str, Any]]:
    """Rows of what has no cause, and of what the timeline costs, the worst of some iterations each."""
    causeless, recording = (max(getattr(one, name) for one in measured) for name in ("causeless", "recording"))
    return [
        row(
            f"{workload.name}: time without a cause",
            causeless,
            "of the worst device",
            peer="",
            ratio=0.0,
            target="<= 0.02",
            holds=causeless <= 0.02,
        ),
        row(
            f"{workload.name}: what the timeline costs",
            recording,
            "of the iteration",
            peer="",
            ratio=0.0,
            target="<= 0.01",
            holds=recording <= 0.01,
        ),
    ]


def rows_large(workload: Workload) -> list[dict[str, Any]]:
    """A row for either simple mode on many devices, against the critical path: the rest is the runtime's."""
    found, measured = [], []
    for make in (temporal_plan, spatial_plan):
        plan = make(workload.graph(), workload.cluster())
        one = measure(workload, plan)
        measured.append(one)
        ratio = one.seconds / one.path_s
        found.append(
            row(
                f"{workload.name}/{plan.mode}",
                one.seconds,
                "s",
                peer=f"critical path {one.path_s:.3f} s, overhead {(one.seconds - one.path_s) * 1e3:.0f} ms",
                ratio=ratio,
                target=f"within {TARGET_64:.0%}",
                holds=abs(ratio - 1) <= TARGET_64,
            )
        )
    return [*found, *shares(workload, measured)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--only", help="one workload")
    options = parser.parse_args()
    every = []
    measures = [*((workload, rows) for workload in workloads()), (large(), rows_large)]
    for workload, rows_of in measures:
        if options.only in (None, workload.name):
            for line in rows_of(workload):
                every.append(line)
                print(f"{line['name']:<36} {line['value']:8.3f} {line['peer']:<48} {line['ratio']:.3f} {line['holds']}")
    if options.json:
        options.json.write_text(json.dumps(every, indent=2))


if __name__ == "__main__":
    main()
