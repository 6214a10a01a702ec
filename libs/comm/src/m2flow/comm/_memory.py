"""How much memory a process may use: the machine's, or less in a container."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_bytes(root: Path = Path("/")) -> int:
    """Returns the least of the machine's memory and the limits of the control groups that this process is in.

    `root` is where the kernel's files are.
    """
    return min((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits(root)))


def _limits(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, file = "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # A group has what all those above it leave it. Seen from a container, its own may be the one at the top.
        for each in (group, *group.parents):
            # No such file, or no number: "max".
            with contextlib.suppress(OSError, ValueError):
                yield int((root / mount / each / file).read_text())
