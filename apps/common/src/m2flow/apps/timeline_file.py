"""timeline.json: the kept iterations as Chrome trace events, and where each device's time went in them."""

import json
from collections import defaultdict
from collections.abc import Sequence

from m2flow.apps.atomic import replace_file
from m2flow.apps.run_directory import RunDirectory
from m2flow.flow import IterationResult, account, chrome_trace

__all__ = ["write_timeline"]


def write_timeline(run: RunDirectory, results: Sequence[IterationResult], *, device_ids: Sequence[int]) -> None:
    """Writes the iterations in order. A failed write leaves the old file.

    Perfetto shows the events; the seconds of each device by cause stand under otherData, which it passes over.
    """
    trace = chrome_trace(result.timeline for result in results)
    trace["otherData"] = {"devices": _device_seconds(results, device_ids)}
    replace_file(run.timeline, json.dumps(trace))


def _device_seconds(results: Sequence[IterationResult], device_ids: Sequence[int]) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = {str(number): defaultdict(float) for number in device_ids}
    for result in results:
        for device in account(result.timeline, result.start_ns, result.end_ns, device_ids):
            for cause, seconds in device.causes.items():
                totals[str(device.device_id)][cause] += seconds
    return totals
