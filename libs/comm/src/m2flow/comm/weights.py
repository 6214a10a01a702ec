"""Weights on their way from a trainer to those who serve them, within one host: written once, read in place.

A version is one payload in shared memory: digests, the layout, and the tensors as a payload of their own, which a
reader decodes when it wants a tensor and not when it knows where each lies. The first version has the digests of all
tensors, later ones of an eighth, another eighth each time. Every reader maps the same bytes, checks the digests that
are there (of all tensors the first time, asking for those that are not), and holds the memory while it keeps an array.
"""

import itertools
import operator
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from m2flow.comm import _torch
from m2flow.comm._calls import Lend, Request
from m2flow.comm._changes import changes
from m2flow.comm._deadline import Deadline
from m2flow.comm._layouts import packed_layout
from m2flow.comm._segments import Pool, Slot, slot_bytes
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import CommError, PayloadError
from m2flow.comm.payload import Encoded, Place, Tree, decode, encode, structure
from m2flow.comm.resharding import Shard

SERVICE = "m2flow.weights"
SAMPLE = 8
# One for each reader of this process.
reader_numbers = itertools.count()


class StagedWeights(NamedTuple):
    """What staging a version cost: its size, the seconds of writing it, the seconds of its digests."""

    nbytes: int
    seconds: float
    digest_seconds: float


class _Reader(NamedTuple):
    """Who reads a version: its connection, and its own number there."""

    session: int
    number: int


class _Staged(NamedTuple):
    """A version in shared memory, as a payload, and who has asked for it and has yet to say that it is done."""

    slot: Slot
    size_bytes: int
    readers: set[_Reader]


class _Awaited(NamedTuple):
    """A request for a version that is yet to be staged, or offered."""

    version: int
    reader: _Reader
    read: Callable[[Tree], Tree] | None
    answer: "Future[Any]"


