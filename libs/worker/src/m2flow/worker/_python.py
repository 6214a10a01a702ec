"""How this package starts another Python process of its own."""

import os
import sys

MODULE = (sys.executable, "-m", "m2flow.worker")
"""The command; what follows it says which process it becomes."""


def child_environment() -> dict[str, str]:
    """This process's environment with its import path. One BLAS thread, so that numpy's pool starts no threads."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
