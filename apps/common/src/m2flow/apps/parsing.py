"""From plain trees to frozen dataclasses.

The dataclass is the schema: its fields are the known keys, their annotations the wanted types, their defaults the
values of keys that nobody set. All problems of one tree are found in one pass, and each names the key by its full
path, what was got, what is wanted, and what to do.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar, get_args, get_origin

from m2flow.apps.errors import ConfigError
from m2flow.apps.yaml_tree import Value

__all__ = ["build", "known_keys", "setting"]

C = TypeVar("C")


def setting(
    default: C,
    meaning: str,
    *,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    high: float | None = None,
) -> C:
    """Returns a dataclass field with a default, one line that says what it means, and bounds (low, high included)."""
    metadata = {"meaning": meaning, "low": low, "above": above, "below": below, "high": high}
    if isinstance(default, dict):
        return typing.cast(C, dataclasses.field(default_factory=lambda: dict(default), metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: type[C], tree: Mapping[str, Value]) -> C:
    """Returns a `cls` from a tree of plain values; ConfigError lists every unknown key and every wrong type."""
    problems: list[str] = []
    result = _build(cls, tree, "", known_keys(cls), problems)
    if problems:
        raise ConfigError(problems)
    return typing.cast(C, result)


def known_keys(cls: type[object]) -> list[str]:
    """Returns the full path of every key that is a value, in the order of the fields: "optimiser.lr"."""
    return list(_keys(cls, ""))


def _keys(cls: type[object], prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _keys(typing.cast(type[object], kind), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _build(cls: type[object], tree: object, prefix: str, known: Sequence[str], problems: list[str]) -> object:
    if not isinstance(tree, Mapping):
        keys = ", ".join(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        problems.append(f"{prefix[:-1]}: got {_shown(tree)}, want a section: set its keys one by one ({keys})")
        return None
    hints = typing.get_type_hints(cls)
    bounds = {field.name: field.metadata for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, object] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if name not in hints:
            problems += [_unknown(leaf, known) for leaf in _leaves(path, value)]
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = _build(typing.cast(type[object], hints[name]), value, f"{path}.", known, problems)
        else:
            values[name] = _convert(value, hints[name], path, problems)
            _check_bounds(values[name], bounds[name], path, problems)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in tree:
            problems.append(f"{prefix}{field.name}: missing, want {_wanted(hints[field.name])}: set it")
    return None if problems else cls(**values)


def _check_bounds(value: object, metadata: Mapping[str, object], path: str, problems: list[str]) -> None:
    low, above, below, high = (metadata.get(bound) for bound in ("low", "above", "below", "high"))
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        if isinstance(low, int | float) and number < low:
            problems.append(f"{path}: got {number}, want at least {low}: raise it")
        if isinstance(above, int | float) and number <= above:
            problems.append(f"{path}: got {number}, want more than {above}: raise it")
        if isinstance(below, int | float) and number >= below:
            problems.append(f"{path}: got {number}, want less than {below}: lower it")
        if isinstance(high, int | float) and number > high:
            problems.append(f"{path}: got {number}, want at most {high}: lower it")


def _leaves(path: str, value: object) -> list[str]:
    if not isinstance(value, Mapping) or not value:
        return [path]
    return [leaf for name, item in value.items() for leaf in _leaves(f"{path}.{name}", item)]


def _unknown(path: str, known: Sequence[str]) -> str:
    leaf = path.rpartition(".")[2]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(path, known, n=1, cutoff=0.0)
    by_leaf = {key.rpartition(".")[2]: key for key in known}
    if not same_leaf and (close := difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)):
        near = [by_leaf[close[0]]]
    return f"{path}: unknown key, the nearest known key is {near[0]}: rename it or remove it"


def _convert(value: object, kind: object, path: str, problems: list[str]) -> object:
    origin = get_origin(kind)
    if origin is tuple and isinstance(value, list | tuple):
        return _convert_tuple(value, get_args(kind), path, problems)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        inner = get_args(kind)[1]
        return {str(key): _convert(item, inner, f"{path}.{key}", problems) for key, item in value.items()}
    for choice in get_args(kind) if origin in (typing.Union, types.UnionType) else (kind,):
        if _is_a(value, choice):
            return value
        if choice is float and _is_a(value, int):
            return float(typing.cast(int, value))
        if choice is str and kind is str and (_is_a(value, int) or _is_a(value, float)):
            return str(value)  # `model.source=7` names a directory; YAML cannot know
    problems.append(f"{path}: got {_shown(value)}, want {_wanted(kind)}: {_remedy(path, kind)}")
    return None


def _is_a(value: object, kind: object) -> bool:
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    return type(value) is kind  # exact: True is not a whole number


def _convert_tuple(
    value: Sequence[object], kinds: tuple[object, ...], path: str, problems: list[str]
) -> tuple[object, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        wanted = [kinds[0]] * len(value)
    else:
        wanted = list(kinds)
    if len(wanted) != len(value):
        problems.append(f"{path}: got {len(value)} entries, want {len(wanted)}: write it as a list of {len(wanted)}")
        return ()
    return tuple(
        _convert(item, kind, f"{path}[{i}]", problems) for i, (item, kind) in enumerate(zip(value, wanted, strict=True))
    )


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def _wanted(kind: object) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_wanted(choice) for choice in get_args(kind))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(typing.cast(type, kind), "a mapping")


def _remedy(path: str, kind: object) -> str:
    examples = {bool: "true", int: "8", float: "1.0e-5", str: "name"}
    if get_origin(kind) in (typing.Union, types.UnionType):
        return _remedy(path, get_args(kind)[0])
    if get_origin(kind) is Literal:
        return f"write for example {path}={get_args(kind)[0]}"
    if get_origin(kind) is tuple:
        entry = "0.9" if get_args(kind)[0] is float else "a"
        return f"write for example {path}=[{entry}, {entry}]"
    return f"write for example {path}={examples.get(typing.cast(type, kind), '{key: value}')}"