class _Line:
    """The versions of one name: what is staged, the newest that there has been, and who waits for a later one."""

    def __init__(self) -> None:
        self.staged: dict[int, _Staged] = {}
        self.newest: int | None = None
        self.num_staged = 0
        self.awaited: list[_Awaited] = []
        # Held while a version is staged: the one that is coming, which has so much memory or will have.
        self.staging = threading.Lock()
        self.coming: int | None = None
        self.reserved_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the quota that this name has, or will have soon."""
        return self.reserved_bytes + sum(staged.slot.size_bytes for staged in self.staged.values())

    @property
    def to_ask_for(self) -> int | None:
        """The newest version that is there or, where that has made way for it, the one that is coming."""
        return self.newest if self.coming is None or self.newest in self.staged else self.coming

    def take_staged(self, which: Callable[[int, _Staged], bool]) -> list[_Staged]:
        """Takes versions out."""
        return [self.staged.pop(version) for version, staged in list(self.staged.items()) if which(version, staged)]

    def take_unread(self) -> list[_Staged]:
        """Takes out what is older than the newest and is not read any more."""
        return self.take_staged(lambda version, staged: version != self.newest and not staged.readers)

    def take_awaited(self, which: Callable[[_Awaited], bool]) -> list[_Awaited]:
        """Takes requests out that wait."""
        taken = [asked for asked in self.awaited if which(asked)]
        self.awaited = [asked for asked in self.awaited if not which(asked)]
        return taken


class WeightStore:
    """What this process offers: the newest version of each name, and the one before while it is read."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lines: dict[str, _Line] = {}
        self._offered: dict[tuple[str, int], Tree] = {}
        self._lock = threading.Lock()

    def stage(
        self, name: str, version: int, weights: Mapping[str, Tree], *, timeout_s: float | None = None
    ) -> StagedWeights:
        """Copies a version into shared memory and offers it in the place of the one before; see `stage_weights`."""
        deadline = Deadline(timeout_s)
        started = time.monotonic()
        version = _checked_version(name, version)
        arrays = {key: value.data if isinstance(value, Shard) else value for key, value in weights.items()}
        layout = packed_layout(weights)
        line = self._line(name)
        left_s = deadline.left_s
        if not line.staging.acquire(timeout=-1.0 if left_s is None else left_s):
            raise deadline.timed_out(f"{SERVICE}.stage", "another thread that stages a version of it", name)
        try:
            keys = list(arrays)
            checked = keys[line.num_staged % SAMPLE :: SAMPLE] if line.num_staged else keys
            digests = {key: digest(arrays[key]) for key in checked}
            digested = time.monotonic()
            payload = encode({"digests": digests, "stamp": _stamp(), "layout": layout, "weights": encode(arrays)})
            self._make_room(name, line, version, payload.size_bytes)
            staged = None
            try:
                staged = self._written(line, payload, deadline)
            except TimeoutError as error:
                if not deadline.ended(error):
                    raise
                raise deadline.timed_out(f"{SERVICE}.stage", str(error), name) from error
            finally:
                self._publish(name, line, version, staged)
        finally:
            line.staging.release()
        return StagedWeights(payload.size_bytes, time.monotonic() - digested, digested - started)

    def offer(self, name: str, version: int, weights: Mapping[str, Tree]) -> None:
        """Offers a version where it is, to readers that stream it; nothing is copied until they do.

        It answers who waits for the version: who fetches it, with an error. It must stay as it is until it is released
        or the store is closed.
        """
        version = _checked_version(name, version)
        arrays = {key: value.data if isinstance(value, Shard) else value for key, value in weights.items()}
        layout = packed_layout(weights)
        offered = {"stamp": _stamp(), "layout": layout, "weights": arrays}
        line = self._line(name)
        with self._lock:
            self._offered[name, version] = offered
            due = line.take_awaited(lambda asked: asked.version == version)
        for asked in due:
            if asked.read is None:
                asked.answer.set_exception(_only_offered(name, version))
            else:
                asked.answer.set_result(_laid(offered))

    def release(self, name: str, version: int) -> None:
        """Withdraws a version; readers keep what they hold. Raises ValueError for one that is not here."""
        with self._lock:
            line = self._lines.get(name)
            staged = None if line is None else line.staged.pop(version, None)
            offered = self._offered.pop((name, version), None)
        if staged is not None:
            self._pool.let_go(staged.slot)
        elif offered is None:
            raise ValueError(f"weights {name!r} version {version} are neither staged nor offered here")

    def close(self) -> None:
        """Withdraws everything; readers keep what they hold."""
        with self._lock:
            staged = [found for line in self._lines.values() for found in line.take_staged(lambda *_: True)]
            self._offered.clear()
        self._let_go(staged)
        self._pool.trim()

    def handle(self, request: Request) -> Any:
        """Answers "fetch", "layout", "digests" or "slices" of a version, or "newest".

        The first two wait until it is staged or offered. Who has asked says "done" when it has asked for all that it
        needs, or waits no longer; until then the version stays beside the next one, where there is room.
        """
        method = request.method
        if method == "newest":
            line = self._line(request.args[0])
            with self._lock:
                newest = line.to_ask_for
            return -1 if newest is None else newest
        name, version, number, *slices = request.args
        reader = _Reader(request.session, number)
        if method == "done":
            self._done(self._line(name), version, reader)
            return None

        def read(tree: Tree) -> Tree:
            if method == "layout":
                return _laid(tree)
            tree["weights"] = decode(tree["weights"])
            if method == "digests":
                return {key: digest(value) for key, value in tree["weights"].items()}
            return self._slices(name, tree, *slices)

        asked = _Awaited(version, reader, None if method == "fetch" else read, Future())
        # Who asks for more has had its layout: what is not here any more does not come.
        offered, found = self._find(name, asked, waits=method in ("fetch", "layout"))
        if offered is None:
            return found
        if method not in ("layout", "slices"):
            raise _only_offered(name, version)
        return _laid(offered) if method == "layout" else self._slices(name, offered, *slices)

    def on_gone(self, session: int) -> None:
        """Takes note of a connection that is gone: what was read over it is done, and nobody waits there."""
        with self._lock:
            lines = list(self._lines.values())
            gone, unread = [], []
            for line in lines:
                gone += line.take_awaited(lambda asked: asked.reader.session == session)
                for staged in line.staged.values():
                    staged.readers.difference_update([one for one in staged.readers if one.session == session])
                unread += line.take_unread()
        self._let_go(unread)
        _give_up(gone)

    def _line(self, name: str) -> _Line:
        with self._lock:
            return self._lines.setdefault(name, _Line())

    def _make_room(self, name: str, line: _Line, version: int, size_bytes: int) -> None:
        """Withdraws what is older, but for the version before where somebody reads it.

        Raises CommError for a version that never fits.
        """
        with self._lock:
            if line.newest is not None and version <= line.newest:
                raise ValueError(f"weights {name!r}: got version {version}, want more than the staged {line.newest}")
            needed = slot_bytes(size_bytes)
            kept = sum(other.kept_bytes for other in self._lines.values() if other is not line)
            if kept + needed > self._pool.quota_bytes:
                raise CommError(
                    f"weights {name!r} version {version}: got {size_bytes} bytes beside {kept} of other weights that "
                    f"are staged here, want at most the quota of {self._pool.quota_bytes} in all: raise quota_bytes, "
                    "or release what is staged"
                )

            old = line.take_staged(lambda at, staged: at != line.newest or not staged.readers)
            line.coming, line.reserved_bytes = version, needed
        self._let_go(old)

    def _written(self, line: _Line, payload: Encoded, deadline: Deadline) -> _Staged:
        try:
            slot = self._pool.take(payload.size_bytes, Deadline(0.0))
        except TimeoutError:
            # There is no room for both: what is read makes way too, and its readers are waited for.
            with self._lock:
                old = line.take_staged(lambda *_: True)
            self._let_go(old)
            slot = self._pool.take(payload.size_bytes, deadline)
        try:
            payload.write_into(slot.view(payload.size_bytes))
        except BaseException:
            self._pool.let_go(slot)
            raise
        return _Staged(slot, payload.size_bytes, set())

    def _publish(self, name: str, line: _Line, version: int, staged: _Staged | None) -> None:
        """Ends the staging of a version, with None where it failed: answers all who wait for it or for older ones."""
        with self._lock:
            line.coming, line.reserved_bytes = None, 0
            if staged is not None:
                line.staged[version] = staged
                line.newest = version
                line.num_staged += 1
            due = line.take_awaited(lambda asked: line.newest is not None and asked.version <= line.newest)
            lent = [(asked, self._lend(staged, asked)) for asked in due if staged and asked.version == version]
            unread = line.take_unread()
        self._let_go(unread)
        for asked, lend in lent:
            asked.answer.set_result(lend)
        for asked in due:
            if not asked.answer.done():
                # Passed over: it does not come any more.
                asked.answer.set_exception(_withdrawn(name, asked.version, line))

    def _find(self, name: str, asked: _Awaited, *, waits: bool) -> "tuple[Tree, Lend | Future[Any]]":
        """Returns the version where it is offered, else None, and what answers the request where it is not."""
        line = self._line(name)
        with self._lock:
            offered, staged = self._offered.get((name, asked.version)), line.staged.get(asked.version)
            if offered is not None:
                return offered, asked.answer
            if staged is not None:
                return None, self._lend(staged, asked)
            if not waits or (line.newest is not None and asked.version <= line.newest):
                raise _withdrawn(name, asked.version, line)
            line.awaited.append(asked)
            return None, asked.answer

    def _lend(self, staged: _Staged, asked: _Awaited) -> Lend:
        """Returns an answer that holds the slot, before anybody can withdraw the version."""
        self._pool.hold(staged.slot)
        staged.readers.add(asked.reader)
        return Lend(staged.slot, staged.size_bytes, self._pool.let_go, asked.read)

    def _done(self, line: _Line, version: int, reader: _Reader) -> None:
        with self._lock:
            gone = line.take_awaited(lambda asked: (asked.reader, asked.version) == (reader, version))
            if version in line.staged:
                line.staged[version].readers.discard(reader)
            unread = line.take_unread()
        self._let_go(unread)
        _give_up(gone)

    def _let_go(self, withdrawn: Sequence[_Staged]) -> None:
        for staged in withdrawn:
            self._pool.let_go(staged.slot)

    def _slices(
        self,
        name: str,
        tree: Tree,
        stamp: int,
        slices: Sequence[tuple[str, Sequence[tuple[int, int]]]],
        base: int | None = None,
    ) -> Tree:
        """Returns slices of a version's tensors, each with its digest.

        Of a slice that has changed little since the version `base`, which the reader has, only the changes. Raises
        ValueError where the reader has the layout of another version by that number.
        """
        if tree["stamp"] != stamp:
            raise ValueError(f"weights {name!r}: got a version that was staged anew since its layout was read")
        weights: Mapping[str, Tree] = tree["weights"]
        with self._lock:
            line = self._lines.get(name)
            older = None if line is None or base is None else line.staged.get(base)
            if older is not None:
                self._pool.hold(older.slot)
        try:
            old = {} if older is None else _weights_in(older)
            found = []
            for key, parts in slices:
                # The ellipsis keeps an array of no dims an array.
                where = (*(slice(*bounds) for bounds in parts), ...)
                array = weights[key][where]
                same = old[key] if key in old and old[key].shape == weights[key].shape else None
                smaller = None if same is None else changes(same[where], array)
                found.append((array if smaller is None else smaller, digest(array)))
            return found
        finally:
            if older is not None:
                self._pool.let_go(older.slot)


