"""Collectives between ranks that are endpoints: broadcast, scatter, gather, all-gather, all-to-all, rows from n to m.

Every rank calls the same collectives in the same order. Each call returns a handle; `wait` blocks for it, while the
call's own time lasts. They are made of sends and receives, so what holds for those holds here: payloads are any trees,
and a dead rank is named.
"""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from m2flow.comm import _torch
from m2flow.comm._deadline import Deadline
from m2flow.comm.errors import TimeoutError_
from m2flow.comm.payload import Tree

T = TypeVar("T")
# A rank, and what is sent to it or comes from it.
_Part = tuple[str, "Future[Any]"]


class Backend(Protocol):
    """What carries messages between named ranks: an Endpoint, or a process group of torch.distributed.

    Messages of one sender and tag arrive in the order sent. A future of `isend` is done when the receiver has the
    message, one of `irecv` holds its tree; both fail with PeerLostError when the other end dies. `irecv` does
    not block; `isend` does for the copy and its memory and, at an endpoint, while 8 MiB are on their way to the peer. A
    tree that cannot be encoded raises PayloadError at once, unless it is handed over as it is.
    """

    name: str

    def isend(self, peer: str, tree: Tree, *, tag: str = "", timeout_s: float | None = None) -> "Future[None]":
        """Sends a tree; raises TimeoutError_ once it has blocked for `timeout_s` seconds, and then sends nothing.

        Until the future is done the sender must not change what it sent.
        """

    def irecv(self, peer: str, *, tag: str = "") -> "Future[Tree]":
        """Receives the next tree of a peer and tag. A cancelled future takes none."""

    def close(self) -> None:
        """Frees what the backend holds."""


class Handle(Generic[T]):
    """A collective under way."""

    def __init__(
        self,
        what: str,
        parts: Sequence[_Part],
        finish: Callable[[list[Any]], T],
        deadline: Deadline,
    ) -> None:
        self._what = what
        self._parts = parts
        self._finish = finish
        self._deadline = deadline

    def done(self) -> bool:
        """Says whether `wait` would return, or raise, at once."""
        return bool(self._failed()) or all(future.done() for _, future in self._parts)

    def wait(self, timeout_s: float | None = None) -> T:
        """Blocks for the result, until the time that the collective was given is over, or sooner after `timeout_s`.

        Raises PeerLostError for a rank that died, as soon as one has; TimeoutError_ naming those that are missing, and
        only those. It may be waited for again.
        """
        deadline = self._deadline.sooner(timeout_s)
        left_s = deadline.left_s
        futures = [future for _, future in self._parts]
        if len(futures) > 1:
            concurrent.futures.wait(futures, left_s, return_when=concurrent.futures.FIRST_EXCEPTION)
            left_s = 0.0
        for failed in self._failed():
            failed.result()
        try:
            # For one alone this is the wait: it reads the link meanwhile.
            return self._finish([future.result(left_s) for future in futures])
        except TimeoutError as error:
            if not deadline.ended(error):
                raise
            missing = {peer for peer, future in self._parts if not future.done()}
            if not missing:
                # The last has come, or failed, this very moment.
                return self.wait(0.0)
            raise self._deadline.timed_out(self._what, ", ".join(sorted(missing))) from None

    def _failed(self) -> "list[Future[Any]]":
        return [future for _, future in self._parts if future.done() and future.exception() is not None]


