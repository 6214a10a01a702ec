"""Payloads: what goes in comes out, and what is no payload is refused."""

import collections
import dataclasses
import math
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from m2flow.comm import PayloadError, Pickled, _torch, _tree, decode, encode, register
from m2flow.comm._tree import check
from m2flow.comm.payload import Place

# The header before the tree and the check after it.
AROUND_BYTES = 20


@register
@dataclass(frozen=True)
class Step:
    index: int
    fields: Mapping[str, Any]
    parents: tuple["Step", ...] = ()


@register
class Pair(NamedTuple):
    left: Any
    right: Any


def same(a: Any, b: Any) -> bool:
    """Says whether two trees are equal in type and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(_torch.bytes_of(a).tobytes() == _torch.bytes_of(b).tobytes())
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Step):
        return same((a.index, a.fields, a.parents), (b.index, b.fields, b.parents))
    return bool(a == b)


def round_trip(tree: Any) -> Any:
    return decode(encode(tree).to_bytes())


numpy_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.unicode_string_dtypes(min_len=1, max_len=5),
    hnp.byte_string_dtypes(min_len=1, max_len=5),
)
arrays = numpy_dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
keys = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.binary(min_size=1025, max_size=1100)
    | arrays
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Pair, inner, inner)
        | st.builds(Step, st.integers(), st.dictionaries(st.text(max_size=3), inner, max_size=2))
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=100, deadline=None)
def test_any_tree_round_trips(tree: Any) -> None:
    assert same(round_trip(tree), tree)


def refusal(of: Callable[[Any], Any], tree: Any) -> str:
    """Says what a tree is refused with; empty where it is not."""
    try:
        of(tree)
    except PayloadError as error:
        return str(error)
    return ""


@given(trees)
@settings(max_examples=30, deadline=None)
def test_what_is_encoded_passes_the_check(tree: Any) -> None:
    assert refusal(encode, tree) == refusal(check, tree) == ""


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = (leaf,)
    return leaf


@pytest.mark.parametrize(
    "wrong",
    [
        object(),
        {1},
        Step,
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        Pickled(lambda: 1),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_is_not_encoded_is_refused_by_the_check_in_the_same_words(wrong: Any) -> None:
    for tree in (wrong, [wrong], {"a": (1, wrong)}, {(1, 2): wrong}, Pair(1, wrong), nested(100, wrong)):
        assert refusal(check, tree) == refusal(encode, tree) != ""


@pytest.mark.parametrize("leaf", [1, (), {}, np.zeros(2), Pair(1, 2)], ids=lambda leaf: type(leaf).__name__)
def test_the_check_allows_the_depth_that_the_writer_does(leaf: Any) -> None:
    for depth in (99, 100, 101):
        assert refusal(check, nested(depth, leaf)) == refusal(encode, nested(depth, leaf))
    assert refusal(check, nested(101, leaf))
    endless: list[Any] = []
    endless += [endless, endless]
    assert refusal(check, endless) == refusal(encode, endless) != ""


@given(trees, st.data())
@settings(max_examples=100, deadline=None)
def test_altered_or_cut_bytes_are_refused_or_decode(tree: Any, data: st.DataObject) -> None:
    whole = bytearray(encode(tree).to_bytes())
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
        with pytest.raises(PayloadError):
            decode(bytes(whole))
        return
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    arrays_at = AROUND_BYTES + struct.unpack_from("<I", encode(tree).to_bytes(), 4)[0]
    if at >= arrays_at:
        decode(bytes(whole))  # an array's element, or padding: as valid as any other
        return
    with pytest.raises(PayloadError):
        decode(bytes(whole))


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes_as_a_tree_are_refused_or_decode(tree: bytes) -> None:
    try:
        decode(crafted(tree))
    except PayloadError:
        return


@pytest.mark.parametrize(
    "keys",
    [(1,), (True,), (1.0,), ("1",), (b"1",), ("a", 1), ("x" * 65,), ("\ud800",), tuple(map(str, range(33))), ()],
    ids=repr,
)
def test_keys_come_back_as_they_were_whatever_was_sent_before(keys: tuple[Any, ...]) -> None:
    for _ in range(2):
        found = decode(encode({key: [7, 2.5, b"b", {}] for key in keys}).to_bytes())
        assert [(type(key), key) for key in found] == [(type(key), key) for key in keys]
        assert list(found.values()) == [[7, 2.5, b"b", {}]] * len(keys)


# Every dtype of the installed torch, which has more than one name for some.
TORCH_DTYPES = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in TORCH_DTYPES if str(dtype).startswith("torch.q")]


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused_in_words(dtype: torch.dtype) -> None:
    tensor = torch.empty(2, dtype=dtype)
    assert tensor.is_quantized
    for refuse in (encode, check):
        with pytest.raises(PayloadError, match=r"got a quantized tensor, want its numbers: call dequantize\(\)"):
            refuse([tensor])


@pytest.mark.parametrize("dtype", sorted(set(TORCH_DTYPES) - set(QUANTIZED), key=str), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_other_torch_dtype_and_form_round_trips(dtype: torch.dtype) -> None:
    raw = np.random.default_rng(0).integers(0, 2 if dtype is torch.bool else 256, 24 * 16, np.uint8)
    full, elements = torch.from_numpy(raw).view(dtype).reshape(4, -1), raw.view(f"V{dtype.itemsize}").reshape(4, -1)
    forms: list[Callable[[Any], Any]] = [
        lambda x: x,
        lambda x: x[0, 0],
        lambda x: x[:0],
        lambda x: x[:0].T,
        lambda x: x.T,
        lambda x: x[1:3, ::2],
        lambda x: x[None],
    ]
    for form in forms:
        tensor, wanted = form(full), form(elements).tobytes()
        encoded = encode({"x": tensor})
        written = np.empty(encoded.size_bytes, np.uint8)
        encoded.write_into(written)
        for found in (decode(encoded.to_bytes())["x"], decode(written)["x"]):
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert bytes(found.reshape(-1).view(torch.uint8).tolist() if wanted else b"") == wanted


def test_tensors_that_go_by_a_way_of_their_own_are_put_back_in_their_places() -> None:
    own, other = torch.ones(3, dtype=torch.float64), torch.ones(2)
    encoded = encode([other, {"own": own}, Pair(own, 1)], lift=lambda tensor: tensor.dtype is torch.float64)
    assert [tensor is own for tensor in encoded.lifted] == [True, True]
    arrived = decode(encoded.to_bytes(), lifted=["first", "second"])
    assert same(arrived, [other, {"own": "first"}, Pair("second", 1)])
    with pytest.raises(PayloadError, match="got tensor 1 of those beside the payload, want less than 1"):
        decode(encoded.to_bytes(), lifted=["first"])


def test_a_parameter_arrives_as_a_plain_tensor() -> None:
    arrived = round_trip(torch.nn.Parameter(torch.ones(2)))
    assert type(arrived) is torch.Tensor
    assert not arrived.requires_grad


def test_numpy_views_and_orders_round_trip() -> None:
    base = np.arange(24, dtype=np.int16).reshape(4, 6)
    for view in (base.T, base[::2, 1::3], np.asfortranarray(base), base[:, :0], np.array(5)):
        assert same(round_trip(view), np.ascontiguousarray(view).reshape(view.shape))


def test_numpy_arrays_arrive_in_place_and_read_only() -> None:
    payload = encode(np.arange(1000)).to_bytes()
    array = decode(payload)
    assert np.shares_memory(array, np.frombuffer(payload, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@dataclass
class Unregistered:
    x: int = 0


class Odd(np.ndarray[Any, Any]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        Unregistered(),
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        np.zeros(3).view(Odd),
        torch.eye(3).to_sparse(),
        torch.zeros(2, device="meta"),
        range(3),
        bytearray(b"x"),
        1j,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_encoding_is_refused_by_name(value: Any) -> None:
    with pytest.raises(PayloadError, match="got a"):
        encode({"a": [value]})


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(PayloadError, match="nested deeper"):
        encode(tree)


def crafted(tree: bytes) -> bytes:
    header = struct.pack("<HHIQ", 0x326D, 3, len(tree), AROUND_BYTES + len(tree))
    return header + tree + zlib.crc32(header + tree).to_bytes(4, "little")


@pytest.mark.parametrize(
    "tree",
    [
        b"l" + struct.pack("<I", 1 << 31),
        b"m" + struct.pack("<I", 1 << 31),
        b"k" + struct.pack("<I", 1 << 31),
        b"k" + struct.pack("<II", 8, 1 << 31) + b"keys",
        b"k" + struct.pack("<II", 5, 1) + b"k",
        b"k" + struct.pack("<II", 304, 300) + b"k" * 300 + b"N",
        b"k" + struct.pack("<I", 5 * 33) + (struct.pack("<I", 1) + b"k") * 33 + b"N" * 33,
        b"B" + struct.pack("<Q", 1 << 60),
        b"A" + bytes([2, 2]) + struct.pack("<QQ", 1 << 40, 1 << 40),
        b"A" + bytes([2, 2]) + struct.pack("<QQ", 0, (1 << 64) - 1),
        b"T" + bytes([2, 2]) + struct.pack("<QQ", 0, (1 << 64) - 1),
        b"A" + bytes([0, 1]) + struct.pack("<I", 3) + b"<U0" + struct.pack("<Q", 1 << 40),
        b"l\x01\x00\x00\x00" * 1000 + b"N",
        b"R" + struct.pack("<I", 9) + b"os:system" + bytes(4),
    ],
    ids=[
        "list",
        "dict",
        "keys",
        "key",
        "cut keys",
        "long key",
        "many keys",
        "bytes",
        "array",
        "empty array",
        "empty tensor",
        "zero-width",
        "deep",
        "foreign class",
    ],
)
def test_a_lie_about_sizes_is_refused_before_memory_is_made(tree: bytes) -> None:
    with pytest.raises(PayloadError):
        decode(crafted(tree))


def test_a_size_limit_is_kept() -> None:
    payload = encode(np.zeros(1000, np.uint8)).to_bytes()
    with pytest.raises(PayloadError, match="want 20 to 500"):
        decode(payload, max_size_bytes=500)


def test_a_class_with_other_fields_at_the_other_end_is_refused() -> None:
    payload = encode(Pair(1, 2)).to_bytes()

    class Pair_(NamedTuple):
        left: Any
        middle: Any

    Pair_.__qualname__, Pair_.__module__ = Pair.__qualname__, Pair.__module__
    register(Pair_)
    try:
        with pytest.raises(PayloadError, match="other fields"):
            decode(payload)
    finally:
        register(Pair)


def made_dataclass(kinds: list[str], *, frozen: bool, slots: bool, num_inherited: int, changes: str) -> type:
    """Returns a dataclass of int fields, one of each kind; the first so many are its base's."""
    fields: list[Any] = []
    for number, kind in enumerate(kinds):
        options: dict[str, Any] = {
            "plain": {},
            "default": {"default": 5},
            "factory": {"default_factory": lambda: 6},
            "no init": {"init": False, "default": 7},
            "by name": {"kw_only": True},
            "init only": {"default": 8},
            "of the class": {"default": 9},
        }[kind]
        annotation: Any = {"init only": dataclasses.InitVar[int], "of the class": ClassVar[int]}.get(kind, int)
        fields.append((f"f{number}", annotation, dataclasses.field(**options)))

    def __post_init__(self: Any, *_: int) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, value + 1 if changes == "anew" else int(str(value)))

    namespace = {"__post_init__": __post_init__} if changes != "nothing" else {}
    base = dataclasses.make_dataclass("Base", fields[:num_inherited], frozen=frozen, slots=slots)
    return dataclasses.make_dataclass(
        "Made", fields[num_inherited:], bases=(base,), namespace=namespace, frozen=frozen, slots=slots
    )


