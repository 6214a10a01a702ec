"""Weights from n ranks to one of m, cut differently on the way: stage, verify, commit.

Every source stages its shards of a version. A receiver prepares it: it learns who has what, maps or fetches the parts
it wants, and checks them, while it goes on serving the old version. At its own safe point it commits: the parts are put
together in buckets and loaded. Killed before, it serves the old version; failed in between, it serves none and says so,
until it has committed again.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from m2flow.comm import _torch
from m2flow.comm._changes import Changes, changed
from m2flow.comm._copying import Copy, copier
from m2flow.comm._deadline import Deadline
from m2flow.comm.errors import CommError, PayloadError, PeerLostError, TimeoutError_
from m2flow.comm.payload import Tree, encode
from m2flow.comm.resharding import Box, Piece, cover, run
from m2flow.comm.routing import Address, route
from m2flow.comm.weights import SERVICE, Arrays, WeightReader, digest, read_layout, reader_numbers

DEFAULT_BUCKET_BYTES = 64 << 20
# Loads a bucket of whole wanted parts, one at least: what the engine at the receiver does with them.
Load = Callable[[Mapping[str, Tree]], None]


# Of each source, the box of each tensor that it has and the shape of the whole.
Layouts = Mapping[str, Mapping[str, tuple[Box, tuple[int, ...]]]]
# What a source has given: its arrays in place, or by name and box what has come over a network.
Given = Arrays | Mapping[tuple[str, Box], Tree]
_Run = tuple[int, int] | None


class _Move(NamedTuple):
    """A box that a source gives of its shard: the elements' run there and where they are wanted, if they are runs."""

    source: str
    box: Box
    shard: Box
    there: _Run
    here: _Run


# The wanted box of each tensor, and what covers it.
Plan = Mapping[str, tuple[Box, Sequence[_Move]]]


class Caller(Protocol):
    """What a receiver needs of its endpoint."""

    def request(
        self, peer: str, service: str, method: str, args: Tree = None, *, timeout_s: float | None = None
    ) -> Tree: ...

    def request_async(
        self, peer: str, service: str, method: str, args: Tree = None, *, timeout_s: float | None = None
    ) -> "Future[Tree]": ...

    @property
    def address(self) -> Address: ...

    def address_of(self, peer: str) -> Address: ...


class Prepared(NamedTuple):
    """A version that is complete and checked here: bytes, seconds to get it, seconds to check it.

    `moved_bytes` of it came over a network: fewer than `nbytes` where it is mapped, or only changes were sent.
    """

    version: int
    nbytes: int
    seconds: float
    digest_seconds: float
    moved_bytes: int


