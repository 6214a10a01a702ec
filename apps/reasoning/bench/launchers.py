"""A step of the shipped recipe under `ray`, beside `process`: the same plan, seed and samples, runs taken in turns.

    python apps/reasoning/bench/launchers.py [--runs 2] [--steps 5] [--json FILE]

Steps after the first count; the value is their median over the runs of a launcher.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TARGET = 1.10


def step_seconds(launcher: str, num_steps: int, directory: Path) -> list[float]:
    """The seconds of each step but the first of one run."""
    words = [
        f"launcher={launcher}",
        "plan=temporal",
        'run.profiles=""',
        f"run.dir={directory}",
        f"num_steps={num_steps}",
        "evaluation.num_problems=4",
    ]
    command = [sys.executable, "-m", "m2flow.reasoning", "train", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["timing_s/step"] for row in rows if "timing_s/step" in row][1:]


def measure(num_runs: int, num_steps: int) -> dict[str, Any]:
    """The row of the bench table."""
    seconds: dict[str, list[float]] = {"process": [], "ray": []}
    for number in range(num_runs):
        for launcher, own in seconds.items():
            with tempfile.TemporaryDirectory() as scratch:
                own += step_seconds(launcher, num_steps, Path(scratch) / f"{launcher}{number}")
    peer, value = statistics.median(seconds["process"]), statistics.median(seconds["ray"])
    return {
        "name": "step of the recipe under ray",
        "value": value,
        "unit": "s",
        "peer": f"process {peer:.3f} s",
        "ratio": value / peer,
        "target": TARGET,
        "holds": value / peer <= TARGET,
        "command": "python apps/reasoning/bench/launchers.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="runs of each launcher")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    row = measure(options.runs, options.steps)
    if options.json:
        options.json.write_text(json.dumps([row], indent=2))
    print(f"{row['name']}: {row['value']:.3f} {row['unit']}, {row['peer']}, ratio {row['ratio']:.3f}")


if __name__ == "__main__":
    main()