kinds = st.sampled_from(["plain", "default", "factory", "no init", "by name", "init only", "of the class"])


@given(
    # A field without a default follows none that has one.
    st.lists(kinds, max_size=4).map(lambda drawn: sorted(drawn, key=lambda kind: kind != "plain")),
    st.fixed_dictionaries(
        {
            "frozen": st.booleans(),
            "slots": st.booleans(),
            "num_inherited": st.integers(0, 2),
            "changes": st.sampled_from(["nothing", "into equals", "anew"]),
        }
    ),
    st.lists(st.integers(1000, 1 << 40), min_size=4, max_size=4),
)
def test_a_dataclass_is_refused_or_arrives_as_it_was(kinds: list[str], how: Any, values: list[int]) -> None:
    made = made_dataclass(kinds, **how)
    if {"no init", "by name", "init only"} & set(kinds):
        with pytest.raises(ValueError, match=r"register: Made has the fields \[.* and takes \[.* want the same"):
            register(made)
    else:
        names = [field.name for field in dataclasses.fields(register(made))]
        sent = made(**dict(zip(names, values, strict=False)))
        found = round_trip(sent)
        assert type(found) is made
        assert [getattr(found, name) for name in names] == [getattr(sent, name) for name in names]


class Swapped(NamedTuple("Swapped", [("left", int), ("right", int)])):
    """Its constructor makes something else of what it is given."""

    def __new__(cls, left: int, right: int = 4) -> "Swapped":
        return super().__new__(cls, right, left)