class WeightReceiver:
    """One rank that takes weights. `wanted` maps names to the boxes it wants; None is every tensor, whole.

    `version` is what it serves, None before the first commit and after a failed one. A bucket is as many wanted parts
    as fit into `bucket_bytes`, or one that is larger. Not thread-safe: one thread prepares and commits.
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
        self._number = next(reader_numbers)
        if not sources:
            raise ValueError(f"weights {name!r}: got no sources, want one at least")
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
        self._planned: tuple[bytes, Plan] | None = None
        self._prepared: tuple[int, Plan, dict[str, Given]] | None = None

    def prepare(self, version: int, *, timeout_s: float | None = None) -> Prepared:
        """Gets and checks a version, beside the one that is served. Blocks until the sources have staged it.

        Raises ValueError naming a tensor or part that no source has, or a tensor whose shards are not of one dtype,
        PayloadError for bytes that are not those that were staged, RemoteError for a version that is withdrawn, or that
        a source on this host has only offered, PeerLostError or TimeoutError_ naming a source. Whatever it raises, the
        old version serves on.
        """
        deadline = Deadline(timeout_s)
        self._moved_bytes = 0
        near = [
            source
            for source in self._sources
            if route(self._caller.address, self._caller.address_of(source), "cpu").backend != "grpc"
        ]
        with self._reading(version):
            return self._prepare(version, near, deadline)

    def _prepare(self, version: int, near: Sequence[str], deadline: Deadline) -> Prepared:
        # What is on this host is mapped at once, its layout with it.
        args = (self._name, version, self._number)
        asked = {source: self._asked(source, "fetch", args, deadline) for source in near}
        mapped = {source: self._answer(source, "fetch", answer, deadline) for source, answer in asked.items()}
        plan = self._plan(version, deadline, mapped)
        given: dict[str, Given] = {}
        checking_s = 0.0
        for source in dict.fromkeys(move.source for _, moves in plan.values() for move in moves):
            if source in mapped:
                since = time.monotonic()
                given[source] = self._checked(source, version, mapped[source], deadline)
                checking_s += time.monotonic() - since
            else:
                given[source], seconds = self._moved(source, version, plan, deadline)
                checking_s += seconds
        for name, (_, moves) in plan.items():
            if len(moves) > 1:
                _check_dtypes(name, [_dtype(given, name, move) for move in moves])
        self._prepared = (version, plan, given)
        nbytes = sum(_nbytes(given, name, moves) for name, (_, moves) in plan.items())
        return Prepared(version, nbytes, deadline.elapsed_s - checking_s, checking_s, self._moved_bytes)

    def commit(self, load: Load) -> int:
        """Loads the prepared version, bucket by bucket, and serves it; returns it. Blocks while `load` runs.

        A part that one source holds as it is wanted is given in place, for reading only; others are put together, a
        bucket of them at a time. When `load` raises, nothing is served until a commit succeeds. Raises CommError
        where nothing is prepared.
        """
        version, plan, given = self._ready()
        self.version = None
        names = list(plan)
        sizes = [_nbytes(given, name, plan[name][1]) for name in names]
        for start, stop in _runs(sizes, self._bucket_bytes):
            bucket = {}
            for name in names[start:stop]:
                box, moves = plan[name]
                bucket[name] = _put_together(box, [(move.box, _array(given, name, move)) for move in moves])
            load(bucket)
        return self._end(version)

    def commit_into(self, targets: Mapping[str, Tree]) -> int:
        """Like `commit`, copying every element once, straight into arrays or tensors of the wanted shapes.

        Numbers take the width of the target's. Raises ValueError for a target of another shape, for one of a kind that
        would cut them short, as int does floats, and for an array where a tensor came or the other way round: the old
        version serves on. Raises CommError where nothing is prepared. Blocks for the copy.
        """
        version, plan, given = self._ready()
        for name, (box, moves) in plan.items():
            target, came = targets[name], _dtype(given, name, moves[0])
            if target.shape != box.shape:
                raise ValueError(f"commit_into: {name!r} has shape {tuple(target.shape)}, want {box.shape}")
            if target.dtype is not came and not _torch.converts(came, target.dtype):
                raise ValueError(f"commit_into: {name!r} is of {target.dtype}, want {came} as it came, or its kind")
        self.version = None
        copy = copier(sum(_nbytes(given, name, moves) for name, (_, moves) in plan.items()))
        for name, (box, moves) in plan.items():
            target = targets[name]
            if not _copied(target, name, moves, given, copy):
                own = target.detach() if _torch.is_tensor(target) else target
                for move in moves:
                    own[(*move.box.slices(box), ...)] = _array(given, name, move)
        return self._end(version)

    def stream(self, version: int, load: Load, *, timeout_s: float | None = None) -> int:
        """Gets, checks and loads a version a bucket at a time, and serves it; returns it. Blocks while `load` runs.

        For a receiver that serves nothing yet: no more than two buckets of the version are in memory beside what
        `load` makes of them, and the sources may have merely offered it. `timeout_s` is for all of it, `load` too.
        Raises as `prepare` does; then nothing is served until a commit, or another stream, succeeds.
        """
        self.version = None
        with self._reading(version):
            self._stream(version, load, Deadline(timeout_s))
        return self._end(version)

    def _stream(self, version: int, load: Load, deadline: Deadline) -> None:
        plan = self._plan(version, deadline, {})
        names = list(plan)
        runs = list(_runs([plan[name][0].num_elements() * 8 for name in names], self._bucket_bytes))
        ask = partial(self._ask, version, plan, deadline)
        following = ask(names[slice(*runs[0])]) if runs else []
        for number, bounds in enumerate(runs):
            asked, following = following, []
            if number + 1 < len(runs):
                following = ask(names[slice(*runs[number + 1])])
            pieces: dict[str, list[tuple[Box, Tree]]] = {name: [] for name in names[slice(*bounds)]}
            for source, moves, answer in asked:
                found = self._answer(source, "slices", answer, deadline)
                for (name, move), (array, expected) in zip(moves, found, strict=True):
                    if digest(array) != expected:
                        raise self._altered(version, source, name)
                    pieces[name].append((move.box, array))
            for name, parts in pieces.items():
                _check_dtypes(name, [array.dtype for _, array in parts])
            load({name: _put_together(plan[name][0], parts) for name, parts in pieces.items()})

    @contextlib.contextmanager
    def _reading(self, version: int) -> Iterator[None]:
        """Tells the sources afterwards that it is done; what has failed keeps nothing of what it had read."""
        lost = ""
        try:
            yield
        except BaseException as error:
            lost = error.peer if isinstance(error, PeerLostError) else ""
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            for source in self._sources:
                if source != lost:
                    self._done(source, version)

    def _done(self, source: str, version: int | None) -> None:
        """Tells a source that no more is asked of a version, and it is awaited no longer; does not wait for it."""
        if version is not None and version != self._base_of(source)[0]:
            with contextlib.suppress(CommError):
                self._asked(source, "done", (self._name, version, self._number), Deadline(0.0))

    def _base_of(self, source: str) -> tuple[int | None, dict[tuple[str, Box], Tree]]:
        return self._bases.get(source, (None, {}))

    def _ask(
        self, version: int, plan: Plan, deadline: Deadline, names: Sequence[str]
    ) -> list[tuple[str, list[tuple[str, _Move]], "Future[Tree]"]]:
        """Asks each source for its pieces of these tensors. Blocks for a source that takes nothing."""
        asked = []
        for source in self._sources:
            moves = _moves_of(source, plan, names)
            if moves:
                args = (self._name, version, self._number, _bounds(moves))
                asked.append((source, moves, self._asked(source, "slices", args, deadline)))
        return asked

    def _asked(self, source: str, method: str, args: Tree, deadline: Deadline) -> "Future[Tree]":
        return self._caller.request_async(source, SERVICE, method, args, timeout_s=deadline.left_s)

    def _answer(self, source: str, method: str, answer: "Future[Tree]", deadline: Deadline) -> Tree:
        try:
            return answer.result(deadline.left_s)
        except TimeoutError:
            call = f"{SERVICE}.{method}"
            raise TimeoutError_(channel=call, key=None, peer=source, elapsed_s=deadline.elapsed_s) from None

    def _plan(self, version: int, deadline: Deadline, mapped: Mapping[str, Tree]) -> Plan:
        """What covers each wanted box; sources that are `mapped` are not asked for what they have."""
        packed = {}
        for source in self._sources:
            if source in mapped:
                packed[source] = mapped[source]["layout"]
            else:
                args = (self._name, version, self._number)
                packed[source] = self._caller.request(source, SERVICE, "layout", args, timeout_s=deadline.left_s)
        spelt = encode(packed).to_bytes()
        if self._planned is None or self._planned[0] != spelt:
            layouts = {source: read_layout(layout) for source, layout in packed.items()}
            plan = {name: (box, _moves(name, box, layouts)) for name, box in self._boxes(layouts).items()}
            self._planned = spelt, plan
        return self._planned[1]

    def _altered(self, version: int, source: str, name: str) -> PayloadError:
        return PayloadError(f"weights {self._name!r} version {version} of {source!r}: {name!r} was altered")

    def _ready(self) -> tuple[int, Plan, dict[str, Given]]:
        if self._prepared is None:
            raise CommError(f"weights {self._name!r}: nothing is prepared: call prepare first")
        return self._prepared

    def _end(self, version: int) -> int:
        self.version, self._prepared = version, None
        return version

    def _boxes(self, layouts: Layouts) -> dict[str, Box]:
        if self._wanted is not None:
            return dict(self._wanted)
        whole = {name: found[1] for layout in layouts.values() for name, found in layout.items()}
        return {name: Box((0,) * len(shape), shape) for name, shape in whole.items()}

    def _checked(self, source: str, version: int, answer: Tree, deadline: Deadline) -> Arrays:
        """Returns the arrays of a source on this host, in place, once their digests are checked."""
        args = (self._name, version, self._number)
        ask = partial(self._caller.request, source, SERVICE, "digests", args, timeout_s=deadline.left_s)
        return self._reader.check(source, self._name, version, answer, ask)

    def _moved(
        self, source: str, version: int, plan: Plan, deadline: Deadline
    ) -> tuple[Mapping[tuple[str, Box], Tree], float]:
        """Returns what is wanted of a source that is reached over a network, and the seconds spent on checking it."""
        # Only what is wanted is moved, a bucket at a time; of what this end has had, only what changed.
        base, had = before, _ = self._base_of(source)
        have: dict[tuple[str, Box], Tree] = {}
        seconds = 0.0
        every = _moves_of(source, plan, plan)
        for start, stop in _runs([move.box.num_elements() * 8 for _, move in every], self._bucket_bytes):
            moves = every[start:stop]
            known = all((name, move.box) in had for name, move in moves)
            came = self._slices(source, version, moves, base if known else None, deadline)
            started = time.monotonic()
            arrays = [_made(had.get((name, move.box)), *one) for (name, move), one in zip(moves, came, strict=True)]
            if known and any(array is None for array in arrays):
                # What the source has as the base is another version than came by that number: it was started anew.
                base, had = None, {}
                came = self._slices(source, version, moves, base, deadline)
                arrays = [_made(None, *one) for one in came]
            for (name, move), array in zip(moves, arrays, strict=True):
                if array is None:
                    raise self._altered(version, source, name)
                have[name, move.box] = array
            seconds += time.monotonic() - started
        if self._delta:
            self._bases[source] = version, have
            self._done(source, before)
        return have, seconds

    def _slices(
        self, source: str, version: int, moves: Sequence[tuple[str, _Move]], base: int | None, deadline: Deadline
    ) -> list[tuple[Tree, int]]:
        """Gets slices, each with its digest: of some perhaps only what changed since the version `base`."""
        args = (self._name, version, self._number, _bounds(moves), base)
        came: list[tuple[Tree, int]] = self._caller.request(source, SERVICE, "slices", args, timeout_s=deadline.left_s)
        self._moved_bytes += sum(int(found.nbytes) for found, _ in came)
        return came


def _moves(name: str, box: Box, layouts: Layouts) -> list[_Move]:
    """Returns what covers a wanted box; raises ValueError naming the tensor where nothing does."""
    moves = []
    for piece in cover_named(name, box, layouts):
        shard = layouts[piece.source][name][0]
        moves.append(_Move(piece.source, piece.box, shard, run(piece.box, shard), run(piece.box, box)))
    return moves


def cover_named(name: str, box: Box, layouts: Layouts) -> list[Piece]:
    """Returns the pieces that cover a wanted box; raises ValueError naming the tensor where that cannot be."""
    shards = [(source, layout[name][0]) for source, layout in layouts.items() if name in layout]
    if not shards:
        raise ValueError(f"no source has a tensor {name!r}: want one of those that {', '.join(layouts)} staged")
    if len(shards[0][1].shape) != len(box.shape):
        raise ValueError(f"tensor {name!r}: got a box of {len(box.shape)} dims, want {len(shards[0][1].shape)}")
    try:
        # Of what has no elements a piece that has none, which says what it is.
        return cover(box, shards) or [Piece(shards[0][0], Box(shards[0][1].offset, (0,) * len(box.shape)))]
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from error


def _moves_of(source: str, plan: Plan, names: Iterable[str]) -> list[tuple[str, _Move]]:
    return [(name, move) for name in names for move in plan[name][1] if move.source == source]


def _bounds(moves: Sequence[tuple[str, _Move]]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Boxes of global offsets as bounds within the shards that a source has."""
    return [(name, [(part.start, part.stop) for part in move.box.slices(move.shard)]) for name, move in moves]