def _give_up(waiting: Sequence[_Awaited]) -> None:
    for asked in waiting:
        asked.answer.set_exception(ValueError(f"whoever asked for version {asked.version} waits no longer"))


def _withdrawn(name: str, version: int, line: _Line) -> ValueError:
    staged = sorted(line.staged)
    wanted = f"one of {staged}" if staged else "a later one" if line.newest is None else f"one after {line.newest}"
    return ValueError(f"weights {name!r} version {version} are withdrawn, want {wanted}")


def _only_offered(name: str, version: int) -> ValueError:
    return ValueError(f"weights {name!r} version {version} are only offered: stream them, or stage them")


class Known(NamedTuple):
    """The structure of one version, which later ones mostly share: where each array lies, and its dtype."""

    structure: bytes
    size_bytes: int
    places: Mapping[str, Place]
    dtypes: Mapping[str, Any]


class Arrays(Mapping[str, Tree]):
    """The arrays of a version by name, in place. They are made when the first of them is asked for.

    `data` is their payload, uint8 of shape [size_bytes]; `known` is that of an earlier one, which may save reading it.
    Raises PayloadError for what is no payload of named arrays.
    """

    def __init__(self, data: Bytes, known: Known | None = None) -> None:
        self.data = data
        self.address = int(data.ctypes.data)
        self._decoded: dict[str, Tree] | None = None
        spelt = structure(data)
        if known is None or known.structure != spelt or known.size_bytes != len(data):
            every: list[Place] = []
            self._decoded = decode(data, places=every)
            if len(every) != len(self._decoded):
                raise PayloadError(f"got {len(self._decoded)} weights in {len(every)} arrays, want one array each")
            dtypes = {name: array.dtype for name, array in self._decoded.items()}
            known = Known(spelt, len(data), dict(zip(self._decoded, every, strict=True)), dtypes)
        self.known = known

    def bytes_of(self, name: str) -> Bytes:
        """Returns an array's bytes, shape [nbytes]."""
        start, size = self.known.places[name]
        return self.data[start : start + size]

    def __getitem__(self, name: str) -> Tree:
        if self._decoded is None:
            self._decoded = decode(self.data)
        return self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.known.places)

    def __len__(self) -> int:
        return len(self.known.places)


