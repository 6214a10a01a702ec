"""What the stage loop costs a batch: in, a run that does nothing, out, acknowledged, on a worker process.

    python libs/flow/bench/overhead.py [--json FILE]

One stage, its items one by one and in batches, from the driver and back to it: seconds of an iteration by its batches,
and of those what the worker's process computes. The rest is the driver's, which is source, sink and channel index.
"""

import argparse
import json
import os
import platform
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from _echo import Echo

from m2flow.flow import Flow, Runtime, StageProxy, Stream, spatial_plan, trace
from m2flow.worker import Cluster, Item, launch_run

NUM_BATCHES = 256
NUM_ITERATIONS = 8
TARGET_MS = 1.0


def work(flow: Flow, worker: StageProxy) -> Stream:
    """The macro flow: one stage."""
    return worker.work(flow.source("items"))


def measure(batch_size: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of the worker, for each batch; the median of some iterations after one that warms up."""
    num_items, cluster = NUM_BATCHES * batch_size, Cluster.virtual(1)
    graph = trace(work, {"worker": Echo.group(name="worker", device_kind="virtual")}, source_items=num_items)
    plan = spatial_plan(graph, cluster, num_chunks=NUM_BATCHES)
    with launch_run(cluster) as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        seconds, cpu_s = [], []
        for iteration in range(NUM_ITERATIONS + 1):
            items = [Item((place,), iteration, {"seed": place}) for place in range(num_items)]
            result = runtime.run(iteration, items)
            assert len(result.outputs) == num_items
            seconds.append(result.seconds)
            cpu_s += session.groups["worker"].method("cpu_s")().result()
    spent = [after - before for before, after in pairwise(cpu_s)]
    return statistics.median(seconds[1:]) / NUM_BATCHES, statistics.median(spent) / NUM_BATCHES


def row(name: str, seconds: float) -> dict[str, Any]:
    """A row of the bench table."""
    return {
        "name": name,
        "value": seconds * 1e3,
        "unit": "ms",
        "peer": "",
        "ratio": None,
        "target": TARGET_MS,
        "holds": seconds * 1e3 <= TARGET_MS,
        "command": "nox -s bench -- flow",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for batch_size in (1, 8):
        seconds, cpu_s = measure(batch_size)
        name = f"stage, a batch of {batch_size}, process"
        rows += [row(f"{name}: time", seconds), row(f"{name}: CPU of the worker", cpu_s)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    for one in rows:
        print(f"{one['name']:50} {one['value']:.3f} {one['unit']} holds {one['holds']}")


if __name__ == "__main__":
    main()
