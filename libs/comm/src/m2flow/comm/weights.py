"""Weights on their way from a trainer to those who serve them, within one host: written once, read in place.

A version is one payload in shared memory: digests, the layout, and the tensors as a payload of their own, which a
reader decodes when it wants a tensor and not when it knows where each lies. The first version has the digests of all
tensors, later ones of an eighth, another eighth each time. Every reader maps the same bytes, checks the digests that
are there (of all tensors the first time, asking for those that are not), and holds the memory while it keeps an array.
"""

import itertools
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from m2flow.comm import _torch
from m2flow.comm._calls import Lend, Request
from m2flow.comm._changes import changes
from m2flow.comm._segments import Pool, Slot
from m2flow.comm._tree import Bytes
from m2flow.comm.errors import PayloadError
from m2flow.comm.payload import Place, Tree, decode, encode, structure
from m2flow.comm.resharding import Box, Shard

SERVICE = "m2flow.weights"
_KEPT_VERSIONS = 2
_SAMPLE = 8


class StagedWeights(NamedTuple):
    """What staging a version cost: its size, the seconds of writing it, the seconds of its digests."""

    nbytes: int
    seconds: float
    digest_seconds: float


class _Staged(NamedTuple):
    """A version in shared memory, as a payload."""

    slot: Slot
    size_bytes: int


class _Awaited(NamedTuple):
    """A request for a version that is yet to be staged."""

    version: int
    read: Callable[[Tree], Tree] | None
    answer: "Future[Lend]"


