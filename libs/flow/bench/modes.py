"""Each workload under each mode, predicted and measured: does the prediction hold, and is the ranking right?

    python libs/flow/bench/modes.py [--json FILE] [--only NAME]

Prints a row for each mode: measured seconds of an iteration, beside what the scheduler's simulation said before it,
from the stages' costs and from what passed between them in the iteration before.
"""

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _workloads import KIND, PROFILED, Workload, large, profile, workloads

from m2flow import sched
from m2flow.flow import IterationResult, PlanError, Runtime, account, check_plan, spatial_plan, temporal_plan
from m2flow.flow._spans import Recorder
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.worker import launch_run

COMMAND = "nox -s bench -- flow"
# How far measured may be from predicted, by the mode of the plan.
TARGETS = {"temporal": 0.01, "spatial": 0.03, "hybrid": 0.03}
# On 64 devices, of the plan's critical path, where nothing passes between the stages.
TARGET_64 = 0.02


@dataclass(frozen=True)
class Measured:
    """One iteration: its seconds, beside what was said of it before, from the iteration that came before it.

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


def passing(
    workload: Workload, known: sched_pb2.Profile, result: IterationResult, plan: pb.ExecutionPlan
) -> sched_pb2.Profile:
    """The profile, with what passed between the stages in an iteration: hand-offs, publication, and in loops how early
    items went on."""
    graph = workload.graph()
    spans = sched.fold_spans(sched_pb2.Profile(), result.timeline, graph.to_proto(), plan)
    looped = [curve for curve in spans.curves if curve.stage in graph.in_cycles]
    found = sched_pb2.Profile(hand_offs=spans.hand_offs, syncs=spans.syncs, curves=looped)
    found.samples.extend(known.samples)
    found.switches.extend(known.switches)
    found.curves.extend(curve for curve in known.curves if curve.stage not in graph.in_cycles)
    return found


def probe(workload: Workload) -> sched_pb2.Profile:
    """The profile that plans are made from: the stages', and what passes between them side by side."""
    plan, known = spatial_plan(workload.graph(), workload.cluster()), profile(workload)
    with launch_run(workload.cluster(), launcher="inproc") as session, Runtime(workload.graph(), plan, session) as run:
        run.start()
        return passing(workload, known, run.run(0, workload.items(0)), plan)


def measure(workload: Workload, plan: pb.ExecutionPlan, known: sched_pb2.Profile) -> Measured:
    """The iteration that was profiled, after one that warms up and says what passes between the stages."""
    cluster, graph = workload.cluster(), workload.graph()
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        for number in range(PROFILED):
            result = runtime.run(number, workload.items(number))
        path_s = predict(workload, plan, profile(workload))
        predicted_s = predict(workload, plan, passing(workload, known, result, plan))
        result = runtime.run(PROFILED, workload.items(PROFILED))
    lines = account(result.timeline, result.start_ns, result.end_ns, range(workload.num_devices))
    causeless = max(line.unattributed for line in lines)
    return Measured(result.seconds, predicted_s, path_s, causeless, recording_s(result.timeline) / result.seconds)


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
        one = measured[mode] = measure(workload, plan, known)
        ratio, target = one.seconds / one.predicted_s, TARGETS[plan.mode]
        found.append(
            row(
                f"{workload.name}/{mode}",
                one.seconds,
                "s",
                peer=f"predicted {one.predicted_s:.3f} s, of it {(one.predicted_s - one.path_s) * 1e3:.0f} ms passing",
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
        one = measure(workload, plan, profile(workload))
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
