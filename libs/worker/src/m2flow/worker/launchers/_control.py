"""What is said to ranks of this machine, and what they answer: framed messages over one Unix socket a process.

A message to many ranks goes to each of their processes once. One thread reads for all ranks of a server; whoever
sends writes at once what the socket takes and leaves the rest to that thread, so that nobody ever waits for a rank that
does not read.
"""

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from m2flow.comm.errors import system_refuses
from m2flow.comm.token import same_token
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._cause import failure_of
from m2flow.worker._node import RankKey
from m2flow.worker._wire import merged
from m2flow.worker.launchers._frames import FrameReader, framed

_CHUNK = 1 << 16


class _Connection:
    """The server's end of one process's socket; `keys` are the ranks that have said that they are there."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.keys: list[RankKey] = []
        self.incoming = FrameReader(sock)
        self.outgoing = bytearray()
        self.mutex = threading.Lock()

    def write(self, data: bytes) -> bool:
        """Sends after what still waits; False where something is left to be sent."""
        with self.mutex:
            self.outgoing += data
            try:
                while self.outgoing:
                    del self.outgoing[: self.sock.send(self.outgoing, socket.MSG_NOSIGNAL)]
            except BlockingIOError:
                return False
            except OSError:
                self.outgoing.clear()  # It has gone; its end-of-file is read by the thread.
            return True


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

    def send(self, keys: Iterable[RankKey], request: bytes) -> None:
        """Sends a serialised `SessionRequest` to ranks. Does not block; ranks that are not there are passed over."""
        frame = framed(request)
        for connection in dict.fromkeys(map(self._ranks.get, keys)):
            if connection is not None and not connection.write(frame) and connection not in self._to_watch:
                self._to_watch.add(connection)
                os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Hears nobody any more. Blocks shortly."""
        self._closed = True
        os.write(self._wake_write, b"c")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._serve()
        except OSError as error:
            # Out of descriptors, mostly: nobody may wait for ranks that are not heard any more.
            self._on_response(failure_of(system_refuses("hear a rank", error), "control", 0, "listening"))
            while not self._closed:
                os.read(self._wake_read, _CHUNK)
        for registered in list(self._selector.get_map().values()):
            if registered.data is not None:
                registered.data.sock.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self) -> None:
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

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _watch(self) -> None:
        while self._to_watch:
            connection = self._to_watch.pop()
            if self._is_heard(connection):
                self._selector.modify(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _is_heard(self, connection: _Connection) -> bool:
        return any(self._ranks.get(key) is connection for key in connection.keys)

    def _hear(self, connection: _Connection) -> None:
        frames = connection.incoming.read()
        if frames is None:
            self._drop(connection)
            return
        for frame in frames:
            response = pb.SessionResponse.FromString(frame)
            if not response.HasField("hello") and connection.keys:
                self._on_response(response)
            elif same_token(response.hello.token, self._token):
                group, _, rank = response.hello.name.rpartition(".")
                connection.keys.append((group, int(rank)))
                self._ranks[group, int(rank)] = connection
            else:
                self._drop(connection)
                return

    def _drop(self, connection: _Connection) -> None:
        for key in connection.keys:
            if self._ranks.get(key) is connection:
                del self._ranks[key]
        self._selector.unregister(connection.sock)
        connection.sock.close()


class ControlClient:
    """A process's end. `handle` hears what its ranks are asked, on a thread of its own, from `listen` on."""

    def __init__(self, path: str, token: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(path)
        self._token = token
        self._mutex = threading.Lock()
        self._outbox: deque[pb.SessionResponse] = deque()

    def enter(self, group: str, rank: int) -> None:
        """Says that a rank is here: what it is asked comes from now on."""
        self.hold(pb.SessionResponse(hello=pb.SessionHello(token=self._token, name=f"{group}.{rank}")))
        self.send()

    def hold(self, response: pb.SessionResponse) -> None:
        """Takes what is to be said next."""
        self._outbox.append(response)

    def send(self) -> None:
        """Says what is held, in order. Whoever finds that another is at it leaves theirs to that one."""
        while self._outbox and self._mutex.acquire(blocking=False):
            try:
                self._send()
            finally:
                self._mutex.release()

    def flush(self) -> None:
        """Blocks until all that was said is sent."""
        with self._mutex:
            self._send()

    def _send(self) -> None:
        while self._outbox:
            said = merged(self._outbox.popleft() for _ in range(len(self._outbox)))
            with suppress(OSError):  # The driver has gone, and this process ends by another way.
                self._sock.sendall(b"".join(framed(one.SerializeToString()) for one in said), socket.MSG_NOSIGNAL)

    def listen(self, handle: Callable[[pb.SessionRequest], None]) -> None:
        """Starts to hear."""
        threading.Thread(target=self._run, args=(handle,), name="control", daemon=True).start()

    def _run(self, handle: Callable[[pb.SessionRequest], None]) -> None:
        incoming = FrameReader(self._sock)
        while (frames := incoming.read()) is not None:
            for frame in frames:
                handle(pb.SessionRequest.FromString(frame))
