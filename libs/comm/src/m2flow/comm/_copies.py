"""What several receivers of one host want of a source on another: one of them fetches it, the others map it.

The endpoints of one host share the run's directory. A ledger in it, for each source and name of weights, says which of
them keep copies of a version in shared memory. A receiver takes its turn by locking it: it maps what there is of the
version, fetches the rest into a copy of its own, and adds that. One that is stopped in its turn is left with a ledger
that nobody finds any more.
"""

import contextlib
import hashlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from m2flow.comm import _torch
from m2flow.comm._calls import Lend, Request
from m2flow.comm._copying import copier
from m2flow.comm._deadline import Deadline
from m2flow.comm._ledger import Ledger, Record
from m2flow.comm._segments import Pool
from m2flow.comm.errors import CommError, PayloadError, PeerLostError, TimeoutError_
from m2flow.comm.payload import Tree, encode
from m2flow.comm.resharding import Box, overlap, subtract
from m2flow.comm.routing import Address, route
from m2flow.comm.weights import SAMPLE, digest

SERVICE = "m2flow.copies"
# How often a receiver looks whether it is its turn.
_LOOK_S = 0.005
# An endpoint of this host that does not answer for so long is stopped, and nobody waits for it.
_PATIENCE_S = 5.0

# Parts of tensors, by name and box.
Parts = Mapping[str, Mapping[Box, Tree]]


class Caller(Protocol):
    """What a receiver needs of its endpoint."""

    name: str

    def request(
        self, peer: str, service: str, method: str, args: Tree = None, *, timeout_s: float | None = None
    ) -> Tree: ...

    def request_async(
        self, peer: str, service: str, method: str, args: Tree = None, *, timeout_s: float | None = None
    ) -> "Future[Tree]": ...

    @property
    def address(self) -> Address: ...

    def address_of(self, peer: str) -> Address: ...


def is_near(caller: Caller, peer: str) -> bool:
    """Says whether a peer's memory is shared with an endpoint."""
    return route(caller.address, caller.address_of(peer), "cpu").backend != "grpc"


def held(name: str, box: Box, copies: Sequence[Parts]) -> tuple[list[tuple[Box, Tree]], list[Box]]:
    """Returns the pieces of a box that copies have, each element once, and the boxes that none of them has."""
    for copy in copies:
        if box in copy.get(name, ()):
            return [(box, copy[name][box])], []
    pieces, missing = [], [box]
    for part, array in [found for copy in copies for found in copy.get(name, {}).items()]:
        if len(part.shape) != len(box.shape):
            # Of a version before, which had it in other dims.
            continue
        for both in filter(None, [overlap(one, part) for one in missing]):
            pieces.append((both, array[(*both.slices(part), ...)]))
        missing = [left for one in missing for left in subtract(one, part)]
    return pieces, missing


