"""What the workers print, in files of the run directory: one a rank, so that the terminal stays the driver's."""

import threading
from pathlib import Path
from types import TracebackType
from typing import TextIO

__all__ = ["WorkerLogs"]


class WorkerLogs:
    """Appends lines to <directory>/<group>.<rank>.log. A context manager; thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[tuple[str, int], TextIO] = {}
        self._mutex = threading.Lock()

    def write(self, group: str, rank: int, line: str) -> None:
        """Appends one line."""
        with self._mutex:
            if (group, rank) not in self._files:
                self._directory.mkdir(exist_ok=True)
                path = self._directory / f"{group}.{rank}.log"
                self._files[group, rank] = path.open("a", encoding="utf-8", buffering=1)
            self._files[group, rank].write(line.rstrip("\n") + "\n")

    def __enter__(self) -> "WorkerLogs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._mutex:
            for file in self._files.values():
                file.close()
            self._files.clear()