def _array(given: Mapping[str, Given], name: str, move: _Move) -> Tree:
    found = given[move.source]
    if not isinstance(found, Arrays):
        return found[name, move.box]
    return found[name] if move.box == move.shard else found[name][(*move.box.slices(move.shard), ...)]


def _dtype(given: Mapping[str, Given], name: str, move: _Move) -> Any:
    found = given[move.source]
    return found.known.dtypes[name] if isinstance(found, Arrays) else found[name, move.box].dtype


def _check_dtypes(name: str, dtypes: Iterable[Any]) -> None:
    # By name, as torch's and numpy's do not compare.
    names = sorted({str(dtype) for dtype in dtypes})
    if len(names) > 1:
        raise ValueError(f"tensor {name!r}: got shards of dtypes {', '.join(names)}, want them of one")


def _made(old: Tree, found: Tree, expected: int) -> Tree:
    """Returns what was staged, of an array or of the changes to `old`; None where its digest is not the expected."""
    if not isinstance(found, Changes):
        array = found
    elif old is None:
        return None
    else:
        try:
            array = changed(old, found)
        except (IndexError, ValueError):
            return None
    return array if digest(array) == expected else None


def _nbytes(given: Mapping[str, Given], name: str, moves: Sequence[_Move]) -> int:
    total = 0
    for source, box, shard, _, _ in moves:
        found = given[source]
        if not isinstance(found, Arrays):
            total += int(found[name, box].nbytes)
        elif box == shard:
            total += found.known.places[name].size_bytes
        else:
            total += box.num_elements() * int(found.known.dtypes[name].itemsize)
    return total


