"""The one module that meets torch: tensors as the bytes of numpy arrays, and back, and what is done to both alike.

torch is imported when the first tensor is met, here or on the wire, and never otherwise.
"""

import importlib
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from m2flow.comm.errors import PayloadError

DTYPE_NAMES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
    "float4_e2m1fn_x2",
    *(f"int{bits}" for bits in range(1, 8)),
    *(f"uint{bits}" for bits in range(1, 8)),
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
)
_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}


def is_tensor(value: Any) -> bool:
    """Says whether a value is a torch tensor, without importing torch when nobody has."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def concatenate(arrays: Sequence[Any]) -> Any:
    """Returns arrays or tensors of one kind as one, along their first dimension."""
    return sys.modules["torch"].cat(arrays) if is_tensor(arrays[0]) else np.concatenate(arrays)


def bytes_of(array: Any) -> npt.NDArray[np.uint8]:
    """Returns an array's or a tensor's elements in order, shape [nbytes]: where they lie, if so they do on the host."""
    if not is_tensor(array):
        return np.asarray(array, order="C").reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
    found = raw(array)
    return found if isinstance(found, np.ndarray) else found.cpu().numpy()


def new_empty(like: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array of another's dtype, or a tensor of another's on the host, that is yet to be written."""
    return empty(code_of(like), shape, "cpu") if is_tensor(like) else np.empty(shape, like.dtype)


def address(array: Any) -> int:
    """Returns where an array's elements lie in order in the memory of this host; 0 where they do not, or it is none."""
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data) if array.flags.c_contiguous else 0
    plain = is_tensor(array) and array.is_cpu and array.is_contiguous() and not array.is_conj() and not array.is_neg()
    return int(array.data_ptr()) if plain else 0


def code_of(tensor: Any) -> int:
    """Returns a tensor's dtype code.

    Raises PayloadError for layouts that are no dense array, for what is quantized or has no data, and for dtypes not in
    the list.
    """
    torch = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise PayloadError(
            f"got a {type(tensor).__name__}, want a plain tensor: call full_tensor() or to_local() first"
        )
    if tensor.layout is not torch.strided:
        raise PayloadError(f"got a tensor of layout {tensor.layout}, want a dense one: call to_dense()")
    if tensor.is_quantized:
        raise PayloadError(
            "got a quantized tensor, want its numbers: call dequantize(), or send int_repr() and its scale"
        )
    if tensor.is_meta:
        raise PayloadError("got a tensor of the meta device, which has no data: materialize it, or send its shape")
    return _code_of_dtype(tensor.dtype)


@lru_cache
def _code_of_dtype(dtype: Any) -> int:
    name = str(dtype).removeprefix("torch.")
    code = _CODES.get(name)
    if code is None:
        raise PayloadError(f"got a tensor of dtype {name}, want one of {', '.join(DTYPE_NAMES)}")
    return code


def flat(tensor: Any) -> Any:
    """Returns a tensor's elements in order as a uint8 tensor of shape [bytes] where they lie; a view if contiguous."""
    torch = sys.modules["torch"]
    dense = _dense(tensor)
    return dense.reshape(-1).view(torch.uint8) if dense.numel() else dense.new_empty(0, dtype=torch.uint8)


def raw(tensor: Any) -> Any:
    """Returns what `flat` does, as an array where the tensor lies on the host."""
    dense = _dense(tensor)
    if on_gpu(dense):
        return flat(dense)
    if not dense.ndim or not dense.numel():
        return flat(dense).numpy()
    return dense.view(sys.modules["torch"].uint8).numpy().reshape(-1)


def _dense(tensor: Any) -> Any:
    return copyable(tensor.detach().resolve_conj().resolve_neg()).contiguous()


def copyable(array: Any) -> Any:
    """Returns a tensor of one byte an element as those bytes, as torch copies not all such dtypes; else what it got."""
    return array.view(sys.modules["torch"].uint8) if is_tensor(array) and array.itemsize == 1 else array


def written(tensor: Any) -> None:
    """Tells autograd that a tensor was written by its address, as it is told of every operation in place."""
    sys.modules["torch"].autograd.graph.increment_version(tensor)


def converts(source: Any, target: Any) -> bool:
    """Says whether numbers of a dtype may become another's: of the same library, and of a kind that keeps them."""
    if isinstance(source, np.dtype):
        return isinstance(target, np.dtype) and np.can_cast(source, target, "same_kind")
    torch = sys.modules["torch"]
    if not (isinstance(target, torch.dtype) and torch.can_cast(source, target)):
        return False
    try:
        # torch says yes of dtypes that it does not copy, those of less than a byte.
        torch.empty(1, dtype=target).copy_(torch.empty(1, dtype=source))
    except NotImplementedError:
        return False
    return True


def on_gpu(tensor: Any) -> bool:
    """Says whether a tensor lies where only a copy brings it to the host."""
    return not tensor.is_cpu


def copy_into(tensor: Any, target: npt.NDArray[np.uint8]) -> None:
    """Copies a tensor's elements, from wherever they lie, in order to host memory. Blocks until they are there."""
    sys.modules["torch"].from_numpy(target).copy_(flat(tensor))


def pin(data: npt.NDArray[np.uint8]) -> bool:
    """Pins host memory, so that a GPU reads and writes it at full speed; says whether CUDA did."""
    cudart = importlib.import_module("torch").cuda.cudart()
    return int(cudart.cudaHostRegister(data.ctypes.data, data.size, 0)) == 0


def unpin(data: npt.NDArray[np.uint8]) -> None:
    """Ends what `pin` did, before the memory is unmapped."""
    importlib.import_module("torch").cuda.cudart().cudaHostUnregister(data.ctypes.data)


def item_size(code: int) -> int:
    """Returns the bytes of one element of a dtype code; raises PayloadError for an unknown one or without torch."""
    if code >= len(DTYPE_NAMES):
        raise PayloadError(f"got tensor dtype code {code}, want less than {len(DTYPE_NAMES)}")
    return int(_dtype(code).itemsize)


def from_bytes(code: int, shape: tuple[int, ...], data: npt.NDArray[np.uint8]) -> Any:
    """Returns a CPU tensor over the bytes given, which must be as many as shape and dtype say and stay writable."""
    dtype = _dtype(code)
    torch = sys.modules["torch"]
    if data.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def empty(code: int, shape: tuple[int, ...], device: Any) -> Any:
    """Returns a tensor on a device whose elements are yet to be written; raises PayloadError for an unknown code."""
    item_size(code)
    return importlib.import_module("torch").empty(shape, dtype=_dtype(code), device=device)


@lru_cache
def _dtype(code: int) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise PayloadError("got a torch tensor where torch is not installed: install m2flow-comm[torch]") from error
    try:
        return getattr(torch, DTYPE_NAMES[code])
    except AttributeError as error:
        raise PayloadError(
            f"got a tensor of dtype {DTYPE_NAMES[code]}, which torch {torch.__version__} lacks"
        ) from error
