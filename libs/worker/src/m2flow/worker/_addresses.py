"""Who is reached where, in a run of several machines.

Endpoints of one machine find each other in the run's directory. Those on others listen at a port, and everyone who is
not on the same machine is told of it: what has started already by a message, what starts later with its order.
"""

import socket
from collections.abc import Iterable
from typing import NamedTuple

from m2flow.comm import Endpoint

_DRIVER = "driver"


class _Place(NamedTuple):
    host: str
    address: str


class AddressBook:
    """The endpoints of a run by name, each with its machine: the host of its agent, "" for the driver's own."""

    def __init__(self, endpoint: Endpoint, hosts: Iterable[str]) -> None:
        """Where `hosts` names another machine, the driver's endpoint listens. Raises CommError where it cannot."""
        self._endpoint = endpoint
        self._places: dict[str, _Place] = {}
        self._own_host = next((_way_to(host) for host in hosts if host), "")
        if self._own_host:
            self._places[_DRIVER] = _Place("", endpoint.listen(f"{self._own_host}:0"))

    def host_of(self, host: str) -> str:
        """Where a rank whose agent has this host listens; empty in a run of one machine."""
        return self._own_host and (host or self._own_host)

    def elsewhere(self, host: str) -> dict[str, str]:
        """The addresses of all that is not on that machine."""
        return {name: place.address for name, place in self._places.items() if place.host != host}

    def enter(self, name: str, host: str, address: str) -> None:
        """An endpoint has started, perhaps where there was another of its name."""
        self._places[name] = _Place(host, address)
        self._endpoint.add_address(name, address if host else "")

    def forget(self, name: str) -> None:
        """An endpoint has gone for good."""
        self._places.pop(name, None)


def _way_to(host: str) -> str:
    """The address of this machine from which packets to a host leave. None is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if family == socket.AF_INET6 else own