def test_named_tuples_arrive_as_they_were() -> None:
    defaults = collections.namedtuple("defaults", ["a", "b"], defaults=[3])
    for sent in (register(defaults)(1), register(Swapped)(1)):
        found = round_trip(sent)
        assert type(found) is type(sent)
        assert tuple(found) == tuple(sent)


def test_register_refuses_what_it_could_not_rebuild() -> None:
    @dataclass(init=False)
    class Reversed:
        x: int
        y: int

        def __init__(self, y: int, x: int) -> None:
            self.x, self.y = x, y

    class Narrow(Step):
        def __init__(self, index: int) -> None:
            super().__init__(index, {})

    for unfit in (Reversed, Narrow):
        with pytest.raises(ValueError, match="drop kw_only, init=False and InitVar"):
            register(unfit)
    with pytest.raises(ValueError, match="want a dataclass"):
        register(int)


def test_writing_into_used_memory_leaves_nothing_of_it() -> None:
    rng = random.Random(0)
    for _ in range(20):
        tree = [np.full(rng.randrange(200), 7, np.uint8) for _ in range(3)]
        encoded = encode(tree)
        dirty = np.full(encoded.size_bytes, 255, np.uint8)
        encoded.write_into(dirty)
        assert dirty.tobytes() == encode(tree).to_bytes()
        assert math.ceil(encoded.size_bytes) == dirty.size


