"""A file by which endpoints of one host take turns: who locks it has the turn, and writes into it what there is.

The kernel unlocks it when its process ends, however that ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from m2flow.comm._registry import register
from m2flow.comm.errors import PayloadError
from m2flow.comm.payload import decode, encode


@register
class Record(NamedTuple):
    """What a ledger says: whose turn it is, the stamp of a version, and the copies of it, by endpoint and number."""

    leader: str = ""
    stamp: int = 0
    copies: Sequence[tuple[str, int]] = ()


class Ledger:
    """The file of one path, which is made by whoever locks it first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    @property
    def locked(self) -> bool:
        """Says whether it is locked by this one."""
        return self._file is not None

    def try_lock(self) -> str | None:
        """Locks the file; returns None, or else the endpoint that has it, "" where that has not written yet.

        Raises OSError where there can be no such file.
        """
        file = FileIO(str(self.path), "r+", opener=_opener)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Unless it has been taken away meanwhile: others would not find it.
            if self.path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                self._file = file
            return None if self.locked else ""
        except (BlockingIOError, FileNotFoundError):
            return _read(file).leader
        finally:
            if not self.locked:
                file.close()

    def read(self) -> Record:
        """Returns what the locked file says: nothing where nobody has written it to its end, or another release has."""
        assert self._file is not None
        return _read(self._file)

    def write(self, record: Record) -> None:
        """Writes the locked file. Where that cannot be, others find nothing in it."""
        assert self._file is not None
        data = encode(record).to_bytes()
        with contextlib.suppress(OSError):
            os.pwrite(self._file.fileno(), data, 0)
            os.ftruncate(self._file.fileno(), len(data))

    def leave(self) -> None:
        """Leaves the file to who has locked it for ever: others make another."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def unlock(self) -> None:
        """Ends the turn, if this one has it."""
        if self._file is not None:
            # A forked child may have its descriptor too.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
            self._file = None


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


def _read(file: FileIO) -> Record:
    try:
        found = decode(os.pread(file.fileno(), 1 << 20, 0))
    except PayloadError:
        return Record()
    return found if isinstance(found, Record) else Record()
