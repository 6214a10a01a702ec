"""How many parameters a model directory holds, read from the headers of its safetensors files, without torch."""

import json
import math
import struct
from pathlib import Path

from m2flow.apps.errors import CheckFailed

__all__ = ["num_parameters"]

_MAX_HEADER_BYTES = 100_000_000


def num_parameters(directory: Path) -> int:
    """Returns the number of parameters in the directory's *.safetensors. Raises CheckFailed when one is broken."""
    return sum(_count(file) for file in sorted(directory.glob("*.safetensors")))


def _count(file: Path) -> int:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckFailed([f"{file}: not a safetensors file ({error}): fetch the model again"]) from None
    return sum(math.prod(shape) for shape in shapes)