class RankGroup:
    """The ranks of one group, by name and in order, seen from one of them.

    Each collective returns its handle once what it sends is on its way. It blocks until then, as the backend's `isend`
    does: for the copies and their memory and, between endpoints, while 8 MiB are on their way to a rank. `timeout_s` is
    for all of it: so many seconds after the call began, that or `wait` raises TimeoutError_, naming who is missing. It
    raises PayloadError for a tree that cannot be encoded, which was a call all the same: the others wait for it until
    their time is over, and the calls after it meet again. ValueError is raised, and no call made, where not
    every rank is given a tree or `root` is none of the ranks, which begin with 0.
    """

    def __init__(self, backend: Backend, name: str, members: Sequence[str]) -> None:
        if backend.name not in members or len(set(members)) != len(members):
            raise ValueError(
                f"group {name!r}: got members {list(members)}, want {backend.name!r} among them, each once"
            )
        self.name = name
        self.members = tuple(members)
        self.rank = self.members.index(backend.name)
        self._backend = backend
        self._num_calls = 0

    def broadcast(self, tree: Tree, *, root: int, timeout_s: float | None = None) -> Handle[Tree]:
        """Gives the root's tree to all; the others' argument is ignored."""
        tag, deadline = self._tag("broadcast", root), Deadline(timeout_s)
        if self.rank == root:
            return Handle(tag, self._sends([tree] * len(self.members), tag, deadline), lambda _: tree, deadline)
        return Handle(tag, [self._recv(self.members[root], tag)], lambda got: got[0], deadline)

    def scatter(self, trees: Sequence[Tree] | None, *, root: int, timeout_s: float | None = None) -> Handle[Tree]:
        """Gives rank i the root's i-th tree; the others give None."""
        # What is refused is no call: the root may make it again, and the others wait for that.
        parts = self._one_each("scatter", trees or ()) if self.rank == root else ()
        tag, deadline = self._tag("scatter", root), Deadline(timeout_s)
        if self.rank != root:
            return Handle(tag, [self._recv(self.members[root], tag)], lambda got: got[0], deadline)
        return Handle(tag, self._sends(parts, tag, deadline), lambda _: parts[self.rank], deadline)

    def gather(self, tree: Tree, *, root: int, timeout_s: float | None = None) -> Handle[list[Tree] | None]:
        """Collects every rank's tree at the root, in order of rank; the others get None."""
        tag, deadline = self._tag("gather", root), Deadline(timeout_s)
        if self.rank != root:
            sent = _send(self._backend, self.members[root], tree, tag, deadline)
            return Handle(tag, [sent], lambda _: None, deadline)
        return Handle(tag, self._recvs(tag), lambda got: self._with(tree, got), deadline)

    def all_gather(self, tree: Tree, *, timeout_s: float | None = None) -> Handle[list[Tree]]:
        """Collects every rank's tree at every rank, in order of rank."""
        return self._exchange("all_gather", [tree] * len(self.members), list, timeout_s)

    def all_to_all(self, trees: Sequence[Tree], *, timeout_s: float | None = None) -> Handle[list[Tree]]:
        """Gives rank i each rank's i-th tree, in order of rank."""
        return self._exchange("all_to_all", self._one_each("all_to_all", trees), list, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> Handle[None]:
        """Is done once every rank has called it."""
        return self._exchange("barrier", [None] * len(self.members), lambda _: None, timeout_s)

    def _exchange(
        self, what: str, trees: Sequence[Tree], finish: Callable[[list[Tree]], T], timeout_s: float | None
    ) -> Handle[T]:
        tag, deadline = self._tag(what), Deadline(timeout_s)
        # First, so that what comes has somebody who takes it, also where a send fails.
        receives = self._recvs(tag)
        sends = self._sends(trees, tag, deadline)
        own = trees[self.rank]
        return Handle(tag, receives + sends, lambda got: finish(self._with(own, got[: len(receives)])), deadline)

    def _with(self, own: Tree, others: list[Tree]) -> list[Tree]:
        return [*others[: self.rank], own, *others[self.rank :]]

    def _one_each(self, what: str, trees: Sequence[Tree]) -> Sequence[Tree]:
        if len(trees) != len(self.members):
            raise ValueError(f"{what}: got {len(trees)} trees, want {len(self.members)}, one a rank")
        return trees

    def _tag(self, what: str, root: int = 0) -> str:
        if not 0 <= root < len(self.members):
            raise ValueError(f"{what}: got root {root}, want a rank, 0 to {len(self.members) - 1}")
        self._num_calls += 1
        return f"{self.name}/{what}/{self._num_calls}"

    def _sends(self, trees: Sequence[Tree], tag: str, deadline: Deadline) -> list[_Part]:
        """Sends each other rank its tree."""
        others = [(name, tree) for name, tree in zip(self.members, trees, strict=True) if name != self._backend.name]
        return [_send(self._backend, peer, tree, tag, deadline) for peer, tree in others]

    def _recvs(self, tag: str) -> list[_Part]:
        """Receives each other rank's tree."""
        return [self._recv(name, tag) for name in self.members if name != self._backend.name]

    def _recv(self, peer: str, tag: str) -> _Part:
        return peer, self._backend.irecv(peer, tag=tag)


def _send(backend: Backend, peer: str, tree: Tree, tag: str, deadline: Deadline) -> _Part:
    try:
        return peer, backend.isend(peer, tree, tag=tag, timeout_s=deadline.left_s)
    except TimeoutError_ as error:
        # It counts from when the ranks before it had their trees.
        raise deadline.timed_out(error.channel, error.peer) from error


class Span(NamedTuple):
    """Rows that one rank gives another: where they start at each, and how many."""

    source: int
    target: int
    source_start: int
    target_start: int
    num_rows: int


def spans(source_rows: Sequence[int], target_rows: Sequence[int]) -> list[Span]:
    """Returns which rows go from whom to whom when rows in order are dealt anew, for any counts of equal sum.

    `source_rows` and `target_rows` are the numbers of rows of each rank. Raises ValueError where the sums differ
    or a number is below 0.
    """
    if min((*source_rows, *target_rows), default=0) < 0:
        raise ValueError(f"got {list(source_rows)} rows to give and {list(target_rows)} to take, want none below 0")
    if sum(source_rows) != sum(target_rows):
        raise ValueError(f"got {sum(source_rows)} rows to give and {sum(target_rows)} to take, want as many")
    found = []
    source = target = source_start = target_start = 0
    while source < len(source_rows) and target < len(target_rows):
        count = min(source_rows[source] - source_start, target_rows[target] - target_start)
        if count:
            found.append(Span(source, target, source_start, target_start, count))
        source_start, target_start = source_start + count, target_start + count
        if source_start == source_rows[source]:
            source, source_start = source + 1, 0
        elif target_start == target_rows[target]:
            target, target_start = target + 1, 0
    return found


def move_rows(
    backend: Backend,
    rows: Any,
    *,
    tag: str,
    sources: Mapping[str, int],
    targets: Mapping[str, int],
    timeout_s: float | None = None,
) -> Handle[Any]:
    """Deals the rows of n ranks anew to m ranks, in order and as unevenly as asked; ranks may be on both sides.

    `rows` is this rank's numpy array or tensor of shape [sources[name], ...], or None where it gives none; the result
    is its array of shape [targets[name], ...], or None. Where no rank gives a row, who gives no array itself takes one
    of shape [0]. Returns the handle, blocks until then and takes its time as a RankGroup's do. Raises ValueError where
    counts and rows disagree.
    """
    deadline = Deadline(timeout_s)
    givers, takers = list(sources), list(targets)
    num_rows = 0 if rows is None else len(rows)
    if num_rows != sources.get(backend.name, 0):
        raise ValueError(f"move_rows: got {num_rows} rows, want {sources.get(backend.name, 0)}")
    given: list[tuple[str, Any]] = []
    receives: list[_Part] = []
    dealt = spans(list(sources.values()), list(targets.values()))
    if dealt:
        # Who takes no row learns from a giver of some what a row is.
        dealt += [Span(dealt[0].source, taker, 0, 0, 0) for taker, name in enumerate(takers) if not targets[name]]
    for span in dealt:
        giver, taker = givers[span.source], takers[span.target]
        piece = None if rows is None else rows[span.source_start : span.source_start + span.num_rows]
        if giver == taker == backend.name:
            kept: Future[Any] = Future()
            kept.set_result(piece)
            receives.append((giver, kept))
        elif giver == backend.name:
            given.append((taker, piece))
        elif taker == backend.name:
            receives.append((giver, backend.irecv(giver, tag=tag)))
    sends = [_send(backend, taker, piece, tag, deadline) for taker, piece in given]

    def finish(results: list[Any]) -> Any:
        taken = results[: len(receives)]
        if taken:
            return _torch.concatenate(taken)
        return None if backend.name not in targets else np.empty(0) if rows is None else rows[:0]

    return Handle(f"move_rows {tag}", receives + sends, finish, deadline)
