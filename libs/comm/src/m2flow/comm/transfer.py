"""Weights from n ranks to one of m, cut differently on the way: stage, verify, commit.

Every source stages its shards of a version. A receiver prepares it: it learns who has what, maps or fetches the parts
it wants, and checks them, while it goes on serving the old version. At its own safe point it commits: the parts are put
together in buckets and loaded. Killed before, it serves the old version; failed in between, it serves none and says so,
until it has committed again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from m2flow.comm import _torch
from m2flow.comm._changes import Changes, changed
from m2flow.comm._copying import Copy, copier
from m2flow.comm.errors import CommError, PayloadError
from m2flow.comm.payload import Tree, encode
from m2flow.comm.resharding import Box, Piece, cover
from m2flow.comm.weights import SERVICE, WeightReader, digest, read_layout

DEFAULT_BUCKET_BYTES = 64 << 20
# Loads a bucket of whole wanted parts: what the engine at the receiver does with them.
Load = Callable[[Mapping[str, Tree]], None]


# The wanted box of each tensor, and the pieces that cover it.
Plan = Mapping[str, tuple[Box, Sequence[Piece]]]
# Of each source, the box of each tensor that it has and the shape of the whole.
Layouts = Mapping[str, Mapping[str, tuple[Box, tuple[int, ...]]]]


class Caller(Protocol):
    """What a receiver needs of its endpoint."""

    def request(
        self, peer: str, service: str, method: str, args: Tree = None, *, timeout_s: float | None = None
    ) -> Tree: ...

    def request_async(self, peer: str, service: str, method: str, args: Tree = None) -> "Future[Tree]": ...

    def shares_memory_with(self, peer: str) -> bool: ...


class Prepared(NamedTuple):
    """A version that is complete and checked here: bytes, seconds to get it, seconds to check it.

    `moved_bytes` of it came over a network: fewer than `nbytes` where it is mapped, or only changes were sent.
    """

    version: int
    nbytes: int
    seconds: float
    digest_seconds: float
    moved_bytes: int


class _Part(NamedTuple):
    """A wanted box and the arrays that make it up, each with its own box."""

    box: Box
    pieces: list[tuple[Box, Tree]]


class WeightReceiver:
    """One rank that takes weights. `wanted` maps names to the boxes it wants; None is every tensor, whole.

    `version` is what it serves, None before the first commit and after a failed one. Not thread-safe: one thread
    prepares and commits.
    """

    def __init__(
        self,
        caller: Caller,
        name: str,
        *,
        sources: Sequence[str],
        wanted: Mapping[str, Box] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_source: int = 0,
        delta: bool = False,
    ) -> None:
        self.version: int | None = None
        self._caller = caller
        self._name = name
        # Receivers that begin with different sources spread their load where shards are copies.
        shift = first_source % len(sources)
        self._sources = [*sources[shift:], *sources[:shift]]
        self._wanted = wanted
        self._bucket_bytes = bucket_bytes
        self._reader = WeightReader()
        self._delta = delta
        # By source, the version that came over a network last, for the changes of the next.
        self._bases: dict[str, tuple[int, dict[tuple[str, Box], Tree]]] = {}
        self._moved_bytes = 0
        # What covers what, for as long as the sources' layouts stay as they are.
        self._planned: tuple[bytes, Plan, dict[str, dict[str, Box]]] | None = None
        self._prepared: tuple[int, dict[str, _Part]] | None = None

    def prepare(self, version: int, *, timeout_s: float | None = None) -> Prepared:
        """Gets and checks a version, beside the one that is served. Blocks until the sources have staged it.

        Raises ValueError naming a tensor or part that no source has, PayloadError for bytes that are not those that
        were staged, PeerLostError or TimeoutError_ naming a source. Whatever it raises, the old version serves on.
        """
        started = time.monotonic()
        self._moved_bytes = 0
        # What is on this host is mapped at once, its layout with it.
        mapped = {
            source: self._caller.request(source, SERVICE, "fetch", (self._name, version), timeout_s=timeout_s)
            for source in self._sources
            if self._caller.shares_memory_with(source)
        }
        plan, shards = self._plan(version, timeout_s, mapped)
        parts: dict[str, _Part] = {name: _Part(box, []) for name, (box, _) in plan.items()}
        checking_s = 0.0
        for source in self._sources:
            asked = [
                (name, piece.box) for name, (_, pieces) in plan.items() for piece in pieces if piece.source == source
            ]
            if not asked:
                continue
            if source in mapped:
                found = self._mapped_pieces(source, version, asked, shards[source], mapped[source], timeout_s)
            else:
                found = self._moved_pieces(source, version, asked, shards[source], timeout_s)
            for name, box, array, seconds in found:
                parts[name].pieces.append((box, array))
                checking_s += seconds
        self._prepared = (version, parts)
        nbytes = sum(_nbytes(part) for part in parts.values())
        return Prepared(version, nbytes, time.monotonic() - started - checking_s, checking_s, self._moved_bytes)

    def commit(self, load: Load) -> int:
        """Loads the prepared version, bucket by bucket, and serves it; returns it. Blocks while `load` runs.

        A part that one source holds as it is wanted is given in place, for reading only; others are put together, at
        most a bucket of them at a time. When `load` raises, nothing is served until a commit succeeds. Raises CommError
        where nothing is prepared.
        """
        version, parts = self._begin()
        for bucket in self._buckets(parts):
            load(bucket)
        return self._end(version)

    def commit_into(self, targets: Mapping[str, Tree]) -> int:
        """Like `commit`, copying every element once, straight into arrays or tensors of the wanted shapes.

        Raises ValueError for a target of another shape, CommError where nothing is prepared. Blocks for the copy.
        """
        version, parts = self._begin()
        copy = copier(sum(_nbytes(part) for part in parts.values()))
        for name, part in parts.items():
            target = targets[name]
            if tuple(target.shape) != part.box.shape:
                raise ValueError(f"commit_into: {name!r} has shape {tuple(target.shape)}, want {part.box.shape}")
            own = target.detach() if _torch.is_tensor(target) else target
            for box, array in part.pieces:
                _copy_array(own if box == part.box else own[box.slices(part.box)], array, copy)
        return self._end(version)

    def stream(self, version: int, load: Load, *, timeout_s: float | None = None) -> int:
        """Gets, checks and loads a version a bucket at a time, and serves it; returns it. Blocks while `load` runs.

        For a receiver that serves nothing yet: no more than two buckets of the version are in memory beside what
        `load` makes of them, and the sources may have merely offered it. Raises as `prepare` does; then nothing is
        served until a commit, or another stream, succeeds.
        """
        self.version = None
        plan, shards = self._plan(version, timeout_s, {})
        names = list(plan)
        runs = list(_runs([plan[name][0].num_elements() * 8 for name in names], self._bucket_bytes))
        ask = partial(self._ask, version, plan, shards)
        following = ask(names[slice(*runs[0])]) if runs else []
        for number, bounds in enumerate(runs):
            asked, following = following, []
            if number + 1 < len(runs):
                following = ask(names[slice(*runs[number + 1])])
            parts = {name: _Part(plan[name][0], []) for name in names[slice(*bounds)]}
            for source, run, answer in asked:
                for (name, box), (array, expected) in zip(run, answer.result(timeout_s), strict=True):
                    self._check(version, source, name, array, expected)
                    parts[name].pieces.append((box, array))
            load({name: _put_together(part) for name, part in parts.items()})
        return self._end(version)

    def _ask(
        self, version: int, plan: Plan, shards: Mapping[str, Mapping[str, Box]], names: Sequence[str]
    ) -> list[tuple[str, list[tuple[str, Box]], "Future[Tree]"]]:
        """Asks each source for its pieces of these tensors. Does not block."""
        asked = []
        for source in self._sources:
            run = [(name, piece.box) for name in names for piece in plan[name][1] if piece.source == source]
            if run:
                args = (self._name, version, _slices(run, shards[source]))
                asked.append((source, run, self._caller.request_async(source, SERVICE, "slices", args)))
        return asked

    def _plan(
        self, version: int, timeout_s: float | None, mapped: Mapping[str, Tree]
    ) -> tuple[Plan, dict[str, dict[str, Box]]]:
        """What covers each wanted box, and the boxes that each source has; of those `mapped` it is not asked for."""
        packed = {}
        for source in self._sources:
            if source in mapped:
                packed[source] = mapped[source]["layout"]
            else:
                args = (self._name, version)
                packed[source] = self._caller.request(source, SERVICE, "layout", args, timeout_s=timeout_s)
        spelt = encode(packed).to_bytes()
        if self._planned is None or self._planned[0] != spelt:
            layouts = {source: read_layout(layout) for source, layout in packed.items()}
            plan = {name: cover_named(name, box, layouts) for name, box in self._boxes(layouts).items()}
            shards = {source: {name: box for name, (box, _) in layout.items()} for source, layout in layouts.items()}
            self._planned = spelt, plan, shards
        return self._planned[1:]

    def _check(self, version: int, source: str, name: str, array: Tree, expected: int) -> None:
        if digest(array) != expected:
            raise PayloadError(f"weights {self._name!r} version {version} of {source!r}: {name!r} was altered")

    def _begin(self) -> tuple[int, dict[str, _Part]]:
        if self._prepared is None:
            raise CommError(f"weights {self._name!r}: nothing is prepared: call prepare first")
        self.version = None
        return self._prepared

    def _end(self, version: int) -> int:
        self.version, self._prepared = version, None
        return version

    def _boxes(self, layouts: Layouts) -> dict[str, Box]:
        if self._wanted is not None:
            return dict(self._wanted)
        whole = {name: found[1] for layout in layouts.values() for name, found in layout.items()}
        return {name: Box((0,) * len(shape), shape) for name, shape in whole.items()}

    def _mapped_pieces(
        self,
        source: str,
        version: int,
        asked: Sequence[tuple[str, Box]],
        shards: Mapping[str, Box],
        answer: Tree,
        timeout_s: float | None,
    ) -> Iterator[tuple[str, Box, Tree, float]]:
        """Yields name, box and array, in place, of what is asked of a source, and the seconds spent on checking it."""
        started = time.monotonic()
        ask = partial(self._caller.request, source, SERVICE, "digests", (self._name, version), timeout_s=timeout_s)
        weights = self._reader.check(source, self._name, version, answer, ask)
        seconds = time.monotonic() - started
        for name, box in asked:
            shard = shards[name]
            yield name, box, weights[name] if box == shard else weights[name][(*box.slices(shard), ...)], seconds
            seconds = 0.0

    def _moved_pieces(
        self,
        source: str,
        version: int,
        asked: Sequence[tuple[str, Box]],
        shards: Mapping[str, Box],
        timeout_s: float | None,
    ) -> Iterator[tuple[str, Box, Tree, float]]:
        """Yields the same of a source that is reached over a network."""
        # Over a network only what is wanted is moved, a bucket at a time; of what this end has had, only what changed.
        base, had = self._bases.get(source, (None, {}))
        have: dict[tuple[str, Box], Tree] = {}
        for start, stop in _runs([box.num_elements() * 8 for _, box in asked], self._bucket_bytes):
            run = asked[start:stop]
            args = (self._name, version, _slices(run, shards), base if all(key in had for key in run) else None)
            answer = self._caller.request(source, SERVICE, "slices", args, timeout_s=timeout_s)
            for (name, box), (found, expected) in zip(run, answer, strict=True):
                self._moved_bytes += int(found.nbytes)
                started = time.monotonic()
                array = changed(had[name, box], found) if isinstance(found, Changes) else found
                self._check(version, source, name, array, expected)
                if self._delta:
                    have[name, box] = array
                yield name, box, array, time.monotonic() - started
        if self._delta:
            self._bases[source] = version, have

    def _buckets(self, parts: Mapping[str, _Part]) -> Iterator[dict[str, Tree]]:
        names = list(parts)
        sizes = [_nbytes(parts[name]) for name in names]
        for start, stop in _runs(sizes, self._bucket_bytes):
            yield {name: _put_together(parts[name]) for name in names[start:stop]}


def cover_named(name: str, box: Box, layouts: Layouts) -> tuple[Box, list[Piece]]:
    """Returns a wanted box and the pieces that cover it; raises ValueError naming the tensor where that cannot be."""
    shards = [(source, layout[name][0]) for source, layout in layouts.items() if name in layout]
    if not shards:
        raise ValueError(f"no source has a tensor {name!r}: want one of those that {', '.join(layouts)} staged")
    if len(shards[0][1].shape) != len(box.shape):
        raise ValueError(f"tensor {name!r}: got a box of {len(box.shape)} dims, want {len(shards[0][1].shape)}")
    try:
        return box, cover(box, shards)
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from error


def _slices(run: Sequence[tuple[str, Box]], shards: Mapping[str, Box]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Boxes of global offsets as bounds within the shards that a source has."""
    return [(name, [(part.start, part.stop) for part in box.slices(shards[name])]) for name, box in run]


