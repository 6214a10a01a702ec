"""A run in a process of its own, watched: its steps by a log of JSON lines, its CPU by the kernel's account."""

import bisect
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.5


@dataclass(frozen=True)
class Measured:
    """Between the ends of the first and of the last step: seconds per step, and the rewards of all steps."""

    wall_s: float
    cpu_s: float
    rewards: Sequence[float]


def watch(command: Sequence[str], log: Path, *, reward: str, env: Mapping[str, str]) -> Measured:
    """Runs `command` to its end, which writes a line with `step`, `time` and `reward` to `log` a step. Blocks."""
    with (log.parent / "output.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env})
        times, seconds = [time.time()], [0.0]
        while process.poll() is None:
            used = _tree_cpu_s(process.pid)
            if used >= seconds[-1]:  # less: the tree has begun to end
                times.append(time.time())
                seconds.append(used)
            time.sleep(_POLL_S)
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{(log.parent / 'output.txt').read_text()[-4000:]}")
    rows = [row for row in map(json.loads, log.read_text().splitlines()) if reward in row]
    first, last = rows[0], rows[-1]
    steps = last["step"] - first["step"]
    cpu_s = _at(last["time"], times, seconds) - _at(first["time"], times, seconds)
    return Measured((last["time"] - first["time"]) / steps, cpu_s / steps, [row[reward] for row in rows])


def _at(moment: float, times: Sequence[float], values: Sequence[float]) -> float:
    """The value at `moment`, between its two neighbours."""
    after = min(max(bisect.bisect_left(times, moment), 1), len(times) - 1)
    share = (moment - times[after - 1]) / (times[after] - times[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def _tree_cpu_s(root: int) -> float:
    """CPU seconds of a process, its descendants, and those of theirs that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended since
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    total, level = 0, {root}
    while level:
        total += sum(ticks.get(pid, 0) for pid in level)
        level = {pid for pid, parent in parents.items() if parent in level}
    return total / _TICKS
