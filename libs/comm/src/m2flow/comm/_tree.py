"""Trees as tagged bytes: one tag for each value, counts before contents, arrays only described.

Every element costs at least one byte of what is read, so a count that exceeds the bytes left is a lie and is refused
before anything is made from it.
"""

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from m2flow.comm import _dtypes, _torch
from m2flow.comm._registry import rebuild, record_named, record_of
from m2flow.comm.errors import PayloadError

MAX_DEPTH = 100
# Longer strings and bytes travel beside the tree, like arrays, so that they are copied once.
INLINE_BYTES = 1024
MAX_NDIM = 32

Bytes = npt.NDArray[np.uint8]
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_ARRAY = struct.Struct("<BB")
_I64_MIN, _I64_MAX = -(1 << 63), (1 << 63) - 1


class TreeWriter:
    """Writes a tree: `out` holds its tagged bytes, `parts` the arrays beside it, each as flat bytes in tree order."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.parts: list[Bytes | bytes] = []
        self._depth = 0

    def write(self, value: Any) -> None:
        """Appends a value; raises PayloadError for one that has no encoding, or is nested too deep."""
        writer = _WRITERS.get(type(value))
        if writer is not None:
            writer(self, value)
        elif (record := record_of(type(value))) is not None:
            self.out += b"R"
            self._text(record.name)
            self.out += _U32.pack(record.check)
            self._all([getattr(value, name) for name in record.fields])
        elif _torch.is_tensor(value):
            code, shape, data = _torch.to_bytes(value)
            self.out += b"T" + _ARRAY.pack(code, len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
            self.parts.append(data)
        elif isinstance(value, np.generic):
            self._array(b"G", np.asarray(value))
        else:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise PayloadError(f"got a {name}, which has no encoding: register it, if it is a dataclass or named tuple")

    def _count(self, tag: bytes, count: int) -> None:
        self.out += tag
        self.out += _U32.pack(count)

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out += _U32.pack(len(data))
        self.out += data

    def _all(self, values: Any) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PayloadError(f"got a tree nested deeper than {MAX_DEPTH}: flatten it (does it contain itself?)")
        for value in values:
            self.write(value)
        self._depth -= 1

    def _none(self, value: None) -> None:
        self.out += b"N"

    def _bool(self, value: bool) -> None:
        self.out += b"t" if value else b"f"

    def _int(self, value: int) -> None:
        if _I64_MIN <= value <= _I64_MAX:
            self.out += b"i"
            self.out += _I64.pack(value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._count(b"I", len(data))
            self.out += data

    def _float(self, value: float) -> None:
        self.out += b"d"
        self.out += _F64.pack(value)

    def _str(self, value: str) -> None:
        self._blob(b"s", b"S", value.encode("utf-8", "surrogatepass"))

    def _bytes(self, value: bytes) -> None:
        self._blob(b"b", b"B", value)

    def _blob(self, inside: bytes, beside: bytes, data: bytes) -> None:
        if len(data) <= INLINE_BYTES:
            self._count(inside, len(data))
            self.out += data
        else:
            self.out += beside + struct.pack("<Q", len(data))
            self.parts.append(data)

    def _list(self, value: list[Any]) -> None:
        self._count(b"l", len(value))
        self._all(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        self._count(b"u", len(value))
        self._all(value)

    def _dict(self, value: dict[Any, Any]) -> None:
        self._count(b"m", len(value))
        for key, item in value.items():
            self._all((key, item))

    def _ndarray(self, value: npt.NDArray[Any]) -> None:
        self._array(b"A", value)

    def _array(self, tag: bytes, value: npt.NDArray[Any]) -> None:
        code, spelling = _dtypes.code_of(value.dtype)
        self.out += tag + _ARRAY.pack(code, value.ndim)
        if code == _dtypes.SPELT:
            self._text(spelling)
        self.out += struct.pack(f"<{value.ndim}Q", *value.shape)
        # order "C" copies only what is not already so; reshape keeps a view of what is.
        self.parts.append(np.asarray(value, order="C").reshape(-1).view(np.uint8) if value.nbytes else b"")


_WRITERS: dict[type, Callable[[TreeWriter, Any], None]] = {
    type(None): TreeWriter._none,
    bool: TreeWriter._bool,
    int: TreeWriter._int,
    float: TreeWriter._float,
    str: TreeWriter._str,
    bytes: TreeWriter._bytes,
    list: TreeWriter._list,
    tuple: TreeWriter._tuple,
    dict: TreeWriter._dict,
    np.ndarray: TreeWriter._ndarray,
}


class TreeReader:
    """Reads one tree from its tagged bytes; `next_part(size)` gives the bytes beside it, in order.

    `next_part` raises PayloadError where fewer bytes are left, before anything is made from them.
    """

    def __init__(self, data: bytes, next_part: Callable[[int], Bytes]) -> None:
        self._data = data
        self._at = 0
        self._depth = 0
        self._next_part = next_part

    def read_all(self) -> Any:
        """Returns the tree; raises PayloadError unless the bytes hold exactly one."""
        tree = self.read()
        if self._at != len(self._data):
            raise PayloadError(f"got {len(self._data) - self._at} bytes after the tree, want none")
        return tree

    def read(self) -> Any:
        """Returns the next value."""
        at = self._at
        if at >= len(self._data):
            raise PayloadError(f"got a tree of {at} bytes, want more: it is cut short")
        self._at = at + 1
        reader = _READERS.get(self._data[at])
        if reader is None:
            raise PayloadError(f"got tag {self._data[at]:#x} in a tree, want one that this version knows")
        return reader(self)

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise PayloadError(f"got a tree of {len(self._data)} bytes, want at least {self._at}: it is cut short")
        return self._data[start : self._at]

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _text(self) -> str:
        return _decode_text(self._take(self._u32()))

    def _sequence(self, count: int) -> list[Any]:
        if count > len(self._data) - self._at:
            raise PayloadError(f"got a count of {count} with {len(self._data) - self._at} bytes left")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PayloadError(f"got a tree nested deeper than {MAX_DEPTH}")
        values = [self.read() for _ in range(count)]
        self._depth -= 1
        return values

    def _none(self) -> None:
        return None

    def _true(self) -> bool:
        return True

    def _false(self) -> bool:
        return False

    def _int(self) -> int:
        return int.from_bytes(self._take(8), "little", signed=True)

    def _big_int(self) -> int:
        return int.from_bytes(self._take(self._u32()), "little", signed=True)

    def _float(self) -> float:
        return float(_F64.unpack(self._take(8))[0])

    def _str(self) -> str:
        return self._text()

    def _bytes(self) -> bytes:
        return self._take(self._u32())

    def _long_bytes(self) -> bytes:
        return self._next_part(struct.unpack("<Q", self._take(8))[0]).tobytes()

    def _long_str(self) -> str:
        return _decode_text(self._long_bytes())

    def _list(self) -> list[Any]:
        return self._sequence(self._u32())

    def _tuple(self) -> tuple[Any, ...]:
        return tuple(self._sequence(self._u32()))

    def _dict(self) -> dict[Any, Any]:
        tree: dict[Any, Any] = {}
        for _ in range(self._u32()):
            key, value = self._sequence(2)
            try:
                tree[key] = value
            except TypeError as error:
                raise PayloadError(f"got a dict key of type {type(key).__name__}: {error}") from error
        return tree

    def _record(self) -> Any:
        record = record_named(self._text(), self._u32())
        return rebuild(record, self._sequence(len(record.fields)))

    def _shape(self, ndim: int) -> tuple[int, ...]:
        if ndim > MAX_NDIM:
            raise PayloadError(f"got an array of {ndim} dims, want at most {MAX_NDIM}")
        return struct.unpack(f"<{ndim}Q", self._take(8 * ndim))

    def _array(self) -> npt.NDArray[Any]:
        code, ndim = self._take(2)
        dtype = _dtypes.dtype_of(code, self._text() if code == _dtypes.SPELT else "")
        shape = self._shape(ndim)
        data = self._next_part(math.prod(shape) * dtype.itemsize)
        try:
            array = data.view(dtype).reshape(shape) if data.size else np.empty(shape, dtype)
        except (OverflowError, ValueError) as error:
            raise PayloadError(f"got an array of shape {shape}, which numpy refuses: {error}") from error
        # What arrives may be given to another reader after this one's death, so nobody writes to it.
        array.flags.writeable = False
        return array

    def _scalar(self) -> Any:
        array = self._array()
        if array.ndim:
            raise PayloadError(f"got a scalar of {array.ndim} dims, want 0")
        return array[()]

    def _tensor(self) -> Any:
        code, ndim = self._take(2)
        item_size = _torch.item_size(code)
        shape = self._shape(ndim)
        data = self._next_part(math.prod(shape) * item_size)
        try:
            return _torch.from_bytes(code, shape, data if data.flags.writeable else data.copy())
        except (RuntimeError, TypeError) as error:
            raise PayloadError(f"got a tensor of shape {shape}, which torch refuses: {error}") from error


def _decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise PayloadError(f"got text that is not UTF-8: {error}") from error


_READERS: dict[int, Callable[[TreeReader], Any]] = {
    ord("N"): TreeReader._none,
    ord("t"): TreeReader._true,
    ord("f"): TreeReader._false,
    ord("i"): TreeReader._int,
    ord("I"): TreeReader._big_int,
    ord("d"): TreeReader._float,
    ord("s"): TreeReader._str,
    ord("S"): TreeReader._long_str,
    ord("b"): TreeReader._bytes,
    ord("B"): TreeReader._long_bytes,
    ord("l"): TreeReader._list,
    ord("u"): TreeReader._tuple,
    ord("m"): TreeReader._dict,
    ord("R"): TreeReader._record,
    ord("A"): TreeReader._array,
    ord("G"): TreeReader._scalar,
    ord("T"): TreeReader._tensor,
}

# Every tag that this version reads: what a fuzzer likes to write.
TAGS = bytes(_READERS)
