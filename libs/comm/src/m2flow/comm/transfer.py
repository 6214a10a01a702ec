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
from typing import NamedTuple

from m2flow.comm import _torch
from m2flow.comm._changes import Changes, changed
from m2flow.comm._copies import Copies, Draft, Parts, Turn, held, is_near
from m2flow.comm._copying import Copy, copier
from m2flow.comm._deadline import Deadline
from m2flow.comm._layouts import Laid, read_layout
from m2flow.comm.errors import CommError, PayloadError, PeerLostError, TimeoutError_
from m2flow.comm.payload import Tree, encode
from m2flow.comm.resharding import Box, Piece, cover, run
from m2flow.comm.weights import SERVICE, Arrays, WeightReader, digest, reader_numbers

DEFAULT_BUCKET_BYTES = 64 << 20
# What is fetched at a time at most: memory of which the C library has some at hand, where more would be fresh pages.
_FETCHED_BYTES = 16 << 20
# Loads a bucket of whole wanted parts, one at least: what the engine at the receiver does with them.
Load = Callable[[Mapping[str, Tree]], None]


# Of each source, how each tensor that it has lies.
Layouts = Mapping[str, Mapping[str, Laid]]
# What a source has given: its arrays in place, or copies of what has come over a network.
Given = Arrays | Sequence[Parts]
_Run = tuple[int, int] | None


class _Move(NamedTuple):
    """A box that a source gives of its shard: the elements' run there and where they are wanted, if they are runs."""

    source: str
    box: Box
    shard: Box
    there: _Run
    here: _Run


class _Wanted(NamedTuple):
    """A wanted box of a tensor, an array of its dtype without elements, and what covers it."""

    box: Box
    kind: Tree
    moves: Sequence[_Move]

    @property
    def nbytes(self) -> int:
        return self.box.num_elements() * int(self.kind.itemsize)


Plan = Mapping[str, _Wanted]


class Prepared(NamedTuple):
    """A version that is complete and checked here: bytes, seconds to get it, seconds to check it.

    `moved_bytes` of it came over a network to this receiver: fewer than `nbytes` where only changes were sent, or where
    it is mapped, as what another receiver of this host has fetched is too.
    """

    version: int
    nbytes: int
    seconds: float
    digest_seconds: float
    moved_bytes: int


