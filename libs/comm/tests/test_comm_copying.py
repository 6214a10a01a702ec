"""Copies past the caches: the same bytes as any copy, none beside them, and a way where they cannot be made."""

import ctypes
import mmap
import platform
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.comm import _copying
from m2flow.comm.payload import decode, encode

HAS_LOOP = platform.machine() == "x86_64" and _copying._has_avx()
SIZES = st.integers(0, 400)
OFFSETS = st.integers(0, 130)


@given(SIZES, OFFSETS, OFFSETS)
def test_a_streamed_copy_writes_its_bytes_and_no_others(size: int, to: int, start: int) -> None:
    source = np.random.default_rng(size).integers(1, 256, 600, dtype=np.uint8)
    target = np.zeros(600, np.uint8)
    _copying.copier(_copying.STREAMED_BYTES)(target.ctypes.data + to, source.ctypes.data + start, size)
    np.testing.assert_array_equal(target[to : to + size], source[start : start + size])
    assert not target[:to].any()
    assert not target[to + size :].any()


def test_the_loop_runs_here_and_never_for_what_the_caches_hold() -> None:
    if HAS_LOOP:
        assert _copying._loop() is not None
        assert _copying.copier(_copying.STREAMED_BYTES) is not ctypes.memmove
    assert _copying.copier(_copying.STREAMED_BYTES - 1) is ctypes.memmove


@pytest.mark.skipif(not HAS_LOOP, reason="kernel: the loop is x86-64 code with AVX")
def test_code_is_never_writable_and_executable_at_once() -> None:
    assert _copying._loop() is not None
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "m2flow-copy" in line]
    assert lines
    assert all(re.search(r" r-xp ", line) for line in lines)


def test_where_code_may_not_be_mapped_the_c_library_copies() -> None:
    program = """
import mmap
def refuse(*arguments, **named):
    raise PermissionError(13, "no executable memory")
mmap.mmap = refuse
import ctypes
from m2flow.comm import _copying
assert _copying.copier(1 << 30) is ctypes.memmove
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_avx_the_c_library_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copying, "_has_avx", lambda: False)
    monkeypatch.setattr(_copying, "_loop", _copying._loop.__wrapped__)
    assert _copying.copier(1 << 30) is ctypes.memmove


@pytest.mark.skipif(not HAS_LOOP, reason="kernel: the loop is x86-64 code with AVX")
def test_out_of_descriptors_only_the_copies_of_that_moment_are_the_c_librarys() -> None:
    program = """
import ctypes, resource
from m2flow.comm import _copying
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
assert _copying.copier(1 << 30) is ctypes.memmove
resource.setrlimit(resource.RLIMIT_NOFILE, most)
assert _copying.copier(1 << 30) is not ctypes.memmove
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_large_payload_is_the_same_streamed_and_as_bytes() -> None:
    tree = {
        "odd": np.arange(_copying.STREAMED_BYTES + 13, dtype=np.uint8),
        "small": np.arange(3.0),
        "bytes": bytes(range(256)) * 8,
        "tensor": torch.arange(70_001, dtype=torch.float32).to(torch.bfloat16),
    }
    encoded = encode(tree)
    written = np.full(encoded.size_bytes, 255, np.uint8)
    encoded.write_into(written)
    assert written.tobytes() == encoded.to_bytes()
    found = decode(written)
    np.testing.assert_array_equal(found["odd"], tree["odd"])
    assert torch.equal(found["tensor"], tree["tensor"])


def test_a_copy_into_a_mapping_is_seen_through_another() -> None:
    size = _copying.STREAMED_BYTES + 100
    shared = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    source = np.arange(size, dtype=np.uint8)
    _copying.copier(size)(shared.ctypes.data, source.ctypes.data, size)
    np.testing.assert_array_equal(shared, source)