def test_an_encoded_tree_travels_in_another_and_is_decoded_apart() -> None:
    inner = {"a": np.arange(5, dtype=np.uint8), "b": torch.ones(3), "c": np.arange(7.0)}
    outer = encode({"n": 1, "inner": encode(inner), "after": np.arange(3)})
    found = decode(outer.to_bytes())
    assert found["after"].tolist() == [0, 1, 2]
    every: list[Place] = []
    read = decode(found["inner"], places=every)
    assert read["c"].tolist() == inner["c"].tolist()
    assert torch.equal(read["b"], inner["b"])
    for place, array in zip(every, inner.values(), strict=True):
        piece = found["inner"][place.offset_bytes : place.offset_bytes + place.size_bytes]
        assert piece.tobytes() == np.asarray(array).tobytes()
    written = np.full(outer.size_bytes, 255, np.uint8)
    outer.write_into(written)
    assert written.tobytes() == outer.to_bytes()
    # In memory that may be written its tensors lie on it: nothing is copied.
    nested = decode(written)["inner"]
    assert decode(nested)["b"].data_ptr() == nested.ctypes.data + every[1].offset_bytes


def test_what_the_receiver_refuses_for_its_dims_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tree, "MAX_NDIM", 3)
    for refuse in (encode, check):
        refuse(np.zeros((1, 1, 1)))
        with pytest.raises(PayloadError, match="got an array of 4 dims, want at most 3"):
            refuse(np.zeros((1, 1, 1, 1)))


def test_long_keys_are_not_kept() -> None:
    before = _tree._keys.cache_info().currsize
    for number in range(3):
        tree = {f"{number}" + "x" * 1000: 1, "y": 2}
        assert decode(encode(tree).to_bytes()) == tree
    assert _tree._keys.cache_info().currsize == before
