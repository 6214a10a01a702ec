"""A launched group: calls on its ranks, and objects that live beside its workers."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol

from m2flow.worker._wire import group_of
from m2flow.worker.call import CallHandle
from m2flow.worker.placement import Placement
from m2flow.worker.spec import GroupSpec, method_names
from m2flow.worker.target import resolve_target


class Caller(Protocol):
    """What a group speaks through: the session that launched it."""

    def call(self, group: str, attached: str, method: str, arguments: dict[int, tuple[Any, ...]]) -> CallHandle:
        """Calls a method with each rank's arguments."""

    def attach(self, group: str, name: str, target: str, arguments: tuple[Any, ...]) -> CallHandle:
        """Makes an object beside every rank."""

    def kill(self, group: str, rank: int) -> None:
        """Kills one rank as an accident would."""

    def pid(self, group: str, rank: int) -> int:
        """The process that holds a rank."""


class Method:
    """A method of some ranks; calling it returns a handle at once."""

    def __init__(self, caller: Caller, group: str, attached: str, name: str, ranks: tuple[int, ...]) -> None:
        self._caller = caller
        self._group = group
        self._attached = attached
        self._name = name
        self._ranks = ranks

    def __call__(self, *args: Any) -> CallHandle:
        """Calls every rank with the same arguments, a payload tree each."""
        return self._caller.call(self._group, self._attached, self._name, dict.fromkeys(self._ranks, args))

    def scatter(self, *args: Sequence[Any]) -> CallHandle:
        """Calls every rank with its own part of each argument, which has one entry per rank, in rank order.

        Raises ValueError where an argument has another length.
        """
        for number, arg in enumerate(args):
            if len(arg) != len(self._ranks):
                raise ValueError(
                    f"{group_of(self._group)}.{self._name}.scatter: argument {number} has {len(arg)} entries, "
                    f"want {len(self._ranks)}, one per rank"
                )
        parts = {rank: tuple(arg[place] for arg in args) for place, rank in enumerate(self._ranks)}
        return self._caller.call(self._group, self._attached, self._name, parts)


class RankSet:
    """Some ranks of a group, or of the objects attached to it: attributes are methods, calls return handles."""

    def __init__(
        self, caller: Caller, group: str, attached: str, methods: tuple[str, ...], ranks: tuple[int, ...]
    ) -> None:
        self._caller = caller
        self._group = group
        self._attached = attached
        self._methods = methods
        self.ranks = ranks

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def on(self, *ranks: int) -> "RankSet":
        """These ranks alone. Raises ValueError on one that is not there."""
        missing = [rank for rank in ranks if rank not in self.ranks]
        if missing or not ranks:
            raise ValueError(f"{group_of(self._group)}.on: got ranks {list(ranks)}, want some of {list(self.ranks)}")
        return RankSet(self._caller, self._group, self._attached, self._methods, ranks)

    def method(self, name: str) -> Method:
        """The method of that name, for a name that only the run knows. Raises AttributeError with a suggestion."""
        if name not in self._methods:
            _unknown_method(group_of(self._group), name, self._methods)
        return Method(self._caller, self._group, self._attached, name, self.ranks)

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.method(name)


class AttachedGroup(RankSet):
    """The objects that live beside a group's workers, one per rank. `attached` ends when all have been made."""

    def __init__(
        self, caller: Caller, group: str, name: str, methods: tuple[str, ...], ranks: tuple[int, ...], made: CallHandle
    ) -> None:
        super().__init__(caller, group, name, methods, ranks)
        self.attached = made


class WorkerGroup(RankSet):
    """A group that runs; made by `Session.start`.

    `key` is its name, or another where it has been re-placed: what the session calls it by.
    """

    def __init__(self, caller: Caller, spec: GroupSpec, placement: Placement, key: str) -> None:
        super().__init__(caller, key, "", spec.methods, tuple(range(placement.world_size)))
        self.key = key
        self.spec = spec
        self.placement = placement

    @property
    def name(self) -> str:
        """The name of its specification."""
        return self.spec.name

    @property
    def pids(self) -> list[int]:
        """The process of each rank now, in rank order."""
        return [self._caller.pid(self.key, rank) for rank in self.ranks]

    def attach(self, name: str, target: str, *args: Any) -> AttachedGroup:
        """Makes `target(worker, context, *args)` beside every worker, on a thread of its own there.

        Returns at once; its methods run after it has been made, one at a time per rank, beside the worker's own calls.
        Raises ImportError or AttributeError where there is no such class.
        """
        methods = method_names(resolve_target(target))
        made = self._caller.attach(self.key, name, target, args)
        return AttachedGroup(self._caller, self.key, name, methods, self.ranks, made)

    def kill(self, rank: int) -> None:
        """Sends SIGKILL to a rank's process, as an accident would: a drill. RefusedError where ranks are threads."""
        self._caller.kill(self.key, rank)


def _unknown_method(group: str, name: str, methods: tuple[str, ...]) -> NoReturn:
    """Raises the AttributeError for a method that a group has not."""
    near = get_close_matches(name, methods, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(methods) or 'none'}"
    raise AttributeError(f"group {group!r} has no method {name!r}: {hint}")
