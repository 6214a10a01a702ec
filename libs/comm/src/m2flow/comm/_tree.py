"""Trees as tagged bytes: one tag for each value, counts before contents, arrays only described.

Every element costs at least one byte of what is read, so a count that exceeds the bytes left is a lie and is refused
before anything is made from it.
"""

import itertools
import math
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from m2flow.comm import _dtypes, _torch
from m2flow.comm._registry import rebuild, record_named, record_of
from m2flow.comm.errors import PayloadError

MAX_DEPTH = 100
# Longer strings and bytes travel beside the tree, like arrays, so that they are copied once.
_MAX_INSIDE_BYTES = 1024
MAX_NDIM = 32

Bytes = npt.NDArray[np.uint8]
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
# A tag and what follows it, written in one go.
_TAG_U32 = struct.Struct("<cI")
_TAG_U64 = struct.Struct("<cQ")
_TAG_I64 = struct.Struct("<cq")
_TAG_F64 = struct.Struct("<cd")
_ARRAY = struct.Struct("<BB")
# Dicts of so few and short keys have them in a table that is kept, spelt out and read: they come again and again.
_MAX_KEY = 64
_MAX_KEYS = 32


class Pickled:
    """A value that its sender wants to travel as a pickle: within one host, to an endpoint that allows it.

    It arrives as it was sent, with the value in it.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class TreeWriter:
    """Writes a tree: `out` holds its tagged bytes in pieces, `parts` the arrays beside it, each as flat bytes in order.

    A part is what holds the bytes and how many they are: bytes, an array, an encoded tree or a tensor. Nothing is
    copied here: an array is flat bytes if it is contiguous, and else as it was.
    """

    __slots__ = ("_lift", "lifted", "out", "parts", "pickles")

    def __init__(self, lift: Callable[[Any], bool] | None = None) -> None:
        self.pickles = False
        self._lift = lift
        # The tensors that travel by a way of their own, in order.
        self.lifted: list[Any] = []
        self.out: list[bytes] = []
        self.parts: list[tuple[Any, int]] = []

    def write(self, value: Any, depth: int) -> None:
        """Appends a value; raises PayloadError for one that has no encoding, or is nested too deep."""
        writer = WRITERS.get(type(value))
        if writer is not None:
            writer(self, value, depth)
        elif (record := record_of(type(value))) is not None:
            self.out.append(b"R")
            self._text(record.name)
            self.out.append(_U32.pack(record.check))
            self._all([getattr(value, name) for name in record.fields], depth)
        elif _torch.is_tensor(value):
            self._tensor(value)
        elif isinstance(value, np.generic):
            self._array(b"G", np.asarray(value))
        else:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise PayloadError(f"got a {name}, which has no encoding: register it, if it is a dataclass or named tuple")

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out += (_U32.pack(len(data)), data)

    def _all(self, values: Iterable[Any], depth: int) -> None:
        if depth == MAX_DEPTH:
            raise _too_deep()
        for value in values:
            self.write(value, depth + 1)

    def _none(self, value: None, depth: int) -> None:
        self.out.append(b"N")

    def _bool(self, value: bool, depth: int) -> None:
        self.out.append(b"t" if value else b"f")

    def _int(self, value: int, depth: int) -> None:
        try:
            self.out.append(_TAG_I64.pack(b"i", value))
        except struct.error:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += (_TAG_U32.pack(b"I", len(data)), data)

    def _float(self, value: float, depth: int) -> None:
        self.out.append(_TAG_F64.pack(b"d", value))

    def _str(self, value: str, depth: int) -> None:
        self._blob(b"s", b"S", value.encode("utf-8", "surrogatepass"))

    def _bytes(self, value: bytes, depth: int) -> None:
        self._blob(b"b", b"B", value)

    def _blob(self, inside: bytes, beside: bytes, data: bytes) -> None:
        if len(data) <= _MAX_INSIDE_BYTES:
            self.out += (_TAG_U32.pack(inside, len(data)), data)
        else:
            self._beside(beside, data)

    def _list(self, value: list[Any], depth: int) -> None:
        self.out.append(_TAG_U32.pack(b"l", len(value)))
        self._all(value, depth)

    def _tuple(self, value: tuple[Any, ...], depth: int) -> None:
        self.out.append(_TAG_U32.pack(b"u", len(value)))
        self._all(value, depth)

    def _dict(self, value: dict[Any, Any], depth: int) -> None:
        if depth == MAX_DEPTH:
            raise _too_deep()
        if len(value) > _MAX_KEYS:
            self._pairs(value, depth)
            return
        add = self.out.append
        try:
            add(_keys(*value))
        except ValueError:
            self._pairs(value, depth)
            return
        for item in value.values():
            # What most items are made of is written in line: a call costs as much as the value.
            kind = type(item)
            if kind is int:
                try:
                    add(_TAG_I64.pack(b"i", item))
                except struct.error:
                    self._int(item, depth)
            elif kind is float:
                add(_TAG_F64.pack(b"d", item))
            elif kind is bytes and len(item) <= _MAX_INSIDE_BYTES:
                add(_TAG_U32.pack(b"b", len(item)))
                add(item)
            elif kind is str:
                self._str(item, depth)
            else:
                self.write(item, depth + 1)

    def _pairs(self, value: dict[Any, Any], depth: int) -> None:
        self.out.append(_TAG_U32.pack(b"m", len(value)))
        self._all(itertools.chain.from_iterable(value.items()), depth)

    def _tensor(self, value: Any) -> None:
        if self._lift is not None and self._lift(value):
            self.out.append(_TAG_U32.pack(b"L", len(self.lifted)))
            self.lifted.append(value)
            return
        code, shape = _torch.code_of(value), value.shape
        self.out.append(struct.pack(f"<cBB{len(shape)}Q", b"T", code, len(shape), *shape))
        self.parts.append((value, int(value.nbytes)))

    def _pickled(self, value: Pickled, depth: int) -> None:
        try:
            data = pickle.dumps(value.value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise PayloadError(f"got a {type(value.value).__qualname__} that pickle refuses: {error}") from error
        self.pickles = True
        self._beside(b"P", data)

    def _ndarray(self, value: npt.NDArray[Any], depth: int) -> None:
        self._array(b"A", value)

    def _array(self, tag: bytes, value: npt.NDArray[Any]) -> None:
        code, spelling = _dtypes.code_of(value.dtype)
        _check_ndim(value.ndim)
        self.out += (tag, _ARRAY.pack(code, value.ndim))
        if code == _dtypes.SPELT:
            self._text(spelling)
        self.out.append(struct.pack(f"<{value.ndim}Q", *value.shape))
        part: Any = value if value.nbytes else b""
        if value.nbytes and value.flags.c_contiguous:
            part = value.reshape(-1).view(np.uint8)
        self.parts.append((part, value.nbytes))

    def nested(self, value: Any, depth: int) -> None:
        """Appends an encoded tree, which is not decoded with this one."""
        self.pickles |= value.pickles
        self._beside(b"E", value)

    def _beside(self, tag: bytes, part: Any) -> None:
        self.out.append(_TAG_U64.pack(tag, len(part)))
        self.parts.append((part, len(part)))


# By their types too: a key may equal one of another type.
@lru_cache(maxsize=1024, typed=True)
def _keys(*keys: Any) -> bytes:
    """Returns the short keys of a dict as the tree spells them: once for all items of one structure.

    Raises ValueError for others, so that they are not kept: prompts may be keys too.
    """
    if not all(type(key) is str and len(key) <= _MAX_KEY for key in keys):
        raise ValueError
    spelt = [key.encode("utf-8", "surrogatepass") for key in keys]
    table = b"".join(_U32.pack(len(data)) + data for data in spelt)
    return _TAG_U32.pack(b"k", len(table)) + table


WRITERS: dict[type, Callable[[TreeWriter, Any, int], None]] = {
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
    Pickled: TreeWriter._pickled,
}
# What has an encoding whatever its value is.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def check(value: Any, depth: int = 0) -> None:
    """Raises PayloadError for what `TreeWriter` refuses, without writing it; `depth` is how deep in a tree it lies."""
    kind = type(value)
    inside: Iterable[Any]
    if kind is dict:
        inside = itertools.chain.from_iterable(value.items())
    elif kind is list or kind is tuple:
        inside = value
    elif (record := record_of(kind)) is not None:
        inside = [getattr(value, name) for name in record.fields]
    elif kind is np.ndarray:
        _dtypes.code_of(value.dtype)
        _check_ndim(value.ndim)
        return
    else:
        # What a tensor or a pickle must be is said once, where it is written.
        TreeWriter().write(value, 0)
        return
    if depth == MAX_DEPTH:
        raise _too_deep()
    for each in inside:
        # In line: a call costs more than the look.
        if type(each) not in _PLAIN:
            check(each, depth + 1)


def _check_ndim(ndim: int) -> None:
    if ndim > MAX_NDIM:
        raise PayloadError(f"got an array of {ndim} dims, want at most {MAX_NDIM}: reshape it")


def _too_deep() -> PayloadError:
    return PayloadError(f"got a tree nested deeper than {MAX_DEPTH}: flatten it (does it contain itself?)")


class TreeReader:
    """Reads trees from tagged bytes; `next_part(size)` gives the bytes beside the one that is read, in order.

    `next_part` raises PayloadError where fewer bytes are left, before anything is made from them. What is being read is
    passed along, with the position and the depth in it: nothing is kept here, and a reader serves any number of trees,
    on any number of threads. The common tags are read in line, as this is the path of every item.
    """

    __slots__ = ("_device", "_lifted", "_next_part", "_unpickles")

    def __init__(
        self,
        next_part: Callable[[int], Bytes],
        *,
        unpickles: bool,
        lifted: Sequence[Any] = (),
        device: str | None = None,
    ) -> None:
        self._unpickles = unpickles
        self._device = device
        self._lifted = lifted
        self._next_part = next_part

    def read(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        """Returns the value at a position, and the position after it.

        Raises PayloadError for what no writer writes; struct.error or IndexError where the bytes end in its midst.
        """
        tag = data[at]
        if tag == _KEYED:
            return self._keyed(data, at + 1, depth)
        if tag == _STR:
            text, at = _take(data, at + 1)
            return _decode_text(text), at
        if tag == _INT:
            return _I64.unpack_from(data, at + 1)[0], at + 9
        if tag == _FLOAT:
            return _F64.unpack_from(data, at + 1)[0], at + 9
        reader = _READERS.get(tag)
        if reader is None:
            raise PayloadError(f"got tag {tag:#x} in a tree, want one that this version knows")
        return reader(self, data, at + 1, depth)

    def _none(self, data: bytes, at: int, depth: int) -> tuple[None, int]:
        return None, at

    def _true(self, data: bytes, at: int, depth: int) -> tuple[bool, int]:
        return True, at

    def _false(self, data: bytes, at: int, depth: int) -> tuple[bool, int]:
        return False, at

    def _big_int(self, data: bytes, at: int, depth: int) -> tuple[int, int]:
        digits, end = _take(data, at)
        return int.from_bytes(digits, "little", signed=True), end

    def _bytes(self, data: bytes, at: int, depth: int) -> tuple[bytes, int]:
        return _take(data, at)

    def _beside(self, data: bytes, at: int) -> Bytes:
        return self._next_part(_U64.unpack_from(data, at)[0])

    def _long_bytes(self, data: bytes, at: int, depth: int) -> tuple[bytes, int]:
        return self._beside(data, at).tobytes(), at + 8

    def _long_str(self, data: bytes, at: int, depth: int) -> tuple[str, int]:
        return _decode_text(self._beside(data, at).tobytes()), at + 8

    def _nested(self, data: bytes, at: int, depth: int) -> tuple[Bytes, int]:
        return self._beside(data, at), at + 8

    def _pickled(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        if not self._unpickles:
            raise PayloadError("got a pickle, which this end does not take: allow_pickle=True takes those of one host")
        pickled = self._beside(data, at)
        try:
            return Pickled(pickle.loads(pickled.tobytes())), at + 8
        except Exception as error:
            raise PayloadError(f"got a pickle that cannot be read here: {error}") from error

    def _list(self, data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
        read, values = self.read, []
        count, at = _count(data, at, depth)
        for _ in range(count):
            value, at = read(data, at, depth + 1)
            values.append(value)
        return values, at

    def _tuple(self, data: bytes, at: int, depth: int) -> tuple[tuple[Any, ...], int]:
        values, at = self._list(data, at, depth)
        return tuple(values), at

    def _dict(self, data: bytes, at: int, depth: int) -> tuple[dict[Any, Any], int]:
        read = self.read
        tree: dict[Any, Any] = {}
        count, at = _count(data, at, depth)
        for _ in range(count):
            key, at = read(data, at, depth + 1)
            value, at = read(data, at, depth + 1)
            try:
                tree[key] = value
            except TypeError as error:
                raise PayloadError(f"got a dict key of type {type(key).__name__}: {error}") from error
        return tree, at

    def _keyed(self, data: bytes, at: int, depth: int) -> tuple[dict[str, Any], int]:
        if depth == MAX_DEPTH:
            raise _too_deep_to_read()
        start = at + 4
        at = start + _U32.unpack_from(data, at)[0]
        tree: dict[str, Any] = {}
        for key in _decode_keys(data[start:at]):
            tag = data[at]
            if tag == _INT:
                tree[key] = _I64.unpack_from(data, at + 1)[0]
                at += 9
            elif tag in _TEXTS:
                start = at + 5
                at = start + _U32.unpack_from(data, at + 1)[0]
                found = data[start:at]
                tree[key] = found if tag == _BYTES else _decode_text(found)
            else:
                tree[key], at = self.read(data, at, depth + 1)
        if at > len(data):
            raise _cut_short(at, data)
        return tree, at

    def _record(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        if depth == MAX_DEPTH:
            raise _too_deep_to_read()
        name, at = _take(data, at)
        record = record_named(_decode_text(name), _U32.unpack_from(data, at)[0])
        read, values = self.read, []
        at += 4
        for _ in record.fields:
            value, at = read(data, at, depth + 1)
            values.append(value)
        return rebuild(record, values), at

    def _array(self, data: bytes, at: int, depth: int) -> tuple[npt.NDArray[Any], int]:
        code, ndim = _ARRAY.unpack_from(data, at)
        spelling, at = _take(data, at + 2) if code == _dtypes.SPELT else (b"", at + 2)
        dtype = _dtypes.dtype_of(code, _decode_text(spelling))
        shape, at = _shape(data, at, ndim)
        part = self._next_part(math.prod(shape) * dtype.itemsize)
        try:
            array = part.view(dtype).reshape(shape) if part.size else np.empty(shape, dtype)
        except (OverflowError, ValueError) as error:
            raise PayloadError(f"got an array of shape {shape}, which numpy refuses: {error}") from error
        # What arrives may be given to another reader after this one's death, so nobody writes to it.
        array.flags.writeable = False
        return array, at

    def _scalar(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        array, at = self._array(data, at, depth)
        if array.ndim:
            raise PayloadError(f"got a scalar of {array.ndim} dims, want 0")
        return array[()], at

    def _tensor(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        code, ndim = _ARRAY.unpack_from(data, at)
        item_size = _torch.item_size(code)
        shape, at = _shape(data, at + 2, ndim)
        part = self._next_part(math.prod(shape) * item_size)
        try:
            tensor = _torch.from_bytes(code, shape, part if part.flags.writeable else part.copy())
            return (tensor if self._device is None else tensor.to(self._device)), at
        except (RuntimeError, TypeError) as error:
            raise PayloadError(f"got a tensor of shape {shape}, which torch refuses: {error}") from error

    def _lift(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        number = _U32.unpack_from(data, at)[0]
        if number >= len(self._lifted):
            raise PayloadError(f"got tensor {number} of those beside the payload, want less than {len(self._lifted)}")
        return self._lifted[number], at + 4


def _take(data: bytes, at: int) -> tuple[bytes, int]:
    """Returns the bytes whose count stands at a position, and the position after them."""
    start = at + 4
    end = start + _U32.unpack_from(data, at)[0]
    if end > len(data):
        raise _cut_short(end, data)
    return data[start:end], end


def _cut_short(end: int, data: bytes) -> PayloadError:
    return PayloadError(f"got a tree that ends {end - len(data)} bytes early: it is cut short")


def _count(data: bytes, at: int, depth: int) -> tuple[int, int]:
    """Returns how many values follow, and where they begin; they lie one deeper."""
    count, at = int(_U32.unpack_from(data, at)[0]), at + 4
    if count > len(data) - at:
        raise PayloadError(f"got a count of {count} with {len(data) - at} bytes left")
    if depth == MAX_DEPTH:
        raise _too_deep_to_read()
    return count, at


def _too_deep_to_read() -> PayloadError:
    return PayloadError(f"got a tree nested deeper than {MAX_DEPTH}")


def _shape(data: bytes, at: int, ndim: int) -> tuple[tuple[int, ...], int]:
    _check_ndim(ndim)
    return struct.unpack_from(f"<{ndim}Q", data, at), at + 8 * ndim


def _decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise PayloadError(f"got text that is not UTF-8: {error}") from error


@lru_cache(maxsize=1024)
def _decode_keys(table: bytes) -> tuple[str, ...]:
    """Returns the keys that a table holds; raises PayloadError for one that no writer writes."""
    keys: list[str] = []
    at = 0
    while at < len(table):
        size = _U32.unpack_from(table, at)[0]
        end = at + 4 + size
        if end > len(table) or size > 4 * _MAX_KEY or len(keys) == _MAX_KEYS:
            raise PayloadError(f"got a table of keys of {len(table)} bytes, want at most {_MAX_KEYS} short ones")
        keys.append(_decode_text(table[at + 4 : end]))
        at = end
    return tuple(keys)


_KEYED, _STR, _INT, _FLOAT, _BYTES = b"ksidb"
_TEXTS = bytes((_BYTES, _STR))
_READERS: dict[int, Callable[[TreeReader, bytes, int, int], tuple[Any, int]]] = {
    ord("N"): TreeReader._none,
    ord("t"): TreeReader._true,
    ord("f"): TreeReader._false,
    ord("I"): TreeReader._big_int,
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
    ord("P"): TreeReader._pickled,
    ord("E"): TreeReader._nested,
    ord("L"): TreeReader._lift,
}

# Every tag that this version reads: what a fuzzer likes to write.
TAGS = bytes((_KEYED, _STR, _INT, _FLOAT, *_READERS))
