"""Marks the methods of a worker that take items and give items."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from m2flow.worker.item import Item

_MARK = "__m2flow_stage__"


class Inbox(Protocol):
    """What a stage that batches by itself pulls from, as long as one call lasts."""

    def take(self, most: int) -> list[Item]:
        """Up to `most` of the items that are there now; none where there are none. Does not wait for others."""
        ...


StageMethod = TypeVar("StageMethod", bound=Callable[[Any, list[Item]], Iterable[Item]] | Callable[[Any, Inbox], Any])


def stage(method: StageMethod) -> StageMethod:
    """Marks `method(self, items) -> Iterable[Item]` as a stage.

    A list is sent on when the method returns; a generator's items are sent on as they are yielded. Marking changes
    nothing else: the method can be called as ever.

    An engine that batches continuously has `method(self, inbox: Inbox) -> Iterator[Item]` instead: it is called when
    there are items, takes as many as it has room for between its steps, yields each one as it is finished, and returns
    when it has nothing in hand and there is nothing to take. It is called again when there is.

    A stage whose weights may change in the middle of a call says where: it calls `self.context.safe_point()`.
    """
    setattr(method, _MARK, True)
    return method


def stage_names(cls: type) -> tuple[str, ...]:
    """The names of the stages of a class, its bases' included, sorted."""
    return tuple(sorted(name for name in dir(cls) if getattr(getattr(cls, name, None), _MARK, False)))


def pulls(method: Callable[..., Any]) -> bool:
    """Whether a stage takes an `inbox`, rather than a list of items."""
    return "inbox" in inspect.signature(method).parameters
