"""Functions of the user's, named in a YAML as module:qualname: tools, rewards."""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec

__all__ = ["function_problems"]


def function_problems(key: str, target: str) -> list[str]:
    """Returns what is wrong with the function that the setting `key` names; its module is read, not imported."""
    module, colon, name = target.partition(":")
    spec = _spec(module) if module and colon and name else None
    if spec is None:
        remedy = "name a function as module:qualname, importable where the run starts"
        return [f"{key}: got {target!r}, which cannot be found: {remedy}"]
    try:
        names = set(_bound(_parsed(spec).body))
    except (SyntaxError, ValueError, ImportError) as error:
        return [f"{key}: got {target!r}, and {spec.origin} is no Python: {error}"]
    name = name.partition(".")[0]
    if name in names or names & {"*", "__getattr__"} or not names:
        return []
    near = get_close_matches(name, names, 1)
    remedy = f"did you mean {near[0]!r}?" if near else "name a function that is there"
    return [f"{key}: got {target!r}, and {spec.origin} has no {name!r}: {remedy}"]


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except Exception:  # A package around it is imported, and may raise anything.
        return None


def _parsed(spec: ModuleSpec) -> ast.Module:
    """The module's syntax; nothing where it has no source to read."""
    source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
    return ast.parse(source or "", spec.origin or spec.name)


def _bound(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that statements bind where they stand, "*" for any."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
        else:
            yield from (
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )
            inner = [statement, *getattr(statement, "handlers", [])]
            for block in [getattr(one, part, []) for one in inner for part in ("body", "orelse", "finalbody")]:
                yield from _bound(block)