class WeightReceiver:
    """One rank that takes weights. `wanted` maps names to the boxes it wants; None is every tensor, whole.

    `version` is what it serves, None before the first commit and after a failed one. A bucket is as many wanted parts
    as fit into `bucket_bytes`, half of that where it streams, or one that is larger. Not thread-safe: one thread
    prepares and commits.
    """

    def __init__(
        self,
        copies: Copies,
        name: str,
        *,
        sources: Sequence[str],
        wanted: Mapping[str, Box] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_source: int = 0,
        delta: bool = False,
    ) -> None:
        self.version: int | None = None
        self._caller = copies.caller
        self._copies = copies
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
        self._bases: dict[str, tuple[int, Sequence[Parts]]] = {}
        self._moved_bytes = 0
        self._checking_s = 0.0
        # What covers what, for as long as the sources' layouts stay as they are.
        self._planned: tuple[bytes, Plan] | None = None
        self._prepared: tuple[int, Plan, dict[str, Given]] | None = None

    def prepare(self, version: int, *, timeout_s: float | None = None) -> Prepared:
        """Gets and checks a version, beside the one that is served. Blocks until the sources have staged it.

        Raises ValueError naming a tensor or part that no source has, or a tensor whose shards are not of one dtype,
        PayloadError for bytes that are not those that were staged, RemoteError for a version that is withdrawn, that a
        source which started anew has staged anew meanwhile, or that a source on this host has only offered,
        PeerLostError or TimeoutError_ naming a source, or the endpoint that is fetching the same for this host.
        Whatever it raises, the old version serves on.
        """
        deadline = Deadline(timeout_s)
        self._moved_bytes, self._checking_s = 0, 0.0
        near = [source for source in self._sources if is_near(self._caller, source)]
        with self._reading(version, deadline):
            return self._prepare(version, near, deadline)

    def _prepare(self, version: int, near: Sequence[str], deadline: Deadline) -> Prepared:
        # What is on this host is mapped at once, its layout with it.
        asked = {source: self._asked(source, "fetch", version, deadline) for source in near}
        mapped = {source: self._answer(source, "fetch", answer, deadline) for source, answer in asked.items()}
        plan, stamps = self._plan(version, deadline, mapped)
        used = {move.source for wanted in plan.values() for move in wanted.moves}
        given: dict[str, Given] = {}
        for source in self._sources:
            if source in used and source in mapped:
                given[source] = self._checked(source, version, mapped[source], deadline)
            elif source in used:
                given[source] = self._moved(source, version, stamps[source], plan, deadline)
        self._prepared = (version, plan, given)
        nbytes = sum(wanted.nbytes for wanted in plan.values())
        seconds = deadline.elapsed_s - self._checking_s
        return Prepared(version, nbytes, seconds, self._checking_s, self._moved_bytes)

    def commit(self, load: Load) -> int:
        """Loads the prepared version, bucket by bucket, and serves it; returns it. Blocks while `load` runs.

        A part that one source holds as it is wanted is given in place, for reading only; others are put together, a
        bucket of them at a time. When `load` raises, nothing is served until a commit succeeds. Raises CommError
        where nothing is prepared.
        """
        version, plan, given = self._ready()
        self.version = None
        names = list(plan)
        for start, stop in _runs([wanted.nbytes for wanted in plan.values()], self._bucket_bytes):
            bucket = {}
            for name in names[start:stop]:
                box, _, moves = plan[name]
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
        for name, (box, kind, _) in plan.items():
            target, came = targets[name], kind.dtype
            if target.shape != box.shape:
                raise ValueError(f"commit_into: {name!r} has shape {tuple(target.shape)}, want {box.shape}")
            if target.dtype is not came and not _torch.converts(came, target.dtype):
                raise ValueError(f"commit_into: {name!r} is of {target.dtype}, want {came} as it came, or its kind")
        self.version = None
        copy = copier(sum(wanted.nbytes for wanted in plan.values()))
        for name, (box, _, moves) in plan.items():
            target = targets[name]
            if not _copied(target, name, moves, given, copy):
                own = target.detach() if _torch.is_tensor(target) else target
                for move in moves:
                    _put(own, box, move.box, _array(given, name, move))
        return self._end(version)

    def stream(self, version: int, load: Load, *, timeout_s: float | None = None) -> int:
        """Gets, checks and loads a version a bucket at a time, and serves it; returns it. Blocks while `load` runs.

        For a receiver that serves nothing yet: no more than two buckets of the version are in memory beside what
        `load` makes of them, and the sources may have merely offered it. `timeout_s` is for all of it, `load` too.
        Raises as `prepare` does; then nothing is served until a commit, or another stream, succeeds.
        """
        self.version = None
        deadline = Deadline(timeout_s)
        with self._reading(version, deadline):
            self._stream(version, load, deadline)
        return self._end(version)

    def _stream(self, version: int, load: Load, deadline: Deadline) -> None:
        plan, stamps = self._plan(version, deadline, {})
        names = list(plan)
        # Half of a bucket at a time: its pieces, what they are put together to, and the next one's pieces are here.
        runs = list(_runs([2 * wanted.nbytes for wanted in plan.values()], self._bucket_bytes))
        ask = partial(self._ask, version, stamps, plan, deadline)
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
            load({name: _put_together(plan[name].box, parts) for name, parts in pieces.items()})

    @contextlib.contextmanager
    def _reading(self, version: int, deadline: Deadline) -> Iterator[None]:
        """Tells the sources afterwards that it is done; what has failed keeps nothing of what it had read."""
        lost = ""
        try:
            yield
        except BaseException as error:
            lost = error.peer if isinstance(error, PeerLostError) else ""
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, TimeoutError_) and error.channel.startswith(SERVICE) and deadline.ended(error):
                # It counts from when the calls before the last had their answers.
                raise deadline.timed_out(error.channel, error.peer, error.key) from error
            raise
        finally:
            for source in self._sources:
                if source != lost:
                    self._done(source, version)

    def _done(self, source: str, version: int | None) -> None:
        """Tells a source that no more is asked of a version, and it is awaited no longer; does not wait for it."""
        if version is not None and version != self._base_of(source)[0]:
            with contextlib.suppress(CommError):
                self._asked(source, "done", version, Deadline(0.0))

    def _base_of(self, source: str) -> tuple[int | None, Sequence[Parts]]:
        return self._bases.get(source, (None, ()))

    def _ask(
        self, version: int, stamps: Mapping[str, int], plan: Plan, deadline: Deadline, names: Sequence[str]
    ) -> list[tuple[str, list[tuple[str, _Move]], "Future[Tree]"]]:
        """Asks each source for its pieces of these tensors. Blocks for a source that takes nothing."""
        asked = []
        for source in self._sources:
            moves = _moves_of(source, plan, names)
            if moves:
                slices = self._asked(source, "slices", version, deadline, stamps[source], _bounds(moves))
                asked.append((source, moves, slices))
        return asked

    def _call(self, source: str, method: str, version: int, deadline: Deadline, *more: Tree) -> Tree:
        args = (self._name, version, self._number, *more)
        return self._caller.request(source, SERVICE, method, args, timeout_s=deadline.left_s)

    def _asked(self, source: str, method: str, version: int, deadline: Deadline, *more: Tree) -> "Future[Tree]":
        args = (self._name, version, self._number, *more)
        return self._caller.request_async(source, SERVICE, method, args, timeout_s=deadline.left_s)

    def _answer(self, source: str, method: str, answer: "Future[Tree]", deadline: Deadline) -> Tree:
        try:
            return answer.result(deadline.left_s)
        except TimeoutError as error:
            if not deadline.ended(error):
                raise
            raise deadline.timed_out(f"{SERVICE}.{method}", source) from None

    def _plan(self, version: int, deadline: Deadline, mapped: Mapping[str, Tree]) -> tuple[Plan, Mapping[str, int]]:
        """Returns what covers each wanted box, and the stamps of the version at the sources that are not `mapped`.

        Those are asked for what they have.
        """
        packed, stamps = {}, {}
        for source in self._sources:
            if source in mapped:
                packed[source] = mapped[source]["layout"]
            else:
                stamps[source], packed[source] = self._call(source, "layout", version, deadline)
        spelt = encode(packed).to_bytes()
        if self._planned is None or self._planned[0] != spelt:
            layouts = {source: read_layout(layout) for source, layout in packed.items()}
            plan = {name: _covered(name, box, layouts) for name, box in self._boxes(layouts).items()}
            self._planned = spelt, plan
        return self._planned[1], stamps

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
        whole = {name: found.whole for layout in layouts.values() for name, found in layout.items()}
        return {name: Box((0,) * len(shape), shape) for name, shape in whole.items()}

    def _checked(self, source: str, version: int, answer: Tree, deadline: Deadline) -> Arrays:
        """Returns the arrays of a source on this host, in place, once their digests are checked."""
        since = time.monotonic()
        ask = partial(self._call, source, "digests", version, deadline)
        arrays = self._reader.check(source, self._name, version, answer, ask)
        self._checking_s += time.monotonic() - since
        return arrays

    def _moved(self, source: str, version: int, stamp: int, plan: Plan, deadline: Deadline) -> Sequence[Parts]:
        """Returns copies of what is wanted of a source that is reached over a network: others' of this host, or own."""
        moves = _moves_of(source, plan, plan)
        boxes: dict[str, list[Box]] = {}
        for name, move in moves:
            boxes.setdefault(name, []).append(move.box)
        with Turn(self._copies, source, self._name, stamp, boxes, deadline) as turn:
            rest = [
                (name, move._replace(box=box)) for name, move in moves for box in held(name, move.box, turn.mapped)[1]
            ]
            if rest:
                draft = turn.draft([(name, move.box, plan[name].kind) for name, move in rest])
                self._fetch(source, version, stamp, rest, plan, draft, deadline)
                turn.add(draft)
        self._checking_s += turn.check()
        if self._delta:
            before, _ = self._base_of(source)
            self._bases[source] = version, turn.mapped
            self._done(source, before)
        return turn.mapped

    def _fetch(
        self,
        source: str,
        version: int,
        stamp: int,
        moves: Sequence[tuple[str, _Move]],
        plan: Plan,
        draft: Draft,
        deadline: Deadline,
    ) -> None:
        """Fetches what is wanted of a source into a copy, a bucket at a time; of what this end has had what changed."""
        base, had = self._base_of(source)
        sizes = [move.box.num_elements() * int(plan[name].kind.itemsize) for name, move in moves]
        buckets = [moves[slice(*bounds)] for bounds in _runs(sizes, min(self._bucket_bytes, _FETCHED_BYTES))]

        def put(bucket: Sequence[tuple[str, _Move]], base: int | None) -> bool:
            came = self._call(source, "slices", version, deadline, stamp, _bounds(bucket), base)
            self._moved_bytes += sum(int(found.nbytes) for found, _ in came)
            for (name, move), (found, expected) in zip(bucket, came, strict=True):
                since = time.monotonic()
                old = None if base is None else _put_together(move.box, held(name, move.box, had)[0])
                array = _made(old, found, expected)
                self._checking_s += time.monotonic() - since
                if array is None and base is not None:
                    return False
                if array is None:
                    raise self._altered(version, source, name)
                draft.put(name, move.box, array, expected)
            return True

        for bucket in buckets:
            known = base is not None and not any(held(name, move.box, had)[1] for name, move in bucket)
            if not put(bucket, base if known else None):
                # What the source has as the base is another version than came by that number: it was started anew.
                base = None
                put(bucket, base)


