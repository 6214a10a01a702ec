"""What the report shows, read back from the files of a run directory, so that it can be made again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.apps.errors import RunDirectoryError
from m2flow.apps.run_directory import RunDirectory

__all__ = ["RunData", "TraceSpan", "load_run", "read_spans"]


@dataclass(frozen=True)
class TraceSpan:
    """A stretch of one track's time; seconds since the run began. `kind` is "busy" or what was waited for."""

    track: str
    name: str
    kind: str
    start_s: float
    end_s: float
    iteration: int


@dataclass(frozen=True)
class RunData:
    """One run. `device_s` has the seconds of each device by cause, over the iterations that the timeline keeps."""

    name: str
    config: str
    metrics: Sequence[Mapping[str, object]]
    spans: Sequence[TraceSpan]
    device_s: Mapping[str, Mapping[str, float]]
    plan: Mapping[str, object]
    explanation: str
    samples: Mapping[int, Sequence[Mapping[str, object]]]
    films: Mapping[int, bytes]

    def series(self, metric: str) -> list[tuple[float, float]]:
        """Returns (step, value) for every row that has a number under this name."""
        rows = [(row["step"], row.get(metric)) for row in self.metrics]
        return [(float(str(step)), float(value)) for step, value in rows if isinstance(value, int | float)]

    def names(self, prefix: str) -> list[str]:
        """Returns the metrics that begin so, in order of appearance."""
        return list(dict.fromkeys(name for row in self.metrics for name in row if name.startswith(prefix)))

    def all_series(self, prefix: str) -> dict[str, list[tuple[float, float]]]:
        """Returns `series` of each metric that begins so and has numbers, by its name."""
        return {name: points for name in self.names(prefix) if (points := self.series(name))}


def load_run(run: RunDirectory) -> RunData:
    """Returns what the run has written so far; files that are not there yet leave their part empty."""
    trace = _read_json(run.timeline)
    return RunData(
        name=run.path.name,
        config=run.config.read_text(encoding="utf-8"),
        metrics=run.read_metrics(),
        spans=read_spans(trace),
        device_s=trace.get("otherData", {}).get("devices", {}),
        plan=_read_json(run.plan),
        explanation=run.explanation.read_text(encoding="utf-8") if run.explanation.exists() else "",
        samples=run.read_samples(),
        films=run.read_films(),
    )


def read_spans(trace: Mapping[str, object]) -> list[TraceSpan]:
    """Returns the complete events ("X") of a Chrome trace, on tracks named by its metadata events ("M")."""
    events = trace.get("traceEvents", [])
    assert isinstance(events, list)
    names: dict[tuple[object, ...], str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            key = (event["pid"],) if event["name"] == "process_name" else (event["pid"], event.get("tid"))
            names[key] = str(event["args"]["name"])
    return [_span(event, names) for event in events if event["ph"] == "X"]


def _span(event: Mapping[str, object], names: Mapping[tuple[object, ...], str]) -> TraceSpan:
    process = names.get((event["pid"],), str(event["pid"]))
    thread = names.get((event["pid"], event["tid"]), str(event["tid"]))
    start_s = float(str(event["ts"])) / 1e6
    args = event.get("args", {})
    assert isinstance(args, dict)
    return TraceSpan(
        track=f"{process} {thread}",
        name=str(event["name"]),
        kind=str(event.get("cat", "busy")),
        start_s=start_s,
        end_s=start_s + float(str(event["dur"])) / 1e6,
        iteration=int(args.get("iteration", 0)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RunDirectoryError(f"{path}: not JSON ({error}): remove the file and make the report again") from None
    assert isinstance(tree, dict)
    return tree
