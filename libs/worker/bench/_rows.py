"""A figure as a row of the table that `nox -s bench` prints."""

import os
import platform
from typing import Any

COMMAND = "nox -s bench -- worker"


def row(
    name: str, value: float, unit: str, target: float, *, peer: str = "", ratio: float | None = None
) -> dict[str, Any]:
    """One figure; it holds where the ratio, or else the value, is at most the target."""
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "peer": peer,
        "ratio": ratio,
        "target": target,
        "holds": (value if ratio is None else ratio) <= target,
        "command": COMMAND,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
