"""Launches, calls and synthetic workers: what this package's own overhead is.

The peer of a call is a call of a Ray actor, where Ray is installed, interleaved in the same run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _rows import row

from m2flow.worker import Cluster, launch_run
from m2flow.worker.testing import Probe, SyntheticConfig, SyntheticWorker

NUM_CALLS = 1000


def median_s(*calls: Callable[[], object]) -> list[float]:
    """The median seconds of each call, interleaved."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(NUM_CALLS):
        for call, own in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in seconds]


def launches() -> list[dict[str, Any]]:
    """Eight light workers from nothing, and from a warm parent."""
    start = time.perf_counter()
    with launch_run(Cluster.local(), launcher="process") as session:
        session.start(Probe.group(name="first"), "0*8")
        cold = time.perf_counter() - start
        start = time.perf_counter()
        session.start(Probe.group(name="second"), "0*8")
        warm = time.perf_counter() - start
    return [row("launch of 8, cold", cold, "s", 2.0), row("launch of 8, warm", warm, "s", 0.5)]


def round_trips() -> list[dict[str, Any]]:
    """A call on a group of one, beside a Ray actor's."""
    if find_spec("ray") is None:
        with launch_run(Cluster.local(), launcher="process") as session:
            group = session.start(Probe.group(), "0")
            (own,) = median_s(lambda: group.echo(1).result())
        return [row("call round trip, process", own * 1e6, "us", 500.0)]
    import ray

    # Before the session: Ray forks, and gRPC's threads do not like that.
    ray.init(address="local", num_cpus=2, log_to_driver=False, object_store_memory=80 << 20)
    actor = ray.remote(_Echo).remote()
    with launch_run(Cluster.local(), launcher="process") as session:
        group = session.start(Probe.group(), "0")
        own, peer = median_s(lambda: group.echo(1).result(), lambda: ray.get(actor.echo.remote(1)))
    ray.shutdown()
    return [row("call round trip, process", own * 1e6, "us", 0.5, peer="Ray actor", ratio=own / peer)]


def wide_calls() -> list[dict[str, Any]]:
    """A call on 64 ranks, all results back."""
    rows = []
    for name, launcher, ranks_per_process, target_ms in (
        ("threads of the driver", "inproc", 1, 2.0),
        ("one host process", "process", 64, 2.0),
        ("64 processes", "process", 1, 5.0),
    ):
        with launch_run(Cluster.virtual(64), launcher=launcher) as session:
            group = session.start(Probe.group(device_kind="virtual", ranks_per_process=ranks_per_process), "all")
            seconds = []
            for _ in range(300):
                start = time.perf_counter()
                group.echo(1).result()
                seconds.append(time.perf_counter() - start)
        rows.append(row(f"call on 64 ranks, {name}", statistics.median(seconds) * 1e3, "ms", target_ms))
    return rows


def synthetic() -> list[dict[str, Any]]:
    """64 synthetic workers with 10 ms items, as threads of one process."""
    num_items = 300
    with launch_run(Cluster.virtual(64), launcher="inproc") as session:
        group = session.start(SyntheticWorker.group(SyntheticConfig(item_s=0.01), device_kind="virtual"), "all")
        busy, start = time.process_time(), time.perf_counter()
        overheads_s = group.drill(num_items).result()
        wall, cpu = time.perf_counter() - start, time.process_time() - busy
    return [
        row("64 synthetic workers, share of two cores", cpu / wall / 2 * 100, "%", 15.0),
        row("64 synthetic workers, overhead an item", statistics.fmean(overheads_s) * 1e3, "ms", 0.5),
    ]


class _Echo:
    def echo(self, value: int) -> int:
        return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Ray comes last: its processes are still ending when it says that it has shut down.
    rows = [*launches(), *wide_calls(), *synthetic(), *round_trips()]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    for one in rows:
        print(f"{one['name']:45} {one['value']:10.4g} {one['unit']:3} ratio {one['ratio']} holds {one['holds']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
