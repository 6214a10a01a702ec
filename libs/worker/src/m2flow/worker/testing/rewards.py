"""Reward functions that behave and misbehave: what a pool is tested with."""

import math
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def length(fields: Mapping[str, Any]) -> float:
    """The length of the completion."""
    return float(len(fields["completion"]))


def wild(fields: Mapping[str, Any]) -> Any:
    """Does what functions do that do not think of who calls them, as `completion` says."""
    word, _, rest = str(fields["completion"]).partition(" ")
    if word == "fork":
        os.fork()
    elif word == "spawn":
        process = subprocess.Popen(["sleep", "60"])
        Path(rest).write_text(str(process.pid))
        process.wait()
    elif word == "say":
        print(rest)
        time.sleep(60)
    elif word == "long":
        return "x" * int(rest)
    return _VALUES.get(word, 1.0)


_VALUES: Mapping[str, Any] = {
    "text": "3",
    "huge": 10**400,
    "part": {"reward": 1.0, "short": math.nan},
    "nameless": {"score": 1.0},
    "none": None,
}


def characters(fields: Mapping[str, Any]) -> float:
    """A number in [0, 1] that depends on every character of the completion."""
    return sum(map(ord, fields["completion"])) % 7 / 6


def obedient(fields: Mapping[str, Any]) -> dict[str, float]:
    """Does what the completion says: "sleep 5", "raise", "exit 3", "nan"; else its length, and a part."""
    word, _, rest = str(fields["completion"]).partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "raise":
        raise ValueError("no answer in the completion")
    elif word == "exit":
        os._exit(int(rest))
    return {"reward": math.nan if word == "nan" else float(len(word)), "format": 1.0}
