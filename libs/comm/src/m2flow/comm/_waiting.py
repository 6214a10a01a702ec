"""Who asks something of a channel's index, and those of them who wait for their answer."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from m2flow.comm._entries import Entry, Filter


class Refusal(NamedTuple):
    """Why a request failed: the name of an error class, its text, and the peers it is about."""

    type: str
    message: str = ""
    peers: tuple[str, ...] = ()


RequestId = tuple[Hashable, int]


class Caller(NamedTuple):
    """Who asks: `session` is its connection, `member` its name, `request` unique within the session."""

    session: Hashable
    member: str
    request: int
    answer: Callable[[Sequence[Entry], Refusal | None], None]

    @property
    def asked(self) -> RequestId:
        """What it asked for, as who withdraws it says."""
        return self.session, self.request


@dataclass(slots=True, eq=False)
class Put:
    caller: Caller
    entries: deque[Entry]


@dataclass(slots=True, eq=False)
class Get:
    caller: Caller
    wanted: Filter
    weight: float
    at_least: float | None
    most_bytes: int
    ticket: int = 0

    @property
    def enough(self) -> float:
        return self.weight if self.at_least is None else self.at_least


@dataclass(slots=True)
class Waiting:
    """Those who wait, in order, by what they asked for; those who take also by what they want."""

    puts: OrderedDict[RequestId, Put] = field(default_factory=OrderedDict)
    gets: dict[Filter, OrderedDict[int, Get]] = field(default_factory=dict)
    asked: dict[RequestId, Get] = field(default_factory=dict)
    tickets: int = 0

    def add(self, get: Get) -> None:
        self.tickets += 1
        get.ticket = self.tickets
        self.asked[get.caller.asked] = get
        self.gets.setdefault(get.wanted, OrderedDict())[get.ticket] = get

    def remove(self, get: Get) -> None:
        queue = self.gets[get.wanted]
        del queue[get.ticket]
        del self.asked[get.caller.asked]
        if not queue:
            del self.gets[get.wanted]

    def of(self, session: Hashable) -> list[Get]:
        return [get for get in self.asked.values() if get.caller.session == session]

    def in_order(self, filters: Iterable[Filter]) -> list[Get]:
        found = [get for wanted in filters if wanted in self.gets for get in self.gets[wanted].values()]
        return sorted(found, key=lambda get: get.ticket) if len(found) > 1 else found
