"""A run directory with everything in it and no run behind it: for tests of what reads one."""

import json
from pathlib import Path

from m2flow.apps.atomic import replace_file
from m2flow.apps.config import TrainingConfig
from m2flow.apps.metrics import MetricsLog
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.yaml_tree import dump_yaml

__all__ = ["example_run", "example_trace"]


def example_run(path: Path, *, num_steps: int = 12) -> RunDirectory:
    """Makes a run of `num_steps` steps at `path`, whose reward rises from 0.2 to 0.9; returns it."""
    run = RunDirectory.create("example", root="unused", directory=str(path))
    replace_file(run.config, dump_yaml(TrainingConfig(num_steps=num_steps)))
    with MetricsLog(run) as log:
        log.write(0, {"eval/greedy_accuracy": 0.13, "eval/sampled_accuracy": 0.14})
        for step in range(1, num_steps + 1):
            log.write(step, _metrics(step, num_steps))
    for step in range(1, num_steps + 1):
        rows = [
            {"prompt": f"{a}+{step}=", "completion": f"{a + step}\n", "answer": str(a + step), "reward": 1.0}
            for a in range(12, 16)
        ]
        run.write_samples(step, rows)
    replace_file(run.timeline, json.dumps(example_trace(num_steps)))
    groups = [{"group": "rollout", "device_ids": [0]}, {"group": "actor", "device_ids": [1]}]
    replace_file(run.plan, json.dumps({"mode": "spatial", "groups": groups}))
    replace_file(run.explanation, "spatial: 4.1 s an iteration; temporal: 5.2 s <because the stages overlap>\n")
    return run


def example_trace(num_iterations: int) -> dict[str, object]:
    """Returns a trace as flow makes them: two workers side by side, the second waiting for the first."""
    events: list[dict[str, object]] = []
    for number, stage in enumerate(("rollout.generate", "actor.train"), start=1):
        place: dict[str, object] = {"pid": number, "tid": number}
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": stage.partition(".")[0]}})
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank 0: {stage}"}})
    for iteration in range(1, num_iterations + 1):
        begin = 5_000_000 * (iteration - 1)
        rows = [
            (1, "rollout.generate", "busy", 0, 3_000_000),
            (1, "wait_input", "wait_input", 3_000_000, 4_500_000),
            (2, "wait_input", "wait_input", 0, 1_000_000),
            (2, "actor.train", "busy", 1_000_000, 4_500_000),
        ]
        for number, name, kind, start, end in rows:
            place = {"pid": number, "tid": number, "ts": begin + start, "dur": end - start}
            events.append({"ph": "X", "name": name, "cat": kind, **place, "args": {"iteration": iteration}})
    busy_s = {"0": 3.0 * num_iterations, "1": 3.5 * num_iterations}
    devices = {
        device: {"busy": busy, "waiting for input": 4.5 * num_iterations - busy} for device, busy in busy_s.items()
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"devices": devices}}


def _metrics(step: int, num_steps: int) -> dict[str, float]:
    metrics = {
        "critic/score/mean": 0.2 + 0.7 * step / num_steps,
        "actor/pg_loss": 0.01 * step,
        "timing_s/rollout.generate": 3.0,
        "timing_s/actor.train": 3.5 - 0.05 * step,
        "timing_s/step": 4.6,
        "throughput/tokens_per_s": 300.0 + step,
        "plan/measured_s": 4.6 - 0.02 * step,
        "plan/predicted_s": 4.1,
    }
    if step % 4 == 0:
        metrics |= {"eval/greedy_accuracy": 0.1 + 0.8 * step / num_steps, "eval/sampled_accuracy": 0.5}
    return metrics
