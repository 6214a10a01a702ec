"""Files and directories that are either the old ones or the new ones, never half of each."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from m2flow.apps.errors import RunDirectoryError

__all__ = ["append_line", "new_directory", "replace_file"]


def replace_file(path: Path, data: bytes | str) -> None:
    """Writes `data` by way of a file beside `path`. On failure the old file stays and RunDirectoryError says why.

    A link stays, and what it names is replaced. What is no regular file, such as a pipe or a device, is written into;
    that blocks while nobody reads the pipe.
    """
    content = data.encode() if isinstance(data, str) else data
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _failure(path, error) from error


def append_line(path: Path, line: str) -> None:
    """Appends one line in one write. On failure the file keeps the length that it had."""
    try:
        with path.open("ab") as file:
            size = file.tell()
            try:
                file.write(line.encode() + b"\n")
                file.flush()
            except OSError:
                os.truncate(path, size)
                raise
    except OSError as error:
        raise _failure(path, error) from error


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory beside `path` that takes its place when the block ends well; else it is removed.

    Everything in it is synced to disk before the rename, so `path` is complete whenever it exists, even after the
    process was killed or the power failed. A directory that is there already is kept until the new one is complete.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    retired = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in [*temporary.rglob("*"), temporary]:
            _sync(file)
        if path.exists():
            path.rename(retired)
        temporary.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise _failure(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failure(path: Path, error: OSError) -> RunDirectoryError:
    reason = error.strerror or str(error)
    return RunDirectoryError(f"{path}: cannot be written ({reason}): free space or name another place")