class WeightReader:
    """Checks what this process fetches, and remembers of whom it has checked all, and how that was laid out."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Known] = {}

    def check(self, source: str, name: str, version: int, answer: Tree, ask: Callable[[], Mapping[str, int]]) -> Arrays:
        """Returns the tensors of an answer; raises PayloadError naming the first whose bytes are not its digest's.

        `ask` gets the digests of all tensors from the source: where it is new here and the answer has only some.
        """
        known = self._known.get((source, name))
        weights, digests = Arrays(answer["weights"], known), answer["digests"]
        if known is None and len(digests) < len(weights):
            digests = ask()
        for key, expected in digests.items():
            if digest(weights.bytes_of(key)) != expected:
                raise PayloadError(f"weights {name!r} version {version} from {source!r}: {key!r} has another digest")
        self._known[source, name] = weights.known
        return weights


def _weights_in(staged: _Staged) -> dict[str, Tree]:
    weights: dict[str, Tree] = decode(decode(staged.slot.view(staged.size_bytes))["weights"])
    return weights


def _stamp() -> int:
    """Returns what tells a version from all others, also from one by its number of another life of its source."""
    return int.from_bytes(os.urandom(8), "little")


def _checked_version(name: str, version: int) -> int:
    if isinstance(version, bool) or not hasattr(version, "__index__") or version < 0:
        raise ValueError(f"weights {name!r}: got version {version!r}, want an int from 0")
    # Of numpy, maybe.
    return operator.index(version)


def _laid(tree: Tree) -> Tree:
    """Returns a version's stamp and layout."""
    return tree["stamp"], tree["layout"]


def digest(value: Tree) -> int:
    """Returns the CRC-32 of an array's elements, which finds accidents, not forgers."""
    return zlib.crc32(_torch.bytes_of(value).data)
