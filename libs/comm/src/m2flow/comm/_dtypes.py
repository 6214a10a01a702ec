"""Element types on the wire: one byte for each, the same list at both ends.

A code is its position here, so the list only ever grows at its end. numpy's own spelling is kept for types that have a
size or a unit of their own (dates, fixed-length strings, other byte orders): code 0, then the text.
"""

import re

import numpy as np

from m2flow.comm.errors import PayloadError

SPELT = 0
NUMPY_NAMES = (
    "",
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
)
_BY_CODE = (np.dtype("V0"), *(np.dtype(name) for name in NUMPY_NAMES[1:]))
_CODES = {dtype: code for code, dtype in enumerate(_BY_CODE) if code}
_SPELLING = re.compile(r"[<>|](?:[iufcbSU][1-9][0-9]{0,8}|[mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?)")


def code_of(dtype: np.dtype[np.generic]) -> tuple[int, str]:
    """Returns the code of a numpy dtype and its spelling, empty where the code says it all.

    Raises PayloadError for dtypes whose bytes mean nothing elsewhere: objects, records.
    """
    code = _CODES.get(dtype)
    if code is not None:
        return code, ""
    if not _SPELLING.fullmatch(dtype.str):
        raise PayloadError(f"got an array of dtype {dtype}, want numbers, bools, dates or fixed strings: convert it")
    return SPELT, dtype.str


def dtype_of(code: int, spelling: str) -> np.dtype[np.generic]:
    """Returns the numpy dtype of a code; raises PayloadError for a code or a spelling that none has."""
    if 0 < code < len(_BY_CODE):
        return _BY_CODE[code]
    if code != SPELT or not _SPELLING.fullmatch(spelling):
        raise PayloadError(f"got dtype code {code} spelt {spelling!r}, want one that this version knows")
    try:
        return np.dtype(spelling)
    except (TypeError, ValueError) as error:
        raise PayloadError(f"got dtype {spelling!r}, which numpy refuses: {error}") from error
