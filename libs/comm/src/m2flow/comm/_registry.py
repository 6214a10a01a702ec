"""The classes that may travel: dataclasses and named tuples that both ends have registered by import.

Nothing on the wire causes an import: a name that this process has not registered is refused.
"""

import dataclasses
import zlib
from typing import Any, NamedTuple, TypeVar

from m2flow.comm.errors import PayloadError

_T = TypeVar("_T", bound=type)


class Record(NamedTuple):
    """A registered class and the fields it travels with."""

    cls: type
    name: str
    fields: tuple[str, ...]
    # Of the field names: both ends must agree on them.
    check: int


_by_class: dict[type, Record] = {}
_by_name: dict[str, Record] = {}


def register(cls: _T) -> _T:
    """Admits a dataclass or a named tuple to payloads, under "module:qualname"; returns it, so it can decorate.

    It is rebuilt by calling it with its fields by position, so every field must be an argument of its constructor.
    Raises ValueError for any other class. Does not block.
    """
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        hidden = [field.name for field in fields if not field.init or field.kw_only]
        if hidden:
            raise ValueError(
                f"register: {cls.__qualname__} has fields {hidden}, want all taken by position: drop kw_only"
            )
        names = tuple(field.name for field in fields)
    elif issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        names = tuple(getattr(cls, "_fields"))  # noqa: B009 (a type checker knows no such attribute of a type)
    else:
        raise ValueError(f"register: got {cls.__qualname__}, want a dataclass or a named tuple")
    record = Record(cls, f"{cls.__module__}:{cls.__qualname__}", names, zlib.crc32(",".join(names).encode()))
    _by_class[cls] = record
    _by_name[record.name] = record
    return cls


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
    """Calls the class with its fields; what its constructor refuses is a PayloadError."""
    try:
        return record.cls(*values)
    except Exception as error:
        raise PayloadError(f"got a {record.name} that its own constructor refuses: {error}") from error