class WeightStore:
    """The versions that this process offers, the last two of each name."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._staged: dict[str, dict[int, _Staged]] = {}
        self._offered: dict[tuple[str, int], Tree] = {}
        self._num_staged: Counter[str] = Counter()
        # By name: the newest version there has been, and who waits for a newer one.
        self._newest: dict[str, int] = {}
        self._awaited: dict[str, list[_Awaited]] = {}
        self._lock = threading.Lock()

    def stage(self, name: str, version: int, weights: Mapping[str, Tree]) -> StagedWeights:
        """Copies a version into shared memory and offers it; blocks for the copy.

        The version before the last is withdrawn; its memory is used again once no reader holds an array of it. Raises
        ValueError for a version that is not newer, PayloadError for what is no array.
        """
        started = time.monotonic()
        arrays = {key: value.data if isinstance(value, Shard) else value for key, value in weights.items()}
        layout = packed_layout(weights)
        digests = {key: digest(arrays[key]) for key in self._checked(name, list(arrays))}
        digested = time.monotonic()
        payload = encode({"digests": digests, "layout": layout, "weights": encode(arrays)})
        self._withdraw(name, version)
        staged = _Staged(self._pool.take(payload.size_bytes), payload.size_bytes)
        payload.write_into(staged.slot.view(payload.size_bytes))
        with self._lock:
            self._staged.setdefault(name, {})[version] = staged
            self._newest[name] = version
            awaited = self._awaited.pop(name, [])
            if later := [waiting for waiting in awaited if waiting.version > version]:
                self._awaited[name] = later
            lent = [(waiting, self._lend(staged, waiting.read)) for waiting in awaited if waiting.version == version]
        for waiting, lend in lent:
            waiting.answer.set_result(lend)
        for waiting in awaited:
            if waiting.version < version:
                # Passed over: it does not come any more.
                waiting.answer.set_exception(self._withdrawn(name, waiting.version))
        return StagedWeights(payload.size_bytes, time.monotonic() - digested, digested - started)

    def offer(self, name: str, version: int, weights: Mapping[str, Tree]) -> None:
        """Offers a version where it is, to readers that stream it; nothing is copied until they do.

        It must stay as it is for as long as the store is open.
        """
        arrays = {key: value.data if isinstance(value, Shard) else value for key, value in weights.items()}
        layout = packed_layout(weights)
        with self._lock:
            self._offered[name, version] = {"layout": layout, "weights": arrays}

    def _checked(self, name: str, keys: list[str]) -> list[str]:
        number = self._num_staged[name]
        self._num_staged[name] += 1
        return keys[number % _SAMPLE :: _SAMPLE] if number else keys

    def release(self, name: str, version: int) -> None:
        """Withdraws a version; readers keep what they hold. Raises ValueError for one that is not staged."""
        with self._lock:
            staged = self._staged.get(name, {}).pop(version, None)
        if staged is None:
            raise ValueError(f"weights {name!r} version {version} are not staged here")
        self._pool.let_go(staged.slot)

    def close(self) -> None:
        """Withdraws everything; readers keep what they hold."""
        with self._lock:
            staged = [found for versions in self._staged.values() for found in versions.values()]
            self._staged.clear()
            self._offered.clear()
        for found in staged:
            self._pool.let_go(found.slot)
        self._pool.trim()

    def handle(self, request: Request) -> Any:
        """Answers "fetch", "layout", "digests" or "slices" of a version, at once or when it is staged; or "newest"."""
        if request.method == "newest":
            return self._newest.get(request.args[0], -1)
        name, version, *slices = request.args
        offered = self._offered.get((name, version))
        if offered is not None:
            if request.method == "layout":
                return offered["layout"]
            return self._slices(name, offered["weights"], *slices)

        def read(tree: Tree) -> Tree:
            if request.method == "layout":
                return tree["layout"]
            weights = decode(tree["weights"])
            if request.method == "digests":
                return {key: digest(value) for key, value in weights.items()}
            return self._slices(name, weights, *slices)

        return self._find(name, version, None if request.method == "fetch" else read)

    def _slices(
        self,
        name: str,
        weights: Mapping[str, Tree],
        slices: Sequence[tuple[str, Sequence[tuple[int, int]]]],
        base: int | None = None,
    ) -> Tree:
        """Returns slices of a version's tensors, each with its digest.

        Of a slice that has changed little since the version `base`, which the reader has, only the changes.
        """
        with self._lock:
            older = None if base is None else self._staged[name].get(base)
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

    def _find(self, name: str, version: int, read: Callable[[Tree], Tree] | None) -> "Lend | Future[Lend]":
        with self._lock:
            staged = self._staged.get(name, {}).get(version)
            if staged is not None:
                return self._lend(staged, read)
            if version <= self._newest.get(name, version - 1):
                raise self._withdrawn(name, version)
            waiting = _Awaited(version, read, Future())
            self._awaited.setdefault(name, []).append(waiting)
            return waiting.answer

    def _lend(self, staged: _Staged, read: Callable[[Tree], Tree] | None) -> Lend:
        """Returns an answer that holds the slot, before anybody can withdraw the version."""
        self._pool.hold(staged.slot)
        return Lend(*staged, self._pool.let_go, read)

    def _withdrawn(self, name: str, version: int) -> ValueError:
        staged = sorted(self._staged.get(name, ()))
        wanted = f"one of {staged}" if staged else f"one after {self._newest[name]}"
        return ValueError(f"weights {name!r} version {version} are withdrawn, want {wanted}")

    def _withdraw(self, name: str, version: int) -> None:
        """Makes room for a version: one older stays, for readers that are behind by one."""
        with self._lock:
            newest = self._newest.get(name, version - 1)
            if version <= newest:
                raise ValueError(f"weights {name!r}: got version {version}, want more than the staged {newest}")
            versions = self._staged.get(name, {})
            old = [versions.pop(stale) for stale in sorted(versions)[: 1 - _KEPT_VERSIONS]]
        for staged in old:
            self._pool.let_go(staged.slot)


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


def packed_layout(weights: Mapping[str, Tree]) -> Tree:
    """Returns where each of the arrays or shards lies, in columns: it is read once for every version, at both ends."""
    places = [_layout(value) for value in weights.values()]
    numbers = np.array([number for place in places for part in place for number in part], np.int64)
    return list(weights), np.array([len(shape) for _, shape, _ in places], np.uint8), numbers


def read_layout(packed: Tree) -> dict[str, tuple[Box, tuple[int, ...]]]:
    """Returns the box of each shard and the shape of its whole tensor; the inverse of `packed_layout`."""
    names, ndims, numbers = packed
    flat = iter(numbers.tolist())
    found = {}
    for name, ndim in zip(names, ndims.tolist(), strict=True):
        offset, shape, whole = (tuple(itertools.islice(flat, ndim)) for _ in range(3))
        found[name] = Box(offset, shape), whole
    return found


def _layout(value: Tree) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns offset, shape and shape of the whole tensor."""
    if isinstance(value, Shard):
        return value.offset, tuple(value.data.shape), value.global_shape
    if not (isinstance(value, np.ndarray) or _torch.is_tensor(value)):
        raise PayloadError(f"got a {type(value).__name__} among weights, want arrays and tensors only")
    shape = tuple(value.shape)
    return (0,) * len(shape), shape, shape


def digest(value: Tree) -> int:
    """Returns the CRC-32 of an array's elements, which finds accidents, not forgers."""
    if _torch.is_tensor(value):
        return zlib.crc32(_torch.to_bytes(value)[2].data)
    flat = np.asarray(value, order="C").reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data if flat.nbytes else b"")
