"""What m2flow says a step will take, and what it then takes: the training recipe on the real model, under two plans.

    python apps/reasoning/bench/prediction.py [--steps 20] [--json FILE]

A step's prediction is made before the step, from the profile of the steps before it. The first ten steps are left out
(processes and lengths settle in them); the figure is the median of the others' errors, |predicted / measured - 1|.
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
SETTLED = 10


def errors(plan: str, steps: int) -> list[float]:
    """The signed relative error of each settled step's prediction."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = [f"plan={plan}", f"num_steps={steps}", f"run.dir={run}", 'run.profiles=""']
        words += [f"evaluation.every={steps}", "evaluation.num_problems=4", f"checkpoint.every={steps}"]
        command = [sys.executable, "-m", "m2flow.reasoning", "train", "two_digit", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    both = [row for row in rows if "plan/predicted_s" in row and row["step"] > SETTLED]
    return [row["plan/predicted_s"] / row["plan/measured_s"] - 1 for row in both]


def row(plan: str, found: list[float], command: str) -> dict[str, Any]:
    value, target = statistics.median(abs(error) for error in found), TARGETS[plan]
    return {
        "name": f"prediction error, {plan}, median of {len(found)} steps",
        "value": value,
        "unit": "relative",
        "peer": f"median signed {statistics.median(found):+.3f}",
        "ratio": None,
        "target": f"<= {target}",
        "holds": value <= target,
        "command": command,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    options = parser.parse_args()
    command = f"python apps/reasoning/bench/prediction.py --steps {options.steps}"
    rows = [row(plan, errors(plan, options.steps), command) for plan in TARGETS]
    for one in rows:
        print(f"{one['name']}: {one['value']:.3f} ({one['peer']}), target {one['target']}, holds: {one['holds']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
