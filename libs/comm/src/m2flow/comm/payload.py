"""Payloads: any tree of plain values and arrays as bytes, and back, without pickle.

A payload is one run of bytes: a header, the tree and a check of both, then each array at a multiple of 64 bytes, so
that the reader's arrays lie on the bytes themselves. The same run travels in a message or lies in shared memory.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from m2flow.comm import _torch
from m2flow.comm._copying import copier
from m2flow.comm._registry import register
from m2flow.comm._tree import WRITERS, Bytes, Pickled, TreeReader, TreeWriter
from m2flow.comm.errors import PayloadError

__all__ = ["MAX_PAYLOAD_BYTES", "Encoded", "Pickled", "Tree", "decode", "encode", "has_pickle", "register"]

# dict, list, tuple, registered dataclass or named tuple, None, str, bytes, bool, int, float, numpy array, torch tensor;
# and what `Pickled` names.
Tree = Any
MAX_PAYLOAD_BYTES = 1 << 40

# Magic, layout, bytes of the tree, bytes of the whole.
_HEADER = struct.Struct("<HHIQ")
_CHECK_BYTES = 4
# What is around a tree.
_AROUND_BYTES = _HEADER.size + _CHECK_BYTES
# The CRC-32 of any bytes that end with their own CRC-32.
_CHECKED = 0x2144DF1C
_MAGIC = 0x326D
_LAYOUT = 3
# The same with pickles in it: said in the header, so that it can be refused without reading the tree.
_LAYOUT_WITH_PICKLE = 4
_ALIGN = 64


class Encoded(TreeWriter):
    """A tree ready to be written: its structure is bytes already, its arrays still lie where they were.

    In another tree it travels as its bytes, uint8 of shape [size_bytes], for a reader who decodes them when it likes.
    """

    __slots__ = ("head", "size_bytes")

    # The header, the tree and their check.
    head: bytes
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes

    @property
    def from_gpu(self) -> bool:
        """Says whether any array of it has yet to come from a GPU."""
        return any(
            part.from_gpu if isinstance(part, Encoded) else _torch.is_tensor(part) and _torch.on_gpu(part)
            for part, _ in self.parts
        )

    def to_bytes(self) -> bytes:
        """Returns the payload as one bytes object."""
        if not self.parts:
            return self.head
        if self.from_gpu:
            whole = np.empty(self.size_bytes, np.uint8)
            self.write_into(whole)
            return whole.tobytes()
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes | bytearray | memoryview]:
        yield self.head
        at = len(self.head)
        for part, size in self.parts:
            yield bytes(_aligned(at) - at)
            at = _aligned(at) + size
            if isinstance(part, Encoded):
                yield from part._pieces()
            elif isinstance(part, bytes):
                yield part
            elif isinstance(part, np.ndarray):
                yield part.data if part.flags.c_contiguous else part.tobytes()
            else:
                yield _torch.raw(part).data

    def places(self) -> "list[Place]":
        """Returns where the arrays, long strings and so on lie within the payload."""
        found, at = [], len(self.head)
        for _, size in self.parts:
            found.append(Place(_aligned(at), size))
            at = sum(found[-1])
        return found

    def last_array(self) -> "LastArray | None":
        """Returns where its last array lies; None where that is not in order in the memory of this host."""
        address = _torch.address(self.parts[-1][0]) if self.parts else 0
        return LastArray(self.size_bytes - self.parts[-1][1], address) if address else None

    def write_into(self, target: Bytes) -> None:
        """Writes the payload to `target`, shape [size_bytes] uint8, copying each array once. Blocks while it copies.

        An array that lies at its place in `target` already stays as it is.
        """
        # Copies by address would go beyond it.
        assert target.nbytes == self.size_bytes
        assert target.flags.c_contiguous
        copy, address = copier(target.nbytes), target.ctypes.data
        at = len(self.head)
        target[:at] = np.frombuffer(self.head, np.uint8)
        for (part, _), (start, size) in zip(self.parts, self.places(), strict=True):
            if start > at:
                # What is recycled memory must not leak between the parts: padding is part of the payload.
                target[at:start] = 0
            at = start + size
            if found := _torch.address(part):
                if found != address + start:
                    copy(address + start, found, size)
            elif isinstance(part, np.ndarray):
                target[start:at].view(part.dtype).reshape(part.shape)[...] = part
            elif isinstance(part, Encoded):
                part.write_into(target[start:at])
            elif isinstance(part, bytes):
                target[start:at] = np.frombuffer(part, np.uint8)
            else:
                _torch.copy_into(part, target[start:at])


WRITERS[Encoded] = TreeWriter.nested


def encode(tree: Tree, *, lift: Callable[[Any], bool] | None = None) -> Encoded:
    """Returns a tree made ready to be written; no array is copied yet.

    A tensor for which `lift` says True is left out, for the caller to bring by a way of its own: see `lifted`. Raises
    PayloadError, naming the type, for a value that has no encoding. Does not block.
    """
    encoded = Encoded(lift)
    encoded.write(tree, 0)
    spelt = b"".join(encoded.out)
    encoded.out.clear()
    size = len(spelt) + _AROUND_BYTES
    # Each part begins at a multiple of 64.
    for _, nbytes in encoded.parts:
        size = _aligned(size) + nbytes
    layout = _LAYOUT_WITH_PICKLE if encoded.pickles else _LAYOUT
    head = _HEADER.pack(_MAGIC, layout, len(spelt), size) + spelt
    encoded.head = head + zlib.crc32(head).to_bytes(_CHECK_BYTES, "little")
    encoded.size_bytes = size
    return encoded


def has_pickle(data: bytes | Bytes) -> bool:
    """Says whether a payload's header admits pickles: one whose header does not is refused when it holds any."""
    return len(data) >= _HEADER.size and int.from_bytes(data[2:4], "little") != _LAYOUT


