"""What the stage loop costs a batch: in, a run that does nothing, out, acknowledged, on a worker process.

    python libs/flow/bench/overhead.py [--json FILE]

One stage, its items one by one and in batches, from the driver and back to it: seconds of an iteration by its batches.
"""

import argparse
import json
import os
import platform
import statistics
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


def measure(batch_size: int) -> float:
    """Seconds that an iteration takes for each of its batches; the median of some, after one that warms up."""
    num_items, cluster = NUM_BATCHES * batch_size, Cluster.virtual(1)
    graph = trace(work, {"worker": Echo.group(name="worker", device_kind="virtual")}, source_items=num_items)
    plan = spatial_plan(graph, cluster, num_chunks=NUM_BATCHES)
    with launch_run(cluster) as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        seconds = []
        for iteration in range(NUM_ITERATIONS + 1):
            items = [Item((place,), iteration, {"seed": place}) for place in range(num_items)]
            result = runtime.run(iteration, items)
            assert len(result.outputs) == num_items
            seconds.append(result.seconds / NUM_BATCHES)
    return statistics.median(seconds[1:])


def row(batch_size: int) -> dict[str, Any]:
    """A row of the bench table."""
    value = measure(batch_size) * 1e3
    return {
        "name": f"stage loop, a batch of {batch_size}, process",
        "value": value,
        "unit": "ms",
        "peer": "",
        "ratio": None,
        "target": TARGET_MS,
        "holds": value <= TARGET_MS,
        "command": "nox -s bench -- flow",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row(batch_size) for batch_size in (1, 8)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    for one in rows:
        print(f"{one['name']:40} {one['value']:.3f} {one['unit']} holds {one['holds']}")


if __name__ == "__main__":
    main()
