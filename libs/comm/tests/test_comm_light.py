"""The facade is light: no torch, no gRPC, no thread, no socket."""

import subprocess
import sys

PROGRAM = """
import sys, threading, os
before = len(os.listdir("/proc/self/fd"))
import m2flow.comm
assert "torch" not in sys.modules and "grpc" not in sys.modules, "heavy modules"
assert threading.active_count() == 1, "threads"
assert len(os.listdir("/proc/self/fd")) == before, "descriptors"
"""

NUMPY_ONLY = """
import sys
sys.modules["torch"] = None
import numpy as np
from m2flow.comm import PayloadError, decode, encode
assert decode(encode({"x": np.arange(3)}).to_bytes())["x"].tolist() == [0, 1, 2]
"""


def test_importing_it_starts_and_imports_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=50)


def test_arrays_work_where_torch_is_not_installed() -> None:
    subprocess.run([sys.executable, "-c", NUMPY_ONLY], check=True, timeout=50)
