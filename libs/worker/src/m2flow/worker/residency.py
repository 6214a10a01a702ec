"""Who holds how many bytes on which device, and the refusal of what does not fit.

A claim states what one rank holds on each of its devices from now on; a later claim replaces it, one of 0 ends it, and
so does the rank's end. Devices whose memory size is not known are accounted, never refused.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.comm import Endpoint, RemoteError, Request
from m2flow.worker.device import Device
from m2flow.worker.errors import MemoryRefused

SERVICE = "residency"


class ResidencyTable:
    """The account of a cluster's memory. Not thread-safe."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = {device.id: device for device in devices}
        self._claims: dict[tuple[int, str], int] = {}

    def claim(self, owner: str, device_ids: Sequence[int], size_bytes: int) -> None:
        """`owner` holds `size_bytes` on each of these devices. Raises MemoryRefused, with the account, on too much."""
        for number in device_ids:
            capacity = self._devices[number].memory_bytes
            others = sum(held for (device, name), held in self._claims.items() if device == number and name != owner)
            if capacity and size_bytes and others + size_bytes > capacity:
                raise MemoryRefused(
                    f"{owner} asks for {_size(size_bytes)} on {self._title(number)}, want at most "
                    f"{_size(max(0, capacity - others))}: offload another, or give the group more devices\n"
                    f"{self.account(number)}"
                )
        for number in device_ids:
            if size_bytes:
                self._claims[number, owner] = size_bytes
            else:
                self._claims.pop((number, owner), None)

    def release(self, owner: str) -> None:
        """Ends all claims of an owner."""
        self._claims = {key: held for key, held in self._claims.items() if key[1] != owner}

    def held(self) -> Mapping[int, Mapping[str, int]]:
        """Bytes by device id and owner."""
        table: dict[int, dict[str, int]] = {}
        for (number, owner), held in sorted(self._claims.items()):
            table.setdefault(number, {})[owner] = held
        return table

    def account(self, device_id: int) -> str:
        """The account of one device in words, a line each holder."""
        holders = [(owner, held) for (number, owner), held in sorted(self._claims.items()) if number == device_id]
        lines = [f"  {owner}: {_size(held)}" for owner, held in holders] or ["  nobody holds anything"]
        return "\n".join([f"{self._title(device_id)}:", *lines])

    def _title(self, device_id: int) -> str:
        device = self._devices[device_id]
        return f"device {device.id} ({device.name} on {device.node}, {_size(device.memory_bytes)})"


class ResidencyServer:
    """Serves the account at an endpoint. Thread-safe."""

    def __init__(self, endpoint: Endpoint, devices: Sequence[Device]) -> None:
        self._mutex = threading.Lock()
        self._table = ResidencyTable(devices)
        endpoint.handle(SERVICE, self._handle)
        endpoint.on_peer_lost(self.release)

    def held(self) -> Mapping[int, Mapping[str, int]]:
        """Bytes by device id and owner, now."""
        with self._mutex:
            return self._table.held()

    def release(self, owner: str) -> None:
        """Ends all claims of a rank that has ended."""
        with self._mutex:
            self._table.release(owner)

    def _handle(self, request: Request) -> Any:
        device_ids, size_bytes = request.args
        with self._mutex:
            self._table.claim(request.peer, device_ids, size_bytes)


def claim_memory(endpoint: Endpoint, device_ids: Sequence[int], size_bytes: int) -> None:
    """This endpoint's rank holds `size_bytes` on each of the devices from now on. Blocks for the answer.

    Raises MemoryRefused, with the account of the device, where that does not fit.
    """
    try:
        endpoint.request("driver", SERVICE, "claim", (list(device_ids), size_bytes))
    except RemoteError as refusal:
        if refusal.type_name != MemoryRefused.__name__:
            raise
        raise MemoryRefused(refusal.message) from None


def _size(num_bytes: int) -> str:
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= width:
            return f"{num_bytes / width:.1f} {unit}"
    return f"{num_bytes} bytes"
