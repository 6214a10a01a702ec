"""m2flow-reasoning against TRL's GRPOTrainer: the same model, prompts, sizes, precision, optimiser steps and threads.

    python apps/reasoning/bench/vs_trl.py [--steps 12] [--threads 2] [--trl-python PATH] [--json FILE]

| | m2flow | TRL |
|---|---|---|
| model, precision | SmolLM2-135M-Instruct, float32 both in generation and in training | the same |
| a step | 8 prompts x 8 samples, at most 4 tokens, ended by a newline, one AdamW step | the same |
| loss | clip 0.2, no KL, mean over tokens, advantages by group mean and deviation | `loss_type="dapo"`, `beta=0` |
| optimiser | lr 1e-5, betas 0.9 and 0.95, gradient clip 1 | the same, fused |
| batch layout | microbatches by tokens | the best of 64 x 1, 32 x 2, 16 x 4 rows, no gradient checkpointing |

TRL runs in an environment of its own (made under ~/.cache/m2flow unless --trl-python names one). What is measured lies
between the end of the first step and that of the last: start-up, evaluation and files are outside, on both sides.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _side_process import Measured, watch

from m2flow.apps.model import prepare_model
from m2flow.apps.tasks import make_task

PROMPTS, SAMPLES, MAX_NEW_TOKENS, LR, SEED = 8, 8, 4, 1e-5, 0
LAYOUTS = (64, 32, 16)
TARGET = 1.5
PINS = ("trl==1.16.0", "torch==2.13.0", "transformers==5.24.0")


def trl_python() -> str:
    """The Python of an environment that holds TRL, made once with pip as it is configured here."""
    home = Path("~/.cache/m2flow/trl-1.16.0").expanduser()
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PINS], check=True)
        (home / "complete").touch()
    return str(python)


def run_trl(python: str, model: Path, *, rows_per_pass: int, steps: int, threads: int) -> Measured:
    """One run of TRL on this task's own prompts, in this task's own order."""
    task = make_task("two_digit_sums", {}, SEED)
    problems = [
        {"prompt": problem.prompt, "answer": problem.answer}
        for step in range(1, steps + 1)
        for problem in task.training(step, PROMPTS)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        log, settings = Path(scratch) / "steps.jsonl", Path(scratch) / "settings.json"
        given = {
            "model": str(model),
            "problems": problems,
            "num_steps": steps,
            "samples_per_step": PROMPTS * SAMPLES,
            "samples_per_prompt": SAMPLES,
            "rows_per_pass": rows_per_pass,
            "max_new_tokens": MAX_NEW_TOKENS,
            "lr": LR,
            "seed": SEED,
            "threads": threads,
            "scratch": scratch,
            "log": str(log),
        }
        settings.write_text(json.dumps(given))
        command = [python, str(Path(__file__).with_name("_trl_side.py")), str(settings)]
        env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        return watch(command, log, reward="reward", env=env)


def run_m2flow(*, steps: int, threads: int) -> Measured:
    """One run of the app itself, all its processes counted."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = {
            "plan": "temporal",
            "cpu_slots": threads,
            "num_steps": steps,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "minibatch_size": PROMPTS * SAMPLES,
            "sampling.max_new_tokens": MAX_NEW_TOKENS,
            "optimiser.lr": LR,
            "seed": SEED,
            "evaluation.every": steps,
            "evaluation.num_problems": 1,
            "checkpoint.every": steps,
            "run.dir": run,
        }
        overrides = [f"{key}={value}" for key, value in words.items()]
        command = [sys.executable, "-m", "m2flow.reasoning", "train", "two_digit", *overrides]
        env = {"OMP_NUM_THREADS": str(threads)}
        # The run directory is the app's to make: what it prints goes beside it.
        log = Path(scratch) / "steps.jsonl"
        log.symlink_to(run / "metrics.jsonl")
        return watch(command, log, reward="critic/score/mean", env=env)


def rows_of(ours: Measured, theirs: Measured, layout: str, command: str) -> list[dict[str, Any]]:
    """Samples per second of wall and of CPU, each beside TRL's."""
    samples = PROMPTS * SAMPLES
    rows = []
    for name, own, other in (("wall", ours.wall_s, theirs.wall_s), ("CPU", ours.cpu_s, theirs.cpu_s)):
        rows.append(
            {
                "name": f"GRPO samples per second of {name}",
                "value": samples / own,
                "unit": "samples/s",
                "peer": f"TRL 1.16 ({layout}) {samples / other:.4g} samples/s",
                "ratio": other / own,
                "target": f">= {TARGET}x",
                "holds": other / own >= TARGET,
                "command": command,
                "machine": _machine(),
            }
        )
    return rows


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.machine()])[0]}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trl-python", default="", help="the Python of an environment that holds TRL")
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    options = parser.parse_args()
    python = options.trl_python or trl_python()
    model = prepare_model()
    ours = run_m2flow(steps=options.steps, threads=options.threads)
    print(f"m2flow: {ours.wall_s:.2f} s, {ours.cpu_s:.2f} CPU s a step", flush=True)
    found: dict[str, Measured] = {}
    for rows_per_pass in LAYOUTS:
        layout = f"{rows_per_pass} x {PROMPTS * SAMPLES // rows_per_pass}"
        found[layout] = run_trl(
            python, model, rows_per_pass=rows_per_pass, steps=options.steps, threads=options.threads
        )
        print(f"TRL {layout}: {found[layout].wall_s:.2f} s, {found[layout].cpu_s:.2f} CPU s a step", flush=True)
    layout, theirs = min(found.items(), key=lambda item: item[1].wall_s)
    print("step  reward m2flow  reward TRL")
    for step, (one, other) in enumerate(zip(ours.rewards, theirs.rewards, strict=True), start=1):
        print(f"{step:4}  {one:13.3f}  {other:10.3f}")
    rows = rows_of(ours, theirs, layout, f"python apps/reasoning/bench/vs_trl.py --steps {options.steps}")
    for row in rows:
        print(f"{row['name']}: {row['value']:.2f}, {row['peer']}, {row['ratio']:.2f}x, holds: {row['holds']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
