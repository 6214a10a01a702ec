"""Collectives between ranks that are endpoints: broadcast, scatter, gather, all-gather, all-to-all, rows from n to m.

Every rank calls the same collectives in the same order. Each call returns a handle; `wait` blocks for it. They are
made of sends and receives, so what holds for those holds here: payloads are any trees, and a dead rank is named.
"""

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from m2flow.comm import _torch
from m2flow.comm.errors import TimeoutError_
from m2flow.comm.payload import Tree

T = TypeVar("T")


class Backend(Protocol):
    """What carries messages between named ranks: an Endpoint, or a process group of torch.distributed.

    Messages of one sender and tag arrive in the order sent. A future of `isend` is done when the receiver has the
    message, one of `irecv` holds its tree; both fail with PeerLostError when the other end dies. `irecv` does
    not block; `isend` does for the copy and its memory and, at an endpoint, while 8 MiB are on their way to the peer. A
    tree that cannot be encoded raises PayloadError at once, unless it is handed over as it is.
    """

    name: str

    def isend(self, peer: str, tree: Tree, *, tag: str = "") -> "Future[None]":
        """Sends a tree. Until the future is done the sender must not change what it sent."""

    def irecv(self, peer: str, *, tag: str = "") -> "Future[Tree]":
        """Receives the next tree of a peer and tag. A cancelled future takes none."""

    def close(self) -> None:
        """Frees what the backend holds."""


class Handle(Generic[T]):
    """A collective under way."""

    def __init__(self, what: str, parts: Sequence[tuple[str, "Future[Any]"]], finish: Callable[[list[Any]], T]) -> None:
        self._what = what
        self._parts = parts
        self._finish = finish
        self._since = time.monotonic()

    def done(self) -> bool:
        """Says whether `wait` would return, or raise, at once."""
        return bool(self._failed()) or all(future.done() for _, future in self._parts)

    def wait(self, timeout_s: float | None = None) -> T:
        """Blocks for the result. Raises PeerLostError for a rank that died, as soon as one has; TimeoutError_ naming
        those that are missing, and only those.
        """
        futures = [future for _, future in self._parts]
        if len(futures) > 1:
            concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION)
            timeout_s = 0.0
        for failed in self._failed():
            failed.result()
        try:
            # For one alone this is the wait: it reads the link meanwhile.
            return self._finish([future.result(timeout_s) for future in futures])
        except TimeoutError:
            missing = {peer for peer, future in self._parts if not future.done()}
            if not missing:
                # The last has come, or failed, this very moment.
                return self.wait(0.0)
            elapsed_s = time.monotonic() - self._since
            raise TimeoutError_(
                channel=self._what, key=None, peer=", ".join(sorted(missing)), elapsed_s=elapsed_s
            ) from None

    def _failed(self) -> "list[Future[Any]]":
        return [future for _, future in self._parts if future.done() and future.exception() is not None]


