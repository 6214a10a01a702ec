"""The directory that a run leaves behind: what is in it, and under which names (README.md lists it all)."""

import contextlib
import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from m2flow.apps.atomic import append_line, replace_file
from m2flow.apps.errors import RunDirectoryError, RunInUseError
from m2flow.apps.paths import expanded

__all__ = ["RunDirectory"]

Row = Mapping[str, object]


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, and the few ways in which they are written."""

    path: Path

    @classmethod
    def create(cls, app: str, *, root: str, directory: str = "") -> "RunDirectory":
        """Makes `directory`, or <root>/<app>-<time> where none is named. Of several at once each
        gets its own; raises RunInUseError when a named one is in use, RunDirectoryError when it cannot be made."""
        path, key = expanded(directory or root), "run.dir" if directory else "run.root"
        try:
            path = path if directory else _new(path, app)
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise RunInUseError(f"{path}: holds files already, want a new directory: resume it or name another")
            for folder in (path / "samples", path / "checkpoints"):
                folder.mkdir()
        except FileExistsError:
            raise RunInUseError(f"{path}: is taken, want a new directory: name another") from None
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be made ({error.strerror}): choose another {key}") from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Returns the run at `path`. Raises RunInUseError when there is none."""
        if not (path / "config.yaml").is_file():
            raise RunInUseError(f"{path}: no run there (no config.yaml): give the directory that `train` printed")
        return cls(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within the block no other process writes this run. Raises RunInUseError when one does, and does not wait."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            _lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """Chrome trace events."""
        return self.path / "timeline.json"

    @property
    def plan(self) -> Path:
        """The execution plan, as `plan=` takes it back."""
        return self.path / "plan.json"

    @property
    def profile(self) -> Path:
        """What plan=auto measured, as the plan command takes it back."""
        return self.path / "profile.json"

    @property
    def explanation(self) -> Path:
        """Why the plan was chosen."""
        return self.path / "plan.txt"

    @property
    def checkpoints(self) -> Path:
        """One directory step_N a checkpoint."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What the workers printed, one file a rank."""
        return self.path / "logs"

    @property
    def report(self) -> Path:
        """The page that shows it all."""
        return self.path / "report.html"

    def write_film(self, step: int, film: bytes) -> None:
        """Writes an animated WebP picture of the policy at `step`."""
        folder = self.path / "films"
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"step_{step:05d}.webp", film)

    def read_films(self) -> dict[int, bytes]:
        """Returns the written films by step."""
        files = sorted((self.path / "films").glob("step_*.webp"))
        return {int(file.stem.removeprefix("step_")): file.read_bytes() for file in files}

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Writes the rollouts of one step, one JSON object a line."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        replace_file(self.path / "samples" / f"step_{step:05d}.jsonl", text)

    def read_samples(self) -> dict[int, list[dict[str, object]]]:
        """Returns the written rollouts by step."""
        files = sorted((self.path / "samples").glob("step_*.jsonl"))
        return {int(file.stem.removeprefix("step_")): _read_lines(file) for file in files}

    def append_metrics(self, row: Row) -> None:
        """Appends one row."""
        append_line(self.metrics, json.dumps(row, ensure_ascii=False))

    def read_metrics(self) -> list[dict[str, object]]:
        """Returns the rows in order; a last line that a killed run left unfinished is skipped."""
        return _read_lines(self.metrics) if self.metrics.exists() else []

    def drop_after(self, step: int) -> None:
        """Removes the metrics, samples and films of steps after `step`: a resumed run writes them again."""
        rows = [row for row in self.read_metrics() if int(str(row.get("step", 0))) <= step]
        replace_file(self.metrics, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        for file in [*(self.path / "samples").glob("step_*.jsonl"), *(self.path / "films").glob("step_*.webp")]:
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when the process ends
    except BlockingIOError:
        raise RunInUseError(f"{path}: another process runs it, want one at a time: wait for it or end it") from None


def _new(root: Path, app: str) -> Path:
    """A directory that no other process has: two runs may begin in one second."""
    name = f"{app}-{time.strftime('%Y%m%d-%H%M%S')}"
    for path in itertools.chain([root / name], (root / f"{name}-{number}" for number in itertools.count(2))):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("count does not end")


def _read_lines(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"got {type(row).__name__}, want an object")
            rows.append(row)
        except ValueError as error:
            if number == len(lines):
                break
            raise RunDirectoryError(f"{path}:{number}: not JSON ({error}): remove the line") from None
    return rows
