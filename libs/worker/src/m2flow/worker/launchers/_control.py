"""What is said to ranks of this machine, and what they answer: framed messages over one Unix socket a rank.

One thread reads for all ranks of a server; whoever sends writes at once what the socket takes and leaves the rest to
that thread, so that nobody ever waits for a rank that does not read.
"""

import hmac
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._node import RankKey
from m2flow.worker.launchers._frames import LENGTH, receive_frame, send_frame

_CHUNK = 1 << 16


class _Connection:
    """The server's end of one rank's socket; `key` is empty until it has said who it is."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.key: RankKey = ("", 0)
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.mutex = threading.Lock()

    def write(self, data: bytes) -> bool:
        """Sends after what still waits; False where something is left to be sent."""
        with self.mutex:
            self.outgoing += data
            try:
                while self.outgoing:
                    del self.outgoing[: self.sock.send(self.outgoing)]
            except BlockingIOError:
                return False
            except OSError:
                self.outgoing.clear()  # It has gone; its end-of-file is read by the thread.
            return True

    def frames(self) -> list[bytes] | None:
        """The whole messages that have come; None at the end."""
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.incoming += data
        found = []
        at = 0
        while len(self.incoming) - at >= LENGTH.size:
            end = at + LENGTH.size + LENGTH.unpack_from(self.incoming, at)[0]
            if end > len(self.incoming):
                break
            found.append(bytes(memoryview(self.incoming)[at + LENGTH.size : end]))
            at = end
        del self.incoming[:at]
        return found


class ControlServer:
    """Listens at `path` for ranks that know the token; `on_response` hears them on the server's thread."""

    def __init__(self, path: Path, token: str, on_response: Callable[[pb.SessionResponse], None]) -> None:
        self._token = token
        self._on_response = on_response
        self._ranks: dict[RankKey, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(256)
        self._listener.setblocking(False)
        self._wake_read, self._wake_write = os.pipe()
        self._to_watch: set[_Connection] = set()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def send(self, key: RankKey, request: bytes) -> None:
        """Sends a serialised `SessionRequest`. Does not block; one for a rank that is not there is dropped."""
        connection = self._ranks.get(key)
        if connection is not None and not connection.write(LENGTH.pack(len(request)) + request):
            self._to_watch.add(connection)
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Hears nobody any more. Blocks shortly."""
        self._closed = True
        os.write(self._wake_write, b"c")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            for key, events in self._selector.select():
                if key.fd == self._wake_read:
                    os.read(self._wake_read, _CHUNK)
                    self._watch()
                elif key.data is None:
                    self._accept()
                elif events & selectors.EVENT_WRITE and key.data.write(b""):
                    self._selector.modify(key.data.sock, selectors.EVENT_READ, key.data)
                elif events & selectors.EVENT_READ:
                    self._hear(key.data)
        for registered in list(self._selector.get_map().values()):
            if registered.data is not None:
                registered.data.sock.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _watch(self) -> None:
        while self._to_watch:
            connection = self._to_watch.pop()
            if self._ranks.get(connection.key) is connection:
                self._selector.modify(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _hear(self, connection: _Connection) -> None:
        frames = connection.frames()
        if frames is None:
            self._drop(connection)
            return
        for frame in frames:
            response = pb.SessionResponse.FromString(frame)
            if connection.key[0]:
                self._on_response(response)
            elif hmac.compare_digest(response.hello.token, self._token):
                group, _, rank = response.hello.name.rpartition(".")
                connection.key = (group, int(rank))
                self._ranks[connection.key] = connection
            else:
                self._drop(connection)
                return

    def _drop(self, connection: _Connection) -> None:
        if self._ranks.get(connection.key) is connection:
            del self._ranks[connection.key]
        self._selector.unregister(connection.sock)
        connection.sock.close()


class ControlClient:
    """A rank's end. `handle` hears what it is asked, on a thread of its own, from `listen` on."""

    def __init__(self, path: str, token: str, group: str, rank: int) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(path)
        self._mutex = threading.Lock()
        self.report(pb.SessionResponse(hello=pb.SessionHello(token=token, name=f"{group}.{rank}")))

    def report(self, response: pb.SessionResponse) -> None:
        """Says something. Blocks while the socket is full."""
        with self._mutex:
            send_frame(self._sock, response)

    def listen(self, handle: Callable[[pb.SessionRequest], None]) -> None:
        """Starts to hear."""
        threading.Thread(target=self._run, args=(handle,), name="control", daemon=True).start()

    def _run(self, handle: Callable[[pb.SessionRequest], None]) -> None:
        while (request := receive_frame(self._sock, pb.SessionRequest)) is not None:
            handle(request)
