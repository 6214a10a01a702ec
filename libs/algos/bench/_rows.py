"""A measured figure as a row: printed as a table, written as JSON."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Row = dict[str, str | float | bool | None]


def row(name: str, value: float, unit: str, *, peer: str, peer_value: float, at_least: float) -> Row:
    """Return a row: the ratio is how many times less than the peer's the value is; `holds` says if it is enough."""
    ratio = peer_value / value
    return {
        "name": name,
        "value": round(value, 6),
        "unit": unit,
        "peer": f"{peer}: {peer_value:.6g} {unit}",
        "ratio": round(ratio, 3),
        "target": f"ratio >= {at_least:g}",
        "holds": ratio >= at_least,
        "command": "python " + " ".join(sys.argv[:1]),
        "machine": machine(),
    }


def machine() -> str:
    """Return what it ran on: the GPU, or the processor with what of it the arithmetic uses."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        named = (line.partition(":")[2].strip() for line in info if line.startswith("model name"))
        device = f"{next(named, platform.machine())} ({torch.backends.cpu.get_cpu_capability()})"
    return f"{device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"


def seconds(run: Callable[[], object], *, repeats: int) -> float:
    """Return the least time of `repeats` runs after one to warm up.

    On a CPU it is the process's CPU time, with one thread: what else the machine is doing then counts little.
    """
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    least = float("inf")
    for attempt in range(repeats + 1):
        _finish()
        start = clock()
        run()
        _finish()
        if attempt:
            least = min(least, clock() - start)
    return least


def command_line(main: Callable[[str | None], None]) -> None:
    """Run `main` with the value of --json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="write the rows here")
    main(parser.parse_args().json)


def report(rows: list[Row], json_path: str | None) -> None:
    """Print the rows as a table, and write them to `json_path` if it is given."""
    columns = ("name", "value", "unit", "peer", "ratio", "target", "holds")
    lines = [columns, *[tuple(str(r[c]) for c in columns) for r in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(f"on {rows[0]['machine']}")
    if json_path is not None:
        Path(json_path).write_text(json.dumps(rows, indent=1) + "\n")


def _finish() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
