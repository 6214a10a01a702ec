"""The classes that may travel: dataclasses and named tuples that both ends have registered by import.

Nothing on the wire causes an import: a name that this process has not registered is refused.
"""

import dataclasses
import inspect
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from m2flow.comm.errors import PayloadError

_BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD
_T = TypeVar("_T", bound=type)


class Record(NamedTuple):
    """A registered class and the fields it travels with."""

    cls: type
    name: str
    fields: tuple[str, ...]
    # Of the field names: both ends must agree on them.
    check: int
    make: Callable[[list[Any]], Any]


_by_class: dict[type, Record] = {}
_by_name: dict[str, Record] = {}


def register(cls: _T) -> _T:
    """Admits a dataclass or a named tuple to payloads, under "module:qualname"; returns it, so it can decorate.

    A dataclass is rebuilt by calling it with its fields by position, which may refuse them; then each field gets the
    value that was sent, should its constructor have made another of it. So its constructor must take its fields, all of
    them and nothing else. A named tuple is made of the values that were sent. What an object holds beside its fields
    does not travel. Raises ValueError for any other class. Does not block.
    """
    make: Callable[[list[Any]], Any]
    if dataclasses.is_dataclass(cls):
        names = tuple(field.name for field in dataclasses.fields(cls))
        taken = [name if kind is _BY_POSITION else f"{kind.description} {name}" for name, kind in _arguments(cls)]
        if taken != list(names):
            raise ValueError(
                f"register: {cls.__qualname__} has the fields {list(names)} and takes {taken}, want the same by "
                "position: drop kw_only, init=False and InitVar"
            )
        make = partial(_call, cls, names)
    elif issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        # A type checker knows no such attributes of a type.
        names, make = getattr(cls, "_fields"), getattr(cls, "_make")  # noqa: B009
    else:
        raise ValueError(f"register: got {cls.__qualname__}, want a dataclass or a named tuple")
    record = Record(cls, f"{cls.__module__}:{cls.__qualname__}", names, zlib.crc32(",".join(names).encode()), make)
    _by_class[cls] = record
    _by_name[record.name] = record
    return cls


def _arguments(cls: type) -> list[tuple[str, Any]]:
    return [(argument.name, argument.kind) for argument in inspect.signature(cls).parameters.values()]


def _call(cls: type, names: tuple[str, ...], values: list[Any]) -> Any:
    built = cls(*values)
    for name, value in zip(names, values, strict=True):
        if getattr(built, name) is not value:
            # A frozen dataclass sets its fields so too.
            object.__setattr__(built, name, value)
    return built


def record_of(cls: type) -> Record | None:
    """Returns the record of a registered class, or None."""
    return _by_class.get(cls)


def record_named(name: str, check: int) -> Record:
    """Returns the record of a name on the wire; raises PayloadError where this process has none, or another."""
    record = _by_name.get(name)
    if record is None:
        raise PayloadError(f"got a {name}, which this process has not registered: import its module first")
    if record.check != check:
        raise PayloadError(f"got a {name} with other fields than here ({', '.join(record.fields)}): run one version")
    return record


def rebuild(record: Record, values: list[Any]) -> Any:
    """Makes an object of its fields; what its constructor refuses is a PayloadError."""
    try:
        return record.make(values)
    except Exception as error:
        raise PayloadError(f"got a {record.name} that its own constructor refuses: {error}") from error
