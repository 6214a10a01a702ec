"""Two hosts on one machine: network namespaces joined by a forwarder of packets that delays, drops, limits and cuts.

Each host is a process in a namespace of its own whose only way out is a TUN device. The device's descriptor is handed
to the forwarder, which moves the packets: nothing of the machine's own network is touched, and no kernel module beyond
TUN is needed.

    python network_of_two.py host SOCKET OWN OTHER ARGUMENT...   becomes `python ARGUMENT...` on the host OWN
    python network_of_two.py forward SOCKET                      forwards, told by lines of JSON on its input
"""

import array
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
MTU = 9000
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_SIOCSIFADDR, _SIOCSIFDSTADDR, _SIOCSIFMTU = 0x8916, 0x8918, 0x8922
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
# What waits in a limited line before packets are dropped, in seconds of its rate.
_QUEUE_S = 0.1


def enter_namespace() -> None:
    """Moves this process to a network namespace of its own; raises OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace can be made")


def open_tun(own: str, other: str) -> int:
    """Returns the descriptor of a new TUN device with an address of its own and one at its far end."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", b"m2flow0", _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, address in ((_SIOCSIFADDR, own), (_SIOCSIFDSTADDR, other)):
            packed = struct.pack("16sHH4s8x", b"m2flow0", socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, request, packed)
        fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si12x", b"m2flow0", MTU))
        for name in (b"m2flow0", b"lo"):
            flags = struct.unpack("16sH", fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH14x", name, 0))[:18])[1]
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | _IFF_UP))
    return tun


def why_not() -> str:
    """Returns why two hosts cannot be made here; empty where they can."""
    program = "import network_of_two as n; n.enter_namespace(); n.open_tun('10.77.0.1', '10.77.0.2')"
    command = [sys.executable, "-c", program]
    tried = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30, check=False)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


@dataclass
class Line:
    """One direction between two devices. A rate of 0 is no limit."""

    source: int
    target: int
    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0
    cut: bool = False
    free_at: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def due(self, size: int, now: float) -> float | None:
        """Returns when a packet that arrives now leaves; None for one that is lost."""
        if self.cut or self.rng.random() < self.loss:
            return None
        if not self.bytes_per_s:
            return now + self.delay_s
        start = max(now, self.free_at)
        if start - now > _QUEUE_S:
            return None
        self.free_at = start + size / self.bytes_per_s
        return self.free_at + self.delay_s


def forward(devices: list[int], commands: int) -> None:
    """Moves packets between two devices until the commands end; each is a line of JSON that sets fields of a Line."""
    first, second = devices
    lines = {first: Line(first, second), second: Line(second, first)}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*devices, commands], [], [], timeout)
        if commands in ready:
            told = os.read(commands, 4096)
            if not told:
                return
            for line in lines.values():
                for name, value in json.loads(told.splitlines()[-1]).items():
                    setattr(line, name, value)
            print("done", flush=True)
        now = time.monotonic()
        for device in devices:
            for _ in range(64 if device in ready else 0):
                try:
                    packet = os.read(device, MTU + 64)
                except BlockingIOError:
                    break
                due = lines[device].due(len(packet), now)
                if due is not None:
                    count += 1
                    heapq.heappush(waiting, (due, count, lines[device].target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):
                os.write(target, packet)


class Network:
    """The two hosts' processes and the forwarder between them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ours: list[subprocess.Popen[str]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "devices"))
        self._listener.listen()
        self._listener.settimeout(30)
        self._forwarder = self._start("forward", str(directory / "devices"))
        self._taker, _ = self._listener.accept()

    def host(self, name: str, *arguments: str) -> "subprocess.Popen[str]":
        """Starts `python ARGUMENT...` on a host, its lines to be read from stdout."""
        other = next(address for host, address in ADDRESSES.items() if host != name)
        process = self._start("host", str(self._directory / "devices"), ADDRESSES[name], other, *arguments)
        giver, _ = self._listener.accept()
        with giver:
            giver.settimeout(30)
            _, found, _, _ = socket.recv_fds(giver, 1, 1)
        socket.send_fds(self._taker, [b"x"], found)
        os.close(found[0])
        return process

    def set(self, **fields: Any) -> None:
        """Changes both directions: delay_s, loss, bytes_per_s, cut. Returns when it is so."""
        assert self._forwarder.stdin is not None
        assert self._forwarder.stdout is not None
        self._forwarder.stdin.write(json.dumps(fields) + "\n")
        self._forwarder.stdin.flush()
        assert self._forwarder.stdout.readline() == "done\n"

    def close(self) -> None:
        """Ends everything."""
        self._listener.close()
        self._taker.close()
        for process in reversed(self._ours):
            process.kill()
            process.communicate()

    def _start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-W", "error", __file__, *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._ours.append(subprocess.Popen(command, **pipes))
        return self._ours[-1]


@contextlib.contextmanager
def network(directory: Path) -> Iterator[Network]:
    """Gives a network whose sockets lie in a directory, and ends it."""
    made = Network(directory)
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    role, path, *rest = sys.argv[1:]
    way = socket.socket(socket.AF_UNIX)
    way.connect(path)
    if role == "host":
        enter_namespace()
        tun = open_tun(*rest[:2])
        way.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [tun]))])
        os.close(tun)
        way.close()
        os.execv(sys.executable, [sys.executable, "-W", "error", *rest[2:]])
    devices = [socket.recv_fds(way, 1, 1)[1][0] for _ in range(2)]
    with contextlib.suppress(BrokenPipeError):
        forward(devices, sys.stdin.fileno())


if __name__ == "__main__":
    main()
