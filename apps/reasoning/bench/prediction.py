"""What m2flow says a step will take, and what it then takes: the training recipe on the real model, under two plans.

    python apps/reasoning/bench/prediction.py [--steps 30] [--json FILE]

A step's prediction is made before the step, from the profile of the steps before it. The first ten steps are left out
(processes and lengths settle in them). Of each ten steps after them the median prediction is held against the median
measurement, and the worst of these is the figure. Beside it stands the median error of single steps: lengths, and the
groups that teach nothing and are not trained on, make one step longer than another, and nobody knows that before.
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

TARGETS = {"temporal": 0.05, "spatial": 0.08}
SETTLED, WINDOW = 10, 10


def steps_of(plan: str, steps: int) -> list[tuple[float, float]]:
    """Predicted and measured seconds of each settled step."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = [f"plan={plan}", f"num_steps={steps}", f"run.dir={run}", 'run.profiles=""']
        words += [f"evaluation.every={steps}", "evaluation.num_problems=4", f"checkpoint.every={steps}"]
        command = [sys.executable, "-m", "m2flow.reasoning", "train", "two_digit", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    both = [row for row in rows if "plan/predicted_s" in row and row["step"] > SETTLED]
    return [(row["plan/predicted_s"], row["plan/measured_s"]) for row in both]


def window_error(pairs: list[tuple[float, float]]) -> float:
    """The relative error of the median prediction of some steps."""
    predicted, measured = zip(*pairs, strict=True)
    return statistics.median(predicted) / statistics.median(measured) - 1


def row(plan: str, found: list[tuple[float, float]], command: str) -> dict[str, Any]:
    windows = [window_error(found[at : at + WINDOW]) for at in range(0, len(found) - WINDOW + 1, WINDOW)]
    value, target = max(windows, key=abs), TARGETS[plan]
    single = statistics.median(abs(predicted / measured - 1) for predicted, measured in found)
    return {
        "name": f"prediction error, {plan}, medians of ten steps, the worst of {len(windows)}",
        "value": value,
        "unit": "relative",
        "peer": f"single steps: {single:.3f}",
        "ratio": None,
        "target": f"+-{target}",
        "holds": abs(value) <= target,
        "command": command,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    options = parser.parse_args()
    if options.steps < SETTLED + WINDOW:
        parser.error(f"--steps: got {options.steps}, want at least {SETTLED + WINDOW}")
    command = f"python apps/reasoning/bench/prediction.py --steps {options.steps}"
    rows = [row(plan, steps_of(plan, options.steps), command) for plan in TARGETS]
    for one in rows:
        print(f"{one['name']}: {one['value']:+.3f} ({one['peer']}), target {one['target']}, holds: {one['holds']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
