"""Each workload under each mode, predicted and measured: does the prediction hold, and is the ranking right?

    python libs/flow/bench/modes.py [--json FILE] [--only NAME]

Prints a row for each mode: measured seconds of an iteration, beside what the scheduler's simulation said.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

from _workloads import KIND, PROFILED, Workload, profile, workloads

from m2flow import sched
from m2flow.flow import PlanError, Runtime, account, check_plan, temporal_plan
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.worker import launch_run

COMMAND = "nox -s bench -- flow"


def request(workload: Workload, mode: str) -> sched_pb2.PlanRequest:
    """What the planner is asked."""
    spec = sched_pb2.ClusterSpec()
    spec.nodes.add(name="node0", count=1).devices.add(kind=KIND, count=workload.num_devices)
    return sched_pb2.PlanRequest(
        workflow=workload.graph().to_proto(), profile=profile(workload), cluster=spec, mode=mode
    )


def plans(workload: Workload) -> dict[str, pb.ExecutionPlan]:
    """A plan for each mode that the workload has one of."""
    found = {"temporal": temporal_plan(workload.graph(), workload.cluster())}
    for mode, word in (("spatial", "spatial"), ("hybrid", "hybrid"), ("", "auto")):
        response = sched.plan(request(workload, mode))
        if response.plans:
            found[word] = response.plans[0].plan
    return found


def predict(workload: Workload, plan: pb.ExecutionPlan) -> float:
    """Seconds of an iteration by simulation."""
    return sched.simulate(sched_pb2.SimulateRequest(request=request(workload, ""), plan=plan)).iteration_s


def measure(workload: Workload, plan: pb.ExecutionPlan) -> tuple[float, float]:
    """The iteration that was profiled, after one that warms up, and the worst device's time without a cause in it."""
    cluster, graph = workload.cluster(), workload.graph()
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        for number in range(PROFILED + 1):
            result = runtime.run(number, workload.items(number))
    lines = account(result.timeline, result.start_ns, result.end_ns, range(workload.num_devices))
    return result.seconds, max(line.unattributed for line in lines)


def row(name: str, value: float, unit: str, *, peer: str, ratio: float, target: str, holds: bool) -> dict[str, Any]:
    """A row of the bench table."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    keys = ("name", "value", "unit", "peer", "ratio", "target", "holds", "command", "machine")
    return dict(zip(keys, (name, value, unit, peer, ratio, target, holds, COMMAND, machine), strict=True))


def rows(workload: Workload) -> list[dict[str, Any]]:
    """A row for each mode, one for the ranking, one for what has no cause."""
    found, measured, predicted, causeless = [], {}, {}, 0.0
    for mode, plan in plans(workload).items():
        try:
            check_plan(workload.graph(), plan, workload.cluster())
        except PlanError as refused:
            print(f"{workload.name}/{mode}: {refused}")
            continue
        predicted[mode] = predict(workload, plan)
        measured[mode], unattributed = measure(workload, plan)
        causeless = max(causeless, unattributed)
        ratio = measured[mode] / predicted[mode]
        found.append(
            row(
                f"{workload.name}/{mode}",
                measured[mode],
                "s",
                peer=f"predicted {predicted[mode]:.3f} s",
                ratio=ratio,
                target="within 5%",
                holds=abs(ratio - 1) <= 0.05,
            )
        )
    best = min(measured, key=measured.__getitem__)
    chosen = min(predicted, key=predicted.__getitem__)
    ratio = measured[chosen] / measured[best]
    found.append(
        row(
            f"{workload.name}: the chosen mode",
            measured[chosen],
            "s",
            peer=f"fastest {best} {measured[best]:.3f} s",
            ratio=ratio,
            target="<= 1.03x of the fastest",
            holds=ratio <= 1.03,
        )
    )
    found.append(
        row(
            f"{workload.name}: time without a cause",
            causeless,
            "of the worst device",
            peer="",
            ratio=0.0,
            target="<= 0.02",
            holds=causeless <= 0.02,
        )
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--only", help="one workload")
    options = parser.parse_args()
    every = []
    for workload in workloads():
        if options.only in (None, workload.name):
            for line in rows(workload):
                every.append(line)
                print(f"{line['name']:<36} {line['value']:8.3f} {line['peer']:<28} {line['ratio']:.3f} {line['holds']}")
    if options.json:
        options.json.write_text(json.dumps(every, indent=2))


if __name__ == "__main__":
    main()