class Copies:
    """The copies that an endpoint keeps for others of its host, each until another version takes its place.

    They are no part of the pool's quota, as nobody who waits for room could let go of them: together they have at most
    `limit_bytes` of their own. Memory of a version before, which is read still or waits for the next, comes on top.
    """

    def __init__(self, caller: Caller, directory: Path, pool: Pool, limit_bytes: int) -> None:
        self.caller = caller
        self.directory = directory.absolute()
        # How often a copy that an endpoint keeps was checked, by file and endpoint.
        self.num_checks: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.closed = False
        self._pool = pool
        self._limit_bytes = limit_bytes
        # By file, a version's stamp and the copies of it.
        self._kept: dict[str, tuple[int, list[Lend]]] = {}
        # By file, memory of versions before.
        self._old: defaultdict[str, list[Lend]] = defaultdict(list)
        self._lock = threading.Lock()

    def handle(self, request: Request) -> Lend | None:
        """Answers "copy", which gives one, and "forget"; "here" says that this process is not stopped."""
        if request.method == "here":
            return None
        file, stamp, *which = request.args
        with self._lock:
            kept_stamp, copies = self._kept.get(file, (0, []))
            if kept_stamp != stamp:
                raise LookupError("what was fetched of that version is not kept here any more")
            if request.method == "copy":
                found: Lend = copies[which[0]]
                self._pool.hold(found.slot)
                return found
            forgotten = self._taken(file)
        _let_go(forgotten)
        return None

    def begin(self, file: str, stamp: int) -> None:
        """Withdraws the copies of any other version."""
        with self._lock:
            if file in self._kept and self._kept[file][0] != stamp:
                self._old[file] += self._kept.pop(file)[1]

    def room_for(self, file: str, size_bytes: int) -> Lend | None:
        """Returns memory for a copy: some that is warm, if nobody reads it any more; None where there is no room."""
        with self._lock:
            used_bytes = sum(kept.size_bytes for _, copies in self._kept.values() for kept in copies)
            idle = [kept for kept in self._old[file] if kept.slot.holds == 1]
            self._old[file] = [kept for kept in self._old[file] if kept not in idle]
        found = None
        if used_bytes + size_bytes <= self._limit_bytes:
            fits = [kept for kept in idle if kept.size_bytes == size_bytes and not kept.slot.abandoned]
            with contextlib.suppress(CommError):
                found = fits[0] if fits else Lend(self._pool.beside_quota(size_bytes), size_bytes, self._pool.let_go)
        _let_go(kept for kept in idle if kept is not found)
        return found

    def keep(self, file: str, stamp: int, copy: Lend) -> int:
        """Keeps a copy of a version; returns its number."""
        self.begin(file, stamp)
        with self._lock:
            copies = self._kept.setdefault(file, (stamp, []))[1]
            copies.append(copy)
            return len(copies) - 1

    def end(self, file: str) -> None:
        """Lets go of memory of versions before where others keep the newest: they have some of their own."""
        if file not in self._kept:
            self._forget(file)

    def close(self) -> None:
        """Keeps nothing any more, and nobody waits for a turn; readers keep what they hold."""
        self.closed = True
        for file in {*self._kept, *self._old}:
            self._forget(file)

    def _forget(self, file: str) -> None:
        with self._lock:
            forgotten = self._taken(file)
        _let_go(forgotten)

    def _taken(self, file: str) -> list[Lend]:
        """Takes out all that there is for a file; the lock is held."""
        return [*self._kept.pop(file, (0, []))[1], *self._old.pop(file, [])]


def _let_go(copies: Iterable[Lend]) -> None:
    for kept in copies:
        kept.let_go(kept.slot)


class Draft:
    """A copy of parts that is being written: in shared memory, or as what comes where there is no room.

    `parts` are names, boxes and arrays of their dtype.
    """

    def __init__(self, parts: Sequence[tuple[str, Box, Tree]], room_for: Callable[[int], Lend | None]) -> None:
        boxes = [number for _, box, _ in parts for number in (len(box.shape), *box.offset, *box.shape)]
        encoded = encode(
            {
                "digests": np.empty(len(parts), np.uint32),
                "boxes": np.array(boxes, np.int64),
                "names": [name for name, _, _ in parts],
                "arrays": [_torch.new_empty(kind, box.shape) for _, box, kind in parts],
            }
        )
        digests, numbers, *places = encoded.places()
        # A name of more than 1 KiB has a place too, and is not written here.
        self.kept = room_for(encoded.size_bytes) if len(places) == len(parts) else None
        self.parts: dict[str, dict[Box, Tree]] = defaultdict(dict)
        if self.kept is None:
            return
        self._data = self.kept.slot.view(encoded.size_bytes)
        self._address = int(self._data.ctypes.data)
        self._data[: len(encoded.head)] = np.frombuffer(encoded.head, np.uint8)
        self._digests = self._data[digests.offset_bytes :][: digests.size_bytes].view(np.uint32)
        self._data[numbers.offset_bytes :][: numbers.size_bytes].view(np.int64)[:] = boxes
        # Where each array is to be written, and its digest.
        keys = [(name, box) for name, box, _ in parts]
        self._places = dict(zip(keys, enumerate(places), strict=True))
        self._copy = copier(encoded.size_bytes)

    def put(self, name: str, box: Box, array: Tree, expected: int) -> None:
        """Writes a part, which has this digest; raises PayloadError for one of another size than it should have."""
        if self.kept is None:
            self.parts[name][box] = array
            return
        number, (start, size) = self._places[name, box]
        found = _torch.bytes_of(array)
        if found.nbytes != size:
            raise PayloadError(f"weights: got {found.nbytes} bytes of {name!r}, want {size}")
        self._copy(self._address + start, found.ctypes.data, size)
        self._digests[number] = expected