def _covered(name: str, box: Box, layouts: Layouts) -> _Wanted:
    """Returns a wanted box and what covers it; raises ValueError naming the tensor where that cannot be."""
    moves, kinds = [], {}
    for piece in cover_named(name, box, layouts):
        shard, _, kind = layouts[piece.source][name]
        moves.append(_Move(piece.source, piece.box, shard, run(piece.box, shard), run(piece.box, box)))
        # By name, as torch's and numpy's do not compare.
        kinds[str(kind.dtype)] = kind
    if len(kinds) > 1:
        raise ValueError(f"tensor {name!r}: got shards of dtypes {', '.join(sorted(kinds))}, want them of one")
    return _Wanted(box, kind, moves)


def cover_named(name: str, box: Box, layouts: Layouts) -> list[Piece]:
    """Returns the pieces that cover a wanted box; raises ValueError naming the tensor where that cannot be."""
    shards = [(source, layout[name].box) for source, layout in layouts.items() if name in layout]
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
    return [(name, move) for name in names for move in plan[name].moves if move.source == source]


def _bounds(moves: Sequence[tuple[str, _Move]]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Boxes of global offsets as bounds within the shards that a source has."""
    return [(name, [(part.start, part.stop) for part in move.box.slices(move.shard)]) for name, move in moves]


def _array(given: Mapping[str, Given], name: str, move: _Move) -> Tree:
    found = given[move.source]
    if not isinstance(found, Arrays):
        return _put_together(move.box, held(name, move.box, found)[0])
    return found[name] if move.box == move.shard else found[name][(*move.box.slices(move.shard), ...)]


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


def _copied(target: Tree, name: str, moves: Sequence[_Move], given: Mapping[str, Given], copy: Copy) -> bool:
    """Copies a tensor's pieces by their addresses, if they and the target lie in order in this host's memory."""
    into = _torch.address(target)
    if not into or not (_torch.is_tensor(target) or target.flags.writeable):
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


def _put_together(box: Box, pieces: Sequence[tuple[Box, Tree]]) -> Tree:
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    whole = _torch.new_empty(pieces[0][1], box.shape)
    for part, array in pieces:
        _put(whole, box, part, array)
    return whole


def _put(whole: Tree, box: Box, part: Box, array: Tree) -> None:
    """Writes `array`, which is `part`, into `whole`, which is `box`; one of another dtype is converted."""
    if whole.dtype == array.dtype:
        whole, array = _torch.copyable(whole), _torch.copyable(array)
    whole[(*part.slices(box), ...)] = array


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
