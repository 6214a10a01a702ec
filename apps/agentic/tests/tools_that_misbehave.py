"""Tools as a model must expect them: named in tests as "tools_that_misbehave:...", importable beside them."""

import os
import time


def obey(argument: str) -> str:
    """Does what its argument says: "sleep 60", "raise", "exit 3", "long"; else gives it back."""
    word, _, rest = argument.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "raise":
        raise RuntimeError("no such luck")
    elif word == "exit":
        os._exit(int(rest))
    elif word == "long":
        return "x" * 1_000_000
    return argument
