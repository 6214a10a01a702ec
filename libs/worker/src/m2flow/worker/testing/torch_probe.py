"""A worker that preloads torch: its process has torch, with as many threads as it has cores."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from m2flow.worker.base import Worker
from m2flow.worker.item import Item
from m2flow.worker.stage import stage


class TorchProbe(Worker):
    """Says what torch was told. With `one_thread` in its config it asks for one."""

    preload = ("torch",)

    def setup(self) -> None:
        """Asks for what its config says."""
        if (self.config or {}).get("one_thread"):
            self.context.compute_in_one_thread()

    def threads(self) -> dict[str, Any]:
        """The number of torch's threads, and of its cores."""
        return {"threads": sys.modules["torch"].get_num_threads(), "cores": len(os.sched_getaffinity(0))}

    @stage
    def on_stage_thread(self, items: list[Item]) -> list[Item]:
        """Each item with `omp_threads`, what a product on this thread would be shared among, without asking torch."""
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        (library, *_) = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}
        count = int(ctypes.CDLL(library).omp_get_max_threads())
        return [item.with_fields(omp_threads=count) for item in items]