def _copied(target: Tree, name: str, moves: Sequence[_Move], given: Mapping[str, Given], copy: Copy) -> bool:
    """Copies a tensor's pieces by their addresses, if they and the target lie in order in this host's memory."""
    into = _address(target)
    if not into:
        return False
    copies = []
    for move in moves:
        found = given[move.source]
        if not isinstance(found, Arrays) or move.there is None or move.here is None:
            return False
        dtype = found.known.dtypes[name]
        if type(target.dtype) is not type(dtype) or target.dtype != dtype:
            return False
        size = int(dtype.itemsize)
        at = found.address + found.known.places[name].offset_bytes
        copies.append((into + move.here[0] * size, at + move.there[0] * size, move.there[1] * size))
    for one in copies:
        copy(*one)
    if _torch.is_tensor(target):
        _torch.written(target)
    return True


def _address(target: Tree) -> int:
    """Returns where an array or tensor may be written, 0 where it does not lie in order in the memory of this host."""
    if _torch.is_tensor(target):
        return _torch.address(target)
    return int(target.ctypes.data) if target.flags.c_contiguous and target.flags.writeable else 0


def _put_together(box: Box, pieces: Sequence[tuple[Box, Tree]]) -> Tree:
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    first = pieces[0][1]
    whole = first.new_empty(box.shape) if _torch.is_tensor(first) else np.empty(box.shape, first.dtype)
    for part, array in pieces:
        whole[part.slices(box)] = array
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
