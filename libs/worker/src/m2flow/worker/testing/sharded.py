"""A worker whose state is cut by rank: what re-placing is tested with."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m2flow.comm import Shard
from m2flow.worker.base import Worker


class ShardedProbe(Worker):
    """Holds a matrix cut by rows, another cut by columns, and a count that every rank has.

    `config` is {"rows": int, "columns": int}.
    """

    in_step = True

    def setup(self) -> None:
        rank, world_size = self.context.rank, self.context.world_size
        self._shape = (self.config["rows"], self.config["columns"])
        self._cuts = [(rank * size // world_size, (rank + 1) * size // world_size) for size in self._shape]
        (top, bottom), (left, right) = self._cuts
        self._rows: NDArray[np.float64] = np.zeros((bottom - top, self._shape[1]))
        self._columns: NDArray[np.float32] = np.zeros((self._shape[0], right - left), np.float32)
        self._count: NDArray[np.int64] = np.array(0)

    def fill(self, seed: int) -> None:
        """Becomes the same state, whatever the number of ranks."""
        rng = np.random.default_rng(seed)
        (top, bottom), (left, right) = self._cuts
        self._rows = rng.normal(size=self._shape)[top:bottom]
        self._columns = rng.normal(size=self._shape).astype(np.float32)[:, left:right]
        self._count = np.array(seed)

    def held(self) -> dict[str, Any]:
        """What this rank holds, and where that begins."""
        cuts = [cut[0] for cut in self._cuts]
        return {"rows": self._rows, "columns": self._columns, "count": int(self._count), "begins": cuts}

    def shards(self) -> Mapping[str, Any]:
        (top, _), (left, _) = self._cuts
        return {
            "rows": Shard(self._rows, (top, 0), self._shape),
            "columns": Shard(np.ascontiguousarray(self._columns), (0, left), self._shape),
            "count": self._count,
        }

    def load_shards(self, shards: Mapping[str, Any]) -> None:
        for name, value in shards.items():
            setattr(self, f"_{name}", np.array(value))
