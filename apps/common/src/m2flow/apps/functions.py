"""Functions of the user's, named in a YAML as module:qualname: tools, rewards."""

import importlib.util

__all__ = ["function_problems"]


def function_problems(key: str, target: str) -> list[str]:
    """Returns what is wrong with the function that the setting `key` names; its module is looked for, not imported."""
    module, colon, name = target.partition(":")
    if module and colon and name and _is_there(module):
        return []
    remedy = "name a function as module:qualname, importable where the run starts"
    return [f"{key}: got {target!r}, which cannot be found: {remedy}"]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # A package around it is imported, and may raise anything.
        return False
