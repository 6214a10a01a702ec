"""Marks the methods of a worker that take items and give items."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from m2flow.worker.item import Item

_MARK = "__m2flow_stage__"

StageMethod = TypeVar("StageMethod", bound=Callable[[Any, list[Item]], Iterable[Item]])


def stage(method: StageMethod) -> StageMethod:
    """Marks `method(self, items) -> Iterable[Item]` as a stage.

    A list is sent on when the method returns; a generator's items are sent on as they are yielded. Marking changes
    nothing else: the method can be called as ever.
    """
    setattr(method, _MARK, True)
    return method


def stage_names(cls: type) -> tuple[str, ...]:
    """The names of the stages of a class, its bases' included, sorted."""
    return tuple(sorted(name for name in dir(cls) if getattr(getattr(cls, name, None), _MARK, False)))
