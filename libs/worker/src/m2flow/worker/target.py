"""Names of classes and functions, "module:qualname": what crosses a process instead of code."""

from importlib import import_module
from typing import Any


def target_of(thing: Any) -> str:
    """The name under which another process finds a class or a function.

    Raises ValueError where it would not: a lambda, a class inside a function, anything of `__main__`.
    """
    module, qualname = thing.__module__, thing.__qualname__
    if module == "__main__" or "<" in qualname:
        raise ValueError(
            f"target: got {module}:{qualname}, want a name at the top of an importable module: "
            "other processes import it by that name"
        )
    return f"{module}:{qualname}"


def resolve_target(target: str) -> Any:
    """Imports what a name stands for.

    Raises ValueError on a name of the wrong form, ImportError and AttributeError where there is no such thing.
    """
    module, colon, qualname = target.partition(":")
    if not (module and colon and qualname):
        raise ValueError(f'target: got {target!r}, want "module:qualname"')
    found: Any = import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found