def _nbytes(part: _Part) -> int:
    return sum(int(array.nbytes) for _, array in part.pieces)


def _copy_array(target: Tree, source: Tree, copy: Copy) -> None:
    """Copies an array or tensor over another of its shape, as bytes where both lie in one piece."""
    into, found = _address(target, written=True), _address(source)
    if into and found and target.dtype == source.dtype and target.shape == source.shape:
        copy(into, found, int(source.nbytes))
        if _torch.is_tensor(target):
            _torch.written(target)
    else:
        target[...] = source


def _address(array: Tree, *, written: bool = False) -> int:
    """Returns where the bytes of an array or tensor lie, 0 where they are not in order in the memory of this host."""
    if _torch.is_tensor(array):
        return _torch.address(array)
    return int(array.ctypes.data) if array.flags.c_contiguous and (array.flags.writeable or not written) else 0


def _put_together(part: _Part) -> Tree:
    if len(part.pieces) == 1 and part.pieces[0][0] == part.box:
        return part.pieces[0][1]
    first: Tree = part.pieces[0][1] if part.pieces else np.empty(0)
    whole = first.new_empty(part.box.shape) if _torch.is_tensor(first) else np.empty(part.box.shape, first.dtype)
    for box, array in part.pieces:
        whole[box.slices(part.box)] = array
    return whole


def _runs(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yields runs of items whose sizes sum to at most `limit`; one that is larger is a run of its own."""
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and total + size > limit:
            yield start, at
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
