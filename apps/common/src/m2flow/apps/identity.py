"""What a measurement or a checkpoint belongs to: the version of this package, and the machine."""

import os
import platform
from importlib import metadata
from pathlib import Path

__all__ = ["hardware", "package_version"]


def package_version(package: str = "m2flow-apps") -> str:
    """Returns the installed version of `package`; "source" where it runs from a source tree."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


def hardware() -> str:
    """Returns the name of the processor and the number of its cores at hand: "Example CPU @ 2.00GHz x2"."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} x{len(os.sched_getaffinity(0))}"
