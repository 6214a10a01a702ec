"""A worker whose module brings torch in: its process has torch, with as many threads as it has cores."""

import os
from typing import Any

import torch

from m2flow.worker.base import Worker


class TorchProbe(Worker):
    """Says what torch was told."""

    def threads(self) -> dict[str, Any]:
        """The number of torch's threads, and of its cores."""
        return {"threads": torch.get_num_threads(), "cores": len(os.sched_getaffinity(0))}