class LastArray(NamedTuple):
    """Where an array begins in its payload, and where it is in memory."""

    start: int
    address: int


class Place(NamedTuple):
    """Where the bytes of an array lie within its payload."""

    offset_bytes: int
    size_bytes: int


def structure(data: bytes | Bytes) -> bytes:
    """Returns what comes before the arrays of a payload: what is equal here has its arrays in equal places."""
    tree_bytes = int.from_bytes(data[4:8], "little")
    return bytes(data[: _AROUND_BYTES + tree_bytes])


def decode(
    data: bytes | Bytes,
    *,
    max_size_bytes: int = MAX_PAYLOAD_BYTES,
    allow_pickle: bool = False,
    lifted: Sequence[Any] = (),
    device: str | None = None,
    places: list[Place] | None = None,
) -> Tree:
    """Returns the tree of a payload; its arrays lie on `data` without a copy and numpy's are read-only.

    `data` is the payload's bytes, or a uint8 array of shape [size_bytes] over them. Tensors over immutable bytes are
    copied once, as torch has no read-only tensors. Raises PayloadError for bytes that are cut, altered in the header or
    the tree, or more than `max_size_bytes`; nothing is allocated before sizes are checked. A pickle, which can run
    anything, is refused unless the caller trusts where the bytes come from and says `allow_pickle`. `lifted` are the
    tensors that `encode` left out; all others are moved to `device`, such as "cuda:0", where one is given. `places` is
    extended by the place of each array, long string and so on, in the tree's order. Does not block but for `device`.
    """
    size = len(data)
    if not _AROUND_BYTES <= size <= max_size_bytes:
        raise PayloadError(f"got a payload of {size} bytes, want {_AROUND_BYTES} to {max_size_bytes}")
    magic, layout, tree_bytes, total = _HEADER.unpack_from(data if isinstance(data, bytes) else data.data)
    if magic != _MAGIC or layout not in (_LAYOUT, _LAYOUT_WITH_PICKLE):
        wanted = f"{_MAGIC:#x} layout {_LAYOUT}"
        raise PayloadError(f"got magic {magic:#x} layout {layout}, want {wanted}: no payload of this version")
    head_end = _AROUND_BYTES + tree_bytes
    if total != size or head_end > size:
        raise PayloadError(f"got {size} bytes, want the {total} that the header says: the payload is cut or altered")
    # A copy of what others may write to: what was checked is what is read.
    head = data if isinstance(data, bytes) and head_end == size else bytes(data[:head_end])
    if zlib.crc32(head) != _CHECKED:
        raise PayloadError("got a tree that does not match its check: the payload was altered")
    reader, parts = _TREE_ALONE, None
    if head_end < size or lifted or device is not None or places is not None:
        parts = _Parts(data, head_end, places)
        unpickles = allow_pickle and layout == _LAYOUT_WITH_PICKLE
        reader = TreeReader(parts.take, unpickles=unpickles, lifted=lifted, device=device)
    try:
        tree, end = reader.read(head, _HEADER.size, 0)
    except (struct.error, IndexError) as error:
        raise PayloadError(f"got a tree of {tree_bytes} bytes that is cut short: {error}") from error
    if end != _HEADER.size + tree_bytes:
        raise PayloadError(f"got a tree that ends after {end - _HEADER.size} bytes, want {tree_bytes}")
    if parts is not None and parts.at != size:
        raise PayloadError(f"got {size} bytes, want the {parts.at} up to the end of the last array")
    return tree


class _Parts:
    """Hands out the arrays' bytes in order, never past the end."""

    def __init__(self, data: bytes | Bytes, at: int, places: list[Place] | None) -> None:
        self._data = data
        self._root: Bytes | None = None
        self.at = at
        self._places = places

    def take(self, size: int) -> Bytes:
        start = _aligned(self.at)
        if size > len(self._data) - start and size:
            raise PayloadError(f"got an array of {size} bytes with {max(0, len(self._data) - start)} left")
        if self._root is None:
            self._root = np.frombuffer(self._data, np.uint8) if isinstance(self._data, bytes) else self._data
        self.at = start + size
        if self._places is not None:
            self._places.append(Place(start, size))
        return self._root[start : self.at]


def _no_part(size: int) -> Bytes:
    """Stands for the parts of a payload that is all tree."""
    if size:
        raise PayloadError(f"got an array of {size} bytes with 0 left")
    return np.empty(0, np.uint8)


# Serves every payload that is all tree.
_TREE_ALONE = TreeReader(_no_part, unpickles=False)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