class RankGroup:
    """The ranks of one group, by name and in order, seen from one of them.

    Each collective returns its handle once what it sends is on its way. It blocks until then, as the backend's `isend`
    does: for the copies and their memory and, between endpoints, while 8 MiB are on their way to a rank, however long
    that one takes nothing. The `timeout_s` of `wait` begins afterwards. It raises PayloadError for a tree that cannot
    be encoded, ValueError where not every rank is given one or `root` is none of the ranks, which begin with 0.
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

    def broadcast(self, tree: Tree, *, root: int) -> Handle[Tree]:
        """Gives the root's tree to all; the others' argument is ignored."""
        tag = self._tag("broadcast", root)
        if self.rank == root:
            return Handle(tag, [self._send(peer, tree, tag) for peer in self._others()], lambda _: tree)
        return Handle(tag, [self._recv(self.members[root], tag)], lambda got: got[0])

    def scatter(self, trees: Sequence[Tree] | None, *, root: int) -> Handle[Tree]:
        """Gives rank i the root's i-th tree; the others give None."""
        tag = self._tag("scatter", root)
        if self.rank != root:
            return Handle(tag, [self._recv(self.members[root], tag)], lambda got: got[0])
        parts = self._one_each("scatter", trees or ())
        sends = [self._send(peer, parts[self.members.index(peer)], tag) for peer in self._others()]
        return Handle(tag, sends, lambda _: parts[self.rank])

    def gather(self, tree: Tree, *, root: int) -> Handle[list[Tree] | None]:
        """Collects every rank's tree at the root, in order of rank; the others get None."""
        tag = self._tag("gather", root)
        if self.rank != root:
            return Handle(tag, [self._send(self.members[root], tree, tag)], lambda _: None)
        return Handle(tag, [self._recv(peer, tag) for peer in self._others()], lambda got: self._with(tree, got))

    def all_gather(self, tree: Tree) -> Handle[list[Tree]]:
        """Collects every rank's tree at every rank, in order of rank."""
        return self._exchange("all_gather", [tree] * len(self.members))

    def all_to_all(self, trees: Sequence[Tree]) -> Handle[list[Tree]]:
        """Gives rank i each rank's i-th tree, in order of rank."""
        return self._exchange("all_to_all", self._one_each("all_to_all", trees))

    def barrier(self) -> Handle[None]:
        """Is done once every rank has called it."""
        tag = self._tag("barrier")
        sends = [self._send(peer, None, tag) for peer in self._others()]
        return Handle(tag, sends + [self._recv(peer, tag) for peer in self._others()], lambda _: None)

    def _exchange(self, what: str, trees: Sequence[Tree]) -> Handle[list[Tree]]:
        tag, own = self._tag(what), trees[self.rank]
        sends = [self._send(peer, trees[self.members.index(peer)], tag) for peer in self._others()]
        receives = [self._recv(peer, tag) for peer in self._others()]
        return Handle(tag, sends + receives, lambda got: self._with(own, got[len(sends) :]))

    def _with(self, own: Tree, others: list[Tree]) -> list[Tree]:
        return [*others[: self.rank], own, *others[self.rank :]]

    def _one_each(self, what: str, trees: Sequence[Tree]) -> Sequence[Tree]:
        if len(trees) != len(self.members):
            raise ValueError(f"{what}: got {len(trees)} trees, want {len(self.members)}, one a rank")
        return trees

    def _others(self) -> list[str]:
        return [name for name in self.members if name != self._backend.name]

    def _tag(self, what: str, root: int = 0) -> str:
        if not 0 <= root < len(self.members):
            raise ValueError(f"{what}: got root {root}, want a rank, 0 to {len(self.members) - 1}")
        self._num_calls += 1
        return f"{self.name}/{what}/{self._num_calls}"

    def _send(self, peer: str, tree: Tree, tag: str) -> tuple[str, "Future[Any]"]:
        return peer, self._backend.isend(peer, tree, tag=tag)

    def _recv(self, peer: str, tag: str) -> tuple[str, "Future[Any]"]:
        return peer, self._backend.irecv(peer, tag=tag)


class Span(NamedTuple):
    """Rows that one rank gives another: where they start at each, and how many."""

    source: int
    target: int
    source_start: int
    target_start: int
    num_rows: int


def spans(source_rows: Sequence[int], target_rows: Sequence[int]) -> list[Span]:
    """Returns which rows go from whom to whom when rows in order are dealt anew, for any counts of equal sum.

    `source_rows` and `target_rows` are the numbers of rows of each rank. Raises ValueError where the sums differ.
    """
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
) -> Handle[Any]:
    """Deals the rows of n ranks anew to m ranks, in order and as unevenly as asked; ranks may be on both sides.

    `rows` is this rank's numpy array or tensor of shape [sources[name], ...], or None where it gives none; the result
    is its array of shape [targets[name], ...], or None. Where no rank gives a row, who gives no array itself takes one
    of shape [0]. Returns the handle, and blocks until then as a RankGroup's do. Raises ValueError where counts and rows
    disagree.
    """
    givers, takers = list(sources), list(targets)
    num_rows = 0 if rows is None else len(rows)
    if num_rows != sources.get(backend.name, 0):
        raise ValueError(f"move_rows: got {num_rows} rows, want {sources.get(backend.name, 0)}")
    sends: list[tuple[str, Future[Any]]] = []
    receives: list[tuple[str, Future[Any]]] = []
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
            sends.append((taker, backend.isend(taker, piece, tag=tag)))
        elif taker == backend.name:
            receives.append((giver, backend.irecv(giver, tag=tag)))

    def finish(results: list[Any]) -> Any:
        taken = results[len(sends) :]
        if taken:
            return _torch.concatenate(taken)
        return None if backend.name not in targets else np.empty(0) if rows is None else rows[:0]

    return Handle(f"move_rows {tag}", sends + receives, finish)
