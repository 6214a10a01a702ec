"""Ranks as threads of this process: for a debugger, and for many light ranks. What a thread cannot do is refused."""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from m2flow.comm import Endpoint
from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._host import RankHost, deliver
from m2flow.worker._node import Emit, NodeAgent, RankKey
from m2flow.worker.device import Device
from m2flow.worker.errors import RefusedError
from m2flow.worker.wiring import Link, Wiring

_CLOSE_S = 2.0


class _Direct:
    """Reports at once, by a call."""

    def __init__(self, emit: Emit) -> None:
        self.hold = emit

    def send(self) -> None:
        """Nothing is held."""


class ThreadRanks:
    """Ranks that are threads."""

    def __init__(self, directory: Path, token: str, emit: Emit) -> None:
        self._directory = directory
        self._token = token
        self._emit = emit
        self._hosts: dict[RankKey, RankHost] = {}
        self._threads: dict[RankKey, threading.Thread] = {}

    def start(self, order: pb.StartWorker) -> None:
        key = (order.group, order.rank)
        open_endpoint = partial(Endpoint, self._directory, token=self._token)
        host = self._hosts[key] = RankHost(order, open_endpoint, _Direct(self._emit))
        name = f"{order.group}.{order.rank}"
        thread = self._threads[key] = threading.Thread(target=self._run, args=(key, host), name=name, daemon=True)
        thread.start()

    def ask(self, keys: Sequence[RankKey], request: pb.SessionRequest) -> None:
        deliver(request, [self._hosts[key] for key in keys])

    def stop(self, key: RankKey, grace_s: float) -> None:
        self.ask([key], pb.SessionRequest(stop=pb.StopWorker(grace_s=grace_s)))

    def kill(self, key: RankKey) -> None:
        raise RefusedError(f"{key[0]}.{key[1]}: inproc ranks are threads, and a thread cannot be killed: use process")

    def close(self) -> None:
        for key in self._hosts:
            self.stop(key, 0.0)
        end = time.monotonic() + _CLOSE_S
        for key, thread in self._threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            self._hosts[key].join(max(0.0, end - time.monotonic()))
            for phase in self._hosts[key].busy_with():
                print(f"inproc: {key[0]}.{key[1]} is still in {phase!r}; a thread cannot be killed", file=sys.stderr)

    def _run(self, key: RankKey, host: RankHost) -> None:
        built = host.run()
        self._emit(pb.SessionResponse(stopped=pb.Stopped(group=key[0], rank=key[1], exit_code=0 if built else 1)))


class InprocLink:
    """A session without a wire."""

    lost = False
    host = ""

    def __init__(self, wiring: Wiring) -> None:
        self._node = NodeAgent(partial(ThreadRanks, wiring.directory, wiring.token), wiring.on_response)

    def send(self, request: pb.SessionRequest) -> None:
        """Does it here and now."""
        self._node.handle(request)

    def close(self) -> None:
        """Ends the threads, as far as they let themselves be ended."""
        self._node.close()


def connect(nodes: Mapping[str, Sequence[Device]], wiring: Wiring) -> Mapping[str, Link]:
    """All nodes in this process."""
    for module in wiring.preload:
        import_module(module)
    return dict.fromkeys(nodes, InprocLink(wiring))
