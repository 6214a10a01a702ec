"""The agent process of one machine: it serves the driver's session and starts workers through its zygote."""

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.proto.worker.v1 import worker_pb2_grpc
from m2flow.worker._node import Emit, NodeAgent, RankKey, Ranks
from m2flow.worker._tokens import TokenInterceptor
from m2flow.worker._wire import PROTOCOL_VERSION, failure_report, merged
from m2flow.worker.launchers._boot import Boot
from m2flow.worker.launchers._control import ControlServer
from m2flow.worker.launchers._frames import FrameReader, send_frame
from m2flow.worker.launchers._link import GRPC_OPTIONS, session_address

# For the stream's last words: the driver waits for them.
_GOODBYE_S = 1.0


class ProcessRanks:
    """Ranks that are processes, forked by a zygote; a driver elsewhere reaches them through this process."""

    def __init__(self, boot: Boot, zygote: socket.socket, emit: Emit) -> None:
        self._emit = emit
        self._zygote = zygote
        self._sending = threading.Lock()
        self._control = None if boot.driver_hears else ControlServer(boot.control, boot.token, emit)
        self._closing = False
        self.lost = threading.Event()
        threading.Thread(target=self._read, name="zygote", daemon=True).start()

    def start(self, order: pb.StartWorker) -> None:
        self._tell(pb.SessionRequest(start=order))

    def ask(self, keys: Sequence[RankKey], request: pb.SessionRequest) -> None:
        if self._control is not None:
            self._control.send(keys, request.SerializeToString())

    def stop(self, key: RankKey, grace_s: float) -> None:
        request = pb.SessionRequest(stop=pb.StopWorker(group=key[0], rank=key[1], grace_s=grace_s))
        if grace_s > 0:
            self.ask([key], request)
        self._tell(request)

    def kill(self, key: RankKey) -> None:
        self._tell(pb.SessionRequest(kill=pb.KillWorker(group=key[0], rank=key[1])))

    def close(self) -> None:
        self._closing = True
        if self._control is not None:
            self._control.close()
        self._zygote.shutdown(socket.SHUT_WR)
        self.lost.wait()

    def _tell(self, request: pb.SessionRequest) -> None:
        with self._sending:
            send_frame(self._zygote, request)

    def _read(self) -> None:
        incoming = FrameReader(self._zygote)
        while (frames := incoming.read()) is not None:
            for frame in frames:
                self._emit(pb.SessionResponse.FromString(frame))
        self.lost.set()
        if not self._closing:
            cause = "the zygote, the parent of this machine's workers, ended"
            self._emit(failure_report("", 0, pid=os.getpid(), phase="idle", cause=cause))


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one session, after which there is nothing left to serve."""

    def __init__(self, ranks_for: Callable[[Emit], Ranks], name: str) -> None:
        self._ranks_for = ranks_for
        self._name = name
        self.ended = threading.Event()

    def Session(
        self, request_iterator: Iterator[pb.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.SessionResponse]:
        """The stream between the driver and this node."""
        self._greet(next(request_iterator, None), context)
        outbox: queue.SimpleQueue[pb.SessionResponse | None] = queue.SimpleQueue()
        outbox.put(pb.SessionResponse(hello=pb.SessionHello(version=PROTOCOL_VERSION, name=self._name)))
        node = NodeAgent(self._ranks_for, outbox.put)
        reader = threading.Thread(target=_read, args=(request_iterator, node, outbox), name="session", daemon=True)
        reader.start()
        try:
            yield from _told(outbox)
        finally:
            node.close()
            self.ended.set()

    def _greet(self, first: pb.SessionRequest | None, context: grpc.ServicerContext) -> None:
        hello = first.hello if first is not None else pb.SessionHello()
        if hello.version != PROTOCOL_VERSION:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"session: the driver speaks version {hello.version!r}, this agent {PROTOCOL_VERSION!r}: "
                "install the same m2flow-worker on both",
            )


def serve(boot: Boot, zygote: socket.socket) -> None:
    """Serves one session, then ends. Blocks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    service = WorkerService(lambda emit: ProcessRanks(boot, zygote, emit), boot.agent)
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[TokenInterceptor(boot.token)], options=GRPC_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    address = boot.address or session_address(boot.path, boot.agent)
    port = server.add_insecure_port(address)
    server.start()
    with os.fdopen(boot.ready_fd, "w") as ready:
        ready.write(f"{address.rpartition(':')[0]}:{port}" if boot.address else address)
    threading.Thread(target=_end_with_driver, args=(boot.liveness_fd, service.ended), daemon=True).start()
    service.ended.wait()
    server.stop(_GOODBYE_S).wait()


def _end_with_driver(liveness_fd: int, ended: threading.Event) -> None:
    while os.read(liveness_fd, 1):
        pass
    ended.set()


def _read(
    requests: Iterator[pb.SessionRequest], node: NodeAgent, outbox: "queue.SimpleQueue[pb.SessionResponse | None]"
) -> None:
    try:
        for request in requests:
            node.handle(request)
    except grpc.RpcError:
        pass  # The driver has gone; what follows is the same as when it says goodbye.
    finally:
        outbox.put(None)


def _told(outbox: "queue.SimpleQueue[pb.SessionResponse | None]") -> Iterator[pb.SessionResponse]:
    """What is to be sent until None, in order."""
    while (response := outbox.get()) is not None:
        waiting: list[pb.SessionResponse | None] = [response]
        while waiting[-1] is not None and not outbox.empty():
            waiting.append(outbox.get())
        yield from merged(one for one in waiting if one is not None)
        if waiting[-1] is None:
            return
