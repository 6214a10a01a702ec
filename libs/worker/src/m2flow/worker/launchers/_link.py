"""The driver's end of one session with an agent, over gRPC."""

import queue
import threading
from pathlib import Path

import grpc

from m2flow.comm.grpc_options import DIRECT
from m2flow.comm.token import TOKEN_KEY
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.proto.worker.v1 import worker_pb2_grpc
from m2flow.worker._node import addressees
from m2flow.worker._wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from m2flow.worker.errors import LaunchError
from m2flow.worker.launchers._boot import control_path
from m2flow.worker.launchers._control import ControlServer
from m2flow.worker.wiring import Wiring

# A peer whose machine or cable has gone sends no end-of-file: it is asked, and given up without an answer.
_KEEPALIVE_MS = 5000
_GREETING_S = 60.0

GRPC_OPTIONS = [
    *DIRECT,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_pings_without_data", 0),
]


def session_address(directory: Path, agent: str) -> str:
    """Where the agent of a private directory listens."""
    return f"unix:{directory / agent}.grpc"


class GrpcLink:
    """A session with an agent. `on_response` hears it on a thread of its own; `on_lost` its end, unless closed here."""

    def __init__(self, address: str, wiring: Wiring, *, token: str) -> None:
        self.host = address.rpartition(":")[0]
        self._outbox: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._wiring = wiring
        self._closing = False
        self.lost = False
        self._channel = grpc.insecure_channel(address, options=GRPC_OPTIONS)
        self.send(pb.SessionRequest(hello=pb.SessionHello(version=PROTOCOL_VERSION, name="driver")))
        self._responses = worker_pb2_grpc.WorkerServiceStub(self._channel).Session(
            iter(self._outbox.get, None), wait_for_ready=True, metadata=((TOKEN_KEY, token),)
        )
        self._greeted = threading.Event()
        self._refusal = ""
        self._reader = threading.Thread(target=self._read, name="session", daemon=True)
        self._reader.start()
        if not self._greeted.wait(_GREETING_S) or self._refusal:
            refusal = self._refusal or f"no answer within {_GREETING_S} s"
            self._channel.close()
            self.close()
            raise LaunchError(f"agent at {address}: {refusal}")

    def send(self, request: pb.SessionRequest) -> None:
        """Says something to the agent. Does not block."""
        self._outbox.put(request)

    def close(self) -> None:
        """Ends the session and waits until the agent has ended its ranks."""
        self._closing = True
        self._outbox.put(None)
        self._reader.join(5.0)
        self._channel.close()
        self._reader.join()

    def _read(self) -> None:
        reason = "the agent ended the session"
        try:
            for response in self._responses:
                if self._greeted.is_set():
                    self._wiring.on_response(response)
                else:
                    self._greeted.set()
        except grpc.RpcError as failure:
            reason = _details(failure)
        if not self._greeted.is_set():
            self._refusal = reason
            self._greeted.set()
        elif not self._closing:
            self.lost = True
            self._wiring.on_lost(reason)


class LocalLink(GrpcLink):
    """A session with an agent of this machine, whose ranks are told and heard directly."""

    def __init__(self, address: str, wiring: Wiring, control: ControlServer) -> None:
        self._control = control
        super().__init__(address, wiring, token=wiring.token)
        self.host = ""

    def send(self, request: pb.SessionRequest) -> None:
        """Says something to the agent, or to ranks. Does not block."""
        if keys := addressees(request):
            self._control.send(keys, request.SerializeToString())
        if request.WhichOneof("kind") not in ("call", "attach", "cancel", "peers"):
            super().send(request)

    def close(self) -> None:
        """Ends the session and waits until the agent has ended its ranks."""
        super().close()
        self._control.close()


def control_server(wiring: Wiring, agent: str) -> ControlServer:
    """Listens for the ranks of an agent of this machine; made before the agent is started."""
    return ControlServer(control_path(wiring.directory, agent), wiring.token, wiring.on_response)


def _details(failure: object) -> str:
    """What the other end said; a failed stream is its own error object."""
    return str(failure.details() if isinstance(failure, grpc.Call) else failure)
