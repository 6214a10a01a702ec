"""Reward functions that behave and misbehave: what a pool is tested with."""

import math
import os
import time
from collections.abc import Mapping
from typing import Any


def length(fields: Mapping[str, Any]) -> float:
    """The length of the completion."""
    return float(len(fields["completion"]))


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