class Turn:
    """A receiver's turn at a version: `mapped` is what there is on this host of what it wants, by name and box.

    To enter it blocks while another has its turn, and raises TimeoutError_ naming that one, or CommError where its own
    endpoint is closed. Where no file can be locked nothing is found, and what is fetched stays with its receiver.
    """

    def __init__(
        self,
        copies: Copies,
        source: str,
        name: str,
        stamp: int,
        wanted: Mapping[str, Sequence[Box]],
        deadline: Deadline,
    ) -> None:
        self.mapped: list[Parts] = []
        self._copies = copies
        self._about = f"{name!r} of {source!r}"
        self._stamp = stamp
        self._wanted = wanted
        self._deadline = deadline
        spelt = f"{source}\0{name}".encode("utf-8", "surrogatepass")
        self._file = f"{hashlib.blake2b(spelt, digest_size=16).hexdigest()}.weights"
        self._ledger = Ledger(copies.directory / self._file)
        # The copies there are, by endpoint and number.
        self._there: list[tuple[str, int]] = []
        self._draft: Draft | None = None
        # By endpoint, what is mapped and its digests.
        self._unchecked: defaultdict[str, list[tuple[str, Tree, int]]] = defaultdict(list)

    def __enter__(self) -> Self:
        self._lock()
        try:
            self._copies.begin(self._file, self._stamp)
            if self._ledger.locked:
                self._find()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def draft(self, parts: Sequence[tuple[str, Box, Tree]]) -> Draft:
        """Returns a copy of parts that is yet to be written; see `Draft`."""
        self._draft = Draft(parts, self._room_for)
        return self._draft

    def add(self, draft: Draft) -> None:
        """Adds what was fetched to what is mapped, and to what others find."""
        if draft.kept is None:
            self.mapped.append(draft.parts)
            return
        number = self._copies.keep(self._file, self._stamp, draft.kept)
        self._draft = None
        self._there.append((self._copies.caller.name, number))
        self._write()
        self._map(*self._there[-1])

    def check(self) -> float:
        """Checks what others have fetched: all of it the first time, an eighth later. Returns the seconds of that.

        Raises PayloadError naming what has another digest. Others need not wait for it: it is for after the turn.
        """
        since = time.monotonic()
        for endpoint, mapped in self._unchecked.items():
            count = self._copies.num_checks[self._file, endpoint]
            for name, array, expected in mapped[count % SAMPLE :: SAMPLE] if count else mapped:
                if digest(array) != expected:
                    # So that it is fetched when it is prepared again.
                    self._have_forgotten(endpoint, self._stamp)
                    raise PayloadError(f"weights {self._about} from {endpoint!r}: {name!r} has another digest")
            self._copies.num_checks[self._file, endpoint] += 1
        return time.monotonic() - since

    def _room_for(self, size_bytes: int) -> Lend | None:
        return self._copies.room_for(self._file, size_bytes) if self._ledger.locked else None

    def _find(self) -> None:
        """Maps what there is of the version; what there is of another is of no use any more."""
        _, stamp, copies = self._ledger.read()
        there = [(endpoint, number) for endpoint, number in copies if self._is_there(endpoint)]
        self._there = list(there) if stamp == self._stamp else []
        self._write()
        for endpoint, number in there:
            if stamp != self._stamp:
                # What this endpoint kept of it is withdrawn already.
                if endpoint != self._copies.caller.name:
                    self._have_forgotten(endpoint, stamp)
                continue
            try:
                self._map(endpoint, number)
            except CommError:
                if self._deadline.left_s == 0:
                    raise
                # It is dead, stopped or has another version, or it cannot be mapped here.
                self._there.remove((endpoint, number))
                self._write()

    def _map(self, endpoint: str, number: int) -> None:
        """Maps a copy, as far as it is wanted."""
        tree = self._ask(endpoint, "copy", (self._file, self._stamp, number))
        found: dict[str, dict[Box, Tree]] = defaultdict(dict)
        numbers = iter(tree["boxes"].tolist())
        for name, array, expected in zip(tree["names"], tree["arrays"], tree["digests"].tolist(), strict=True):
            ndim = next(numbers)
            box = Box(tuple(itertools.islice(numbers, ndim)), tuple(itertools.islice(numbers, ndim)))
            wanted = self._wanted.get(name, ())
            if box in wanted or any(overlap(box, one) for one in wanted):
                found[name][box] = array
                if endpoint != self._copies.caller.name:
                    self._unchecked[endpoint].append((name, array, expected))
        if found:
            self.mapped.append(found)

    def _ask(self, endpoint: str, method: str, args: Tree) -> Tree:
        timeout_s = self._deadline.left_s
        if endpoint != self._copies.caller.name:
            timeout_s = _PATIENCE_S if timeout_s is None else min(timeout_s, _PATIENCE_S)
        return self._copies.caller.request(endpoint, SERVICE, method, args, timeout_s=timeout_s)

    def _have_forgotten(self, endpoint: str, stamp: int) -> None:
        """Has an endpoint let go of its copies of a version; does not wait for it."""
        with contextlib.suppress(CommError):
            args = (self._file, stamp)
            self._copies.caller.request_async(endpoint, SERVICE, "forget", args, timeout_s=0.0)

    def _is_there(self, endpoint: str) -> bool:
        """Says whether an endpoint is on this host and, as far as its socket tells, alive."""
        return is_near(self._copies.caller, endpoint) and (self._copies.directory / f"{endpoint}.sock").exists()

    def _is_stopped(self, endpoint: str) -> bool:
        try:
            self._ask(endpoint, "here", None)
        except (TimeoutError_, PeerLostError):
            return True
        return False

    def _lock(self) -> None:
        """Waits for the turn; goes on without where there can be no ledger."""
        looked, stopped = time.monotonic(), None
        while True:
            try:
                leader = self._ledger.try_lock()
            except OSError:
                return
            if leader is None:
                return
            if self._deadline.left_s == 0:
                peer = leader or "another receiver of this host"
                raise self._deadline.timed_out(f"{SERVICE}.turn", peer, self._about)
            if self._copies.closed:
                raise CommError(f"endpoint {self._copies.caller.name!r} is closed")
            if leader == stopped:
                self._ledger.leave()
                stopped = None
            elif time.monotonic() - looked > _PATIENCE_S:
                if not leader or self._is_stopped(leader):
                    stopped = leader
                looked = time.monotonic()
                # Meanwhile another may have made one, which is not to be taken away.
                continue
            time.sleep(_LOOK_S)

    def _write(self) -> None:
        self._ledger.write(Record(self._copies.caller.name, self._stamp, self._there))

    def _end(self) -> None:
        if self._draft is not None and self._draft.kept is not None:
            _let_go([self._draft.kept])
        self._copies.end(self._file)
        self._ledger.unlock()
