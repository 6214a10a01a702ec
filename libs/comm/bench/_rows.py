"""What every script here shares: roles in processes of their own, and the rows that they report."""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from m2flow.comm import Endpoint

TOKEN = "bench"
Role = Callable[..., Any]


def machine() -> str:
    """Says where the figures come from."""
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())
    # Which build of Python it is makes a quarter of what a message costs.
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()} of {sys.base_prefix}"


def row(
    name: str,
    value: float,
    unit: str,
    *,
    target: float,
    at_least: bool,
    peer: str = "",
    peer_value: float = 0.0,
    on_ratio: bool = False,
) -> dict[str, Any]:
    """Returns one row; `holds` compares the value, or its ratio to the peer's, with the target."""
    ratio = value / peer_value if peer_value else None
    judged = ratio if on_ratio else value
    assert judged is not None
    return {
        "name": name,
        "value": float(value),
        "unit": unit,
        "peer": f"{peer} {peer_value:.4g} {unit}" if peer else "",
        "ratio": ratio,
        "target": f"{'>=' if at_least else '<='} {target}{'x' if on_ratio else ''}",
        "holds": bool(judged >= target if at_least else judged <= target),
        "command": "nox -s bench -- comm",
        "machine": machine(),
    }


class Cast:
    """Processes that play roles of a script; each prints one JSON line when it is done."""

    def __init__(self, script: str) -> None:
        self._script = script
        self._stack = ExitStack()
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="m2b")))
        self.directory.chmod(0o700)

    def __enter__(self) -> "Cast":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, role: str, name: str, *arguments: object) -> "subprocess.Popen[str]":
        """Starts a process that plays a role under an endpoint name."""
        command = [sys.executable, self._script, "--role", role, name, str(self.directory), *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._stack.callback(_end, process)
        return process


def said(process: "subprocess.Popen[str]") -> Any:
    """Waits for what a process prints at its end."""
    output, _ = process.communicate(timeout=120)
    if process.returncode:
        raise RuntimeError(f"{process.args} failed")
    return json.loads(output.splitlines()[-1])


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def main(
    script: str,
    measure: Callable[[], Iterable[dict[str, Any]]],
    roles: dict[str, Role],
    plot: Callable[[Path], None] | None = None,
) -> None:
    """Plays a role when told to, else measures, writes the rows and draws what there is to draw."""
    if sys.argv[1:2] == ["--role"]:
        role, name, directory, *arguments = sys.argv[2:]
        # As the processes of a run do: what is imported is no work for the cycle collector.
        gc.freeze()
        with Endpoint(Path(directory), name, token=TOKEN, connect_timeout_s=60) as endpoint:
            print(json.dumps(roles[role](endpoint, *arguments)), flush=True)
        return
    parser = argparse.ArgumentParser(description=script)
    parser.add_argument("--json", type=Path)
    if plot is not None:
        parser.add_argument("--plot", type=Path, help="an SVG or PNG; needs matplotlib")
    options = parser.parse_args()
    rows = []
    for found in measure():
        rows.append(found)
        print({key: found[key] for key in ("name", "value", "unit", "peer", "ratio", "target", "holds")}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    if plot is not None and options.plot:
        plot(options.plot)


def median_us(nanoseconds: Sequence[int]) -> float:
    """Returns the median in microseconds."""
    return statistics.median(nanoseconds) / 1000
