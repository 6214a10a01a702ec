"""A stream: what stage proxies take and return while a program is traced.

It stands for items that do not exist yet, so everything that would need them at once is refused, with the line of the
program and what to write instead.
"""

import inspect
from pathlib import Path
from typing import NoReturn

from m2flow.flow.errors import TraceError

_PACKAGE = str(Path(__file__).parent)


def location() -> str:
    """The line of the program that is being traced, "recipe.py:12": the nearest frame outside this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def refuse(problem: str, remedy: str) -> NoReturn:
    """Raises TraceError at the program's line."""
    raise TraceError(f"{location()}: {problem}: {remedy}")


class Stream:
    """The items that one stage gives to others. Made by tracing only; it has no data, no length and no truth value."""

    def __init__(self, producer: str, *, window: int | None = None, epochs: int = 0) -> None:
        self.producer = producer
        self.window = window
        self.epochs = epochs

    def __repr__(self) -> str:
        return f"<stream of {self.producer}>"

    def __bool__(self) -> NoReturn:
        refuse(
            f"{self!r} has no truth value while the program is traced",
            "choose between items with flow.filter or flow.split, or decide on the configuration instead",
        )

    def __iter__(self) -> NoReturn:
        refuse(
            f"{self!r} cannot be looped over while the program is traced",
            "give the whole stream to a stage, or to flow.map for a function on each item",
        )

    def __len__(self) -> NoReturn:
        refuse(
            f"{self!r} has no length while the program is traced",
            "take a count from the configuration, or the first n items with flow.first",
        )

    def __getitem__(self, key: object) -> NoReturn:
        refuse(f"{self!r} cannot be indexed ([{key!r}])", "take a field, or part of an item, in a flow.map function")

    def __contains__(self, item: object) -> NoReturn:
        refuse(f"{self!r} cannot be searched for {item!r}", "keep items by a test with flow.filter")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"{self!r} has no attribute {name!r}", "fields belong to items: read them in a flow.map function")

    def __eq__(self, other: object) -> NoReturn:
        refuse(f"{self!r} cannot be compared", "compare fields of items in a flow.filter function")

    def __lt__(self, other: object) -> NoReturn:
        refuse(f"{self!r} cannot be compared", "compare fields of items in a flow.filter function")

    __le__ = __gt__ = __ge__ = __ne__ = __lt__
    __hash__ = object.__hash__

    def __add__(self, other: object) -> NoReturn:
        refuse(f"{self!r} cannot be computed with", "use flow.merge for streams, flow.map for fields of items")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__


class Loop(Stream):
    """The head of a feedback loop: the items that enter it, and those that come back by `feed`."""

    def __init__(self, producer: str, rounds: float = 0.0) -> None:
        super().__init__(producer)
        self.rounds = rounds
        self.heads: list[str] = []
        self.returns: list[Stream] = []

    def feed(self, stream: Stream) -> None:
        """Sends a stream's items back to the head, in the same iteration."""
        if not isinstance(stream, Stream):
            refuse(f"feed got a {type(stream).__name__}", "give it the stream of the items that go round again")
        self.returns.append(stream)
