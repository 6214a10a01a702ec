"""Functions that other processes find by name: "module:qualname"."""

import importlib
from collections.abc import Callable
from typing import Any

from m2flow.flow.stream import refuse


def load(target: str) -> Callable[..., Any]:
    """The object that "module:qualname" names. Raises ImportError or AttributeError where there is none."""
    module, _, qualname = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    assert callable(found), target
    return found  # type: ignore[no-any-return]


def target_of(function: object, use: str) -> str:
    """The name of a function that every process can import; refused, at the program's line, where it cannot."""
    if not callable(function):
        refuse(f"{use} got a {type(function).__name__}", "give it a function of a module")
    module, qualname = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    target = f"{module}:{qualname}"
    if "<" in target or not module or not qualname:
        refuse(
            f"{use} got {qualname or function!r}, which other processes cannot import",
            "define the function at the top level of a module (no lambda, no function inside a function)",
        )
    try:
        found = load(target)
    except (ImportError, AttributeError, AssertionError) as error:
        refuse(f"{use} got {target}, which cannot be imported ({error})", "define it at the top level of a module")
    if found is not function:
        refuse(f"{use} got {target}, and that name holds another object", "give the function its module's name")
    return target
