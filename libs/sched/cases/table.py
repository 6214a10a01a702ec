"""Plans the paper's cases and prints the README's table; `python table.py [--json FILE]`."""

import argparse
import json
import pathlib

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import plan
from m2flow.sched.files import read_case

HOME = pathlib.Path(__file__).parent
FOUND = {  # what the paper found best
    "grpo": "temporal",
    "ppo": "spatial",
    "moe-30b-32": "spatial",
    "moe-30b-64": "spatial",
    "moe-30b-128": "temporal",
    "maniskill": "hybrid",
    "libero": "temporal",
}
MOVES = (0.8, 1.2)
QUANTUM = 8  # for the moved inputs: what flips is the mode, not a device


def seconds(request: sched_pb2.PlanRequest, mode: str) -> tuple[float, str]:
    """Simulated seconds and mode of the best plan of a mode; infinity if there is none."""
    asked = sched_pb2.PlanRequest()
    asked.CopyFrom(request)
    asked.mode = mode
    answer = plan(asked)
    return (answer.plans[0].simulated_s, answer.plans[0].plan.mode) if answer.plans else (float("inf"), "")


def flips(request: sched_pb2.PlanRequest) -> tuple[int, int]:
    """How often the mode changes when one stage's time moves by 20% either way, and of how many moves."""
    base = sched_pb2.PlanRequest()
    base.CopyFrom(request)
    base.device_quantum = QUANTUM
    chosen = seconds(base, "")[1]
    stages = list(dict.fromkeys(s.stage for s in base.profile.samples))
    changed = 0
    for stage in stages:
        for factor in MOVES:
            moved = sched_pb2.PlanRequest()
            moved.CopyFrom(base)
            for sample in moved.profile.samples:
                if sample.stage == stage:
                    sample.seconds *= factor
            changed += seconds(moved, "")[1] != chosen
    return changed, len(stages) * len(MOVES)


def row(folder: pathlib.Path) -> dict[str, object]:
    request = read_case(folder)
    by_mode = {mode: seconds(request, mode)[0] for mode in ("temporal", "spatial", "hybrid")}
    chosen = min(by_mode, key=by_mode.__getitem__)
    found = next(mode for prefix, mode in FOUND.items() if folder.name.startswith(prefix))
    changed, moves = flips(request)
    return {"case": folder.name, "paper": found, "chosen": chosen, "flips": f"{changed}/{moves}", **by_mode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    file = parser.parse_args().json
    rows = [row(folder) for folder in sorted(p.parent for p in HOME.glob("*/workflow.yaml"))]
    print("| case | paper's best | chosen | temporal s | spatial s | hybrid s | paper's / chosen | mode flips at 20% |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        times = [f"{r[m]:.0f}" if r[m] != float("inf") else "none" for m in ("temporal", "spatial", "hybrid")]
        ratio = float(str(r[str(r["paper"])])) / float(str(r[str(r["chosen"])]))
        cells = [r["case"], r["paper"], r["chosen"], *times, f"{ratio:.2f}", r["flips"]]
        print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)
    if file:
        pathlib.Path(file).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
