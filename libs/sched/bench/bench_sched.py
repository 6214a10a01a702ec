"""Speed of the planner: CPU milliseconds of the search by devices, of 12 stages, of a simulation, of the import.

    python libs/sched/bench/bench_sched.py [--json FILE] [--plot FILE]

CPU seconds (time.process_time), the least of several runs: a busy machine does not count.
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import plan, simulate
from m2flow.sched._build import build
from m2flow.sched.planning import searched

COMMAND = "python libs/sched/bench/bench_sched.py"
PAPER_S = {8: 7e-4, 1024: 5.98}  # arXiv 2509.15965: three nodes, on 8 and on 1,024 GPUs
TARGETS_MS = {8: 5, 64: 10, 256: 25, 1024: 50, 16384: 1000}
QUANTUM = {8: 1, 16384: 16}


def workload(stages: list[str], edges: list[tuple[int, int]], devices: int, quantum: int, items: int = 512
             ) -> sched_pb2.PlanRequest:  # fmt: skip
    """Stages that start up, divide and do not divide a little differently each; memory for two of them on a device.

    A quarter of a stage's time on all devices does not divide: in turns it is paid once a stage, in a pipeline once.
    """
    graph = flow_pb2.WorkflowGraph(name="bench", source_items=items)
    profile = sched_pb2.Profile(transfer_latency_s=0.01)
    for i, name in enumerate(stages):
        graph.stages.add(name=name, kind=flow_pb2.STAGE_KIND_WORK, group=f"g{i}", expansion=1)
        graph.groups.add(name=f"g{i}", device_kind="cuda", can_offload=True)
        fixed, work = 0.002 + 0.001 * (i % 3), (1 + (7 * i) % 5) / 8 * devices
        for count in (devices // 8, devices // 2, devices):
            for part in (1, 8, 64, items):
                seconds = fixed + work * part / count + 0.25 * work * part / devices
                profile.samples.add(stage=name, devices=count, items=part, seconds=seconds)
        profile.switches.add(group=f"g{i}", onload_s=1.0, offload_s=0.5, resident_bytes=30e9, offloaded_bytes=1e9)
    for a, b in edges:
        graph.streams.add(producer=stages[a], consumer=stages[b])
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n", count=devices // 8).devices.add(kind="cuda", count=8, memory_bytes=80e9)
    return sched_pb2.PlanRequest(
        workflow=graph, profile=profile, cluster=cluster, device_quantum=quantum, max_chunks=items // 4
    )


def three(devices: int) -> sched_pb2.PlanRequest:
    names = ["rollout", "inference", "actor"]
    request = workload(names, [(0, 1), (1, 2)], devices, QUANTUM.get(devices, 8))
    request.max_chunks = 0
    return request


def twelve(devices: int = 1024, items: int = 2048) -> sched_pb2.PlanRequest:
    """Four sections: one stage that forks into three, or two, and joins."""
    edges = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (4, 5), (4, 6), (5, 7), (6, 7), (7, 8), (7, 9), (7, 10)]
    edges += [(8, 11), (9, 11), (10, 11)]
    return workload([f"s{i}" for i in range(12)], edges, devices, 8, items=items)


def drawn(seed: int) -> sched_pb2.PlanRequest:
    """Twelve stages in a random graph up to three wide, 64 items of one chunk or more, costs drawn at random.

    A hundredth of a second of every item does not divide: on eighty devices, a fourth of the stage's time.
    """
    rng = random.Random(seed)
    graph, profile = flow_pb2.WorkflowGraph(name="drawn", source_items=64), sched_pb2.Profile()
    for i in range(12):
        graph.stages.add(name=f"s{i}", kind=flow_pb2.STAGE_KIND_WORK, group=f"g{i}", expansion=1)
        graph.groups.add(name=f"g{i}", device_kind="cuda", can_offload=True)
        fixed, work = rng.uniform(0, 0.02), rng.uniform(0.5, 4)
        for count, items in itertools.product((1, 4, 16), (1, 8, 64)):
            seconds = fixed + work * items / count + 0.01 * items
            profile.samples.add(stage=f"s{i}", devices=count, items=items, seconds=seconds)
        for earlier in range(max(0, i - 3), i):
            if earlier == i - 1 or rng.random() < 0.3:
                graph.streams.add(producer=f"s{earlier}", consumer=f"s{i}")
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n", count=128).devices.add(kind="cuda", count=8)
    return sched_pb2.PlanRequest(workflow=graph, profile=profile, cluster=cluster, device_quantum=8)


def over_the_bound(request: sched_pb2.PlanRequest) -> float:
    """By how many percent the best plan of a request is over the bound that it is certified with."""
    found = searched(build(request))[0]
    return 100 * (found.plans[0].seconds / found.lower_bound_s - 1)


def least(function: Callable[[], object], runs: int) -> float:
    """The least CPU seconds of several runs."""
    found = []
    for _ in range(runs):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


def row(name: str, value: float, unit: str, target: float, peer: float | None = None) -> dict[str, object]:
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "peer": "the paper" if peer else "",
        "ratio": round(peer / value, 2) if peer else None,
        "target": target,
        "holds": value <= target,
        "command": COMMAND,
        "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
    }


def rows() -> list[dict[str, object]]:
    found = []
    for devices, target in TARGETS_MS.items():
        request = three(devices)
        runs = 3 if devices > 2000 else 15
        models = iter([build(request) for _ in range(runs)])
        milliseconds = 1e3 * least(lambda m=models: searched(next(m)), runs)  # type: ignore[misc]
        peer = PAPER_S[devices] * 1e3 if devices in PAPER_S else None
        found.append(row(f"search, 3 stages, {devices} devices", milliseconds, "ms CPU", target, peer))
        milliseconds = 1e3 * least(lambda r=request: plan(r), runs)  # type: ignore[misc]
        found.append(row(f"request to ranked plans, {devices} devices", milliseconds, "ms CPU", target))
    request = twelve()
    models = iter([build(request) for _ in range(3)])
    found.append(row("search, 12 stages, 1024 devices", least(lambda: searched(next(models)), 3), "s CPU", 2))
    certified = {
        "12 stages: over the lower bound": over_the_bound(request),
        "... with 512 items": over_the_bound(twelve(items=512)),
        "... on 512 devices": over_the_bound(twelve(devices=512)),
        "12 stages drawn at random, 64 items, best of six": min(
            drawn_over := [over_the_bound(drawn(s)) for s in range(6)]
        ),
        "... worst of six": max(drawn_over),
    }
    found += [row(name, percent, "%", 5) for name, percent in certified.items()]
    chosen = simulated_plan()
    request = three(1024)
    request.workflow.source_items = 25_000
    seconds = least(lambda: simulate(sched_pb2.SimulateRequest(request=request, plan=chosen)), 2)
    found.append(row("simulate 1024 devices, 25,000 samples one by one", seconds, "s CPU", 5))
    found.append(row("import m2flow.sched", 1e3 * import_seconds(), "ms CPU", 300))
    return found


def import_seconds() -> float:
    """The least CPU seconds of importing the facade, its bytecode being there as in an installed package."""
    code = "import time; t = time.process_time(); import m2flow.sched; print(time.process_time() - t)"
    with tempfile.TemporaryDirectory() as cache:
        settings = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        command = [sys.executable, "-X", f"pycache_prefix={cache}", "-c", code]
        spent = [
            float(subprocess.run(command, capture_output=True, text=True, check=True, env=settings).stdout)
            for _ in range(6)
        ]
    return min(spent)


def simulated_plan() -> flow_pb2.ExecutionPlan:
    """Three groups on disjoint devices, every sample a chunk of its own."""
    chosen = flow_pb2.ExecutionPlan(mode="spatial")
    bounds = (0, 512, 640, 1024)
    for i, stage in enumerate(("rollout", "inference", "actor")):
        chosen.groups.add(group=f"g{i}", device_ids=range(bounds[i], bounds[i + 1]))
        chosen.stages.add(stage=stage, granularity=1, position=i)
    return chosen


def plot(found: list[dict[str, object]], file: str) -> None:
    """Draws the search's CPU milliseconds by devices, beside the paper's two figures."""
    from matplotlib import pyplot

    searches = {f"search, 3 stages, {devices} devices": devices for devices in TARGETS_MS}
    own = [(searches[str(r["name"])], float(str(r["value"]))) for r in found if r["name"] in searches]
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.loglog(*zip(*own, strict=True), "o-", label="m2flow-sched, exact (quantum 8; 1 on 8 devices, 16 on 16,384)")
    axes.loglog(list(PAPER_S), [1e3 * s for s in PAPER_S.values()], "s--", label="arXiv 2509.15965, three nodes")
    axes.set(xlabel="devices", ylabel="CPU ms of the search", title="Three stages")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="an SVG or PNG of the growth with devices; needs matplotlib")
    options = parser.parse_args()
    file = options.json
    found = rows()
    if options.plot:
        plot(found, options.plot)
    for r in found:
        peer = f"   the paper / this: {r['ratio']}" if r["ratio"] else ""
        held = "ok" if r["holds"] else "MISSED"
        print(f"{r['name']:50} {r['value']:>10} {r['unit']:7} target {r['target']:>5} {held}{peer}")
    if file:
        pathlib.Path(file).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
