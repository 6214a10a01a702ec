"""Names to Unix sockets: a private directory with one socket for each endpoint.

Paths go through the directory's descriptor, so the kernel's limit of 107 characters is on the name alone.
"""

import contextlib
import fcntl
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from m2flow.comm.errors import CommError, system_refuses

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_BACKLOG = 512


class SocketDirectory:
    """A directory that only this user can enter; made when it is missing.

    Raises ValueError for one that others can enter, CommError for one that cannot be.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Not O_PATH: it is locked too.
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise system_refuses(f"use {path} as a run's directory", error) from error
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            self.close()
            mode = oct(stat.S_IMODE(found.st_mode))
            raise ValueError(f"got directory {path} of uid {found.st_uid}, mode {mode}, want one's own with mode 0o700")
        self.path = path
        # The same whatever path led there.
        self.identity = (found.st_dev, found.st_ino)

    def listen(self, name: str) -> tuple[socket.socket, int]:
        """Returns a listening socket under a name, and its inode.

        It takes the name over from a dead endpoint; raises CommError where a living one has it, or the system refuses.
        """
        check_name(name)
        try:
            return self._listen(name)
        except OSError as error:
            raise system_refuses(f"listen as {name!r} in {self.path}", error) from error

    def _listen(self, name: str) -> tuple[socket.socket, int]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        # Bound and listening before it gets its name: whoever finds the name can connect.
        hidden = f".{os.urandom(6).hex()}"
        try:
            listener.bind(self._address(hidden))
            listener.listen(_BACKLOG)
            with self._locked():
                if self._answers(name):
                    raise CommError(f"endpoint {name!r} exists in {self.path}: names are unique in a run")
                os.rename(hidden, f"{name}.sock", src_dir_fd=self._fd, dst_dir_fd=self._fd)
                return listener, self._inode(name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(hidden, dir_fd=self._fd)
            listener.close()
            raise

    def connect(self, name: str) -> socket.socket:
        """Returns a socket connected to an endpoint, without waiting.

        Raises FileNotFoundError while there is none, ConnectionRefusedError where it is dead, BlockingIOError where it
        is behind with accepting.
        """
        check_name(name)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            connected.connect(self._address(f"{name}.sock"))
        except BaseException:
            connected.close()
            raise
        return connected

    def unlink(self, name: str, inode: int) -> None:
        """Removes a name if it is still the socket it was given to."""
        with contextlib.suppress(FileNotFoundError), self._locked():
            if self._inode(name) == inode:
                os.unlink(f"{name}.sock", dir_fd=self._fd)

    def close(self) -> None:
        """Frees the directory's descriptor."""
        os.close(self._fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets no other endpoint take or leave a name meanwhile."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # A forked child may have the descriptor too.
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _address(self, file: str) -> str:
        return f"/proc/self/fd/{self._fd}/{file}"

    def _inode(self, name: str) -> int:
        return os.stat(f"{name}.sock", dir_fd=self._fd, follow_symlinks=False).st_ino

    def _answers(self, name: str) -> bool:
        try:
            self.connect(name).close()
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True
        return True


def check_name(name: str) -> None:
    """Raises ValueError for a name that is no file name, or too long for a socket."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"got endpoint name {name!r}, want 1 to 64 of letters, digits, '.', '_', '-'")
