"""Metrics of a run: one row a step, to metrics.jsonl and to TensorBoard, without torch and without an account."""

import math
import time
from collections.abc import Mapping
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from m2flow.apps.run_directory import RunDirectory

__all__ = ["MetricsLog", "spoken"]


def spoken(name: str) -> str:
    """Returns what people call a metric: "greedy accuracy" for "eval/greedy_accuracy"."""
    return name.rpartition("/")[2].replace("_", " ")


class MetricsLog:
    """Appends rows to a run directory. A context manager: leaving it flushes the TensorBoard events."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._events = EventFileWriter(str(run.path))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one row; a number that is not finite becomes null in the JSON, which has no word for it."""
        now = time.time()
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._run.append_metrics({"step": step, "time": round(now, 3), **row})
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._events.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._events.close()
