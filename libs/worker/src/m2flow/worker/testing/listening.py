"""Where processes listen, from what the kernel says of their sockets."""

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path


def listening_sockets(pid: int | str = "self") -> dict[str, str]:
    """The TCP sockets at which a process listens, by the names of their descriptors: the IP address of each."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(descriptor))
    found = {}
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            name = f"socket:[{fields[9]}]"
            if fields[3] == "0A" and name in held:
                found[name] = _ip_address(fields[1].partition(":")[0])
    return found


def addresses_that_others_reach(pids: Iterable[int]) -> set[str]:
    """The IP addresses, not of loopback, at which processes listen on TCP."""
    addresses = {address for pid in pids for address in listening_sockets(pid).values()}
    return {address for address in addresses if not ipaddress.ip_address(address).is_loopback}


def _ip_address(spelt: str) -> str:
    """The kernel spells words of 4 bytes, each from its last byte to its first."""
    words = [bytes.fromhex(spelt[at : at + 8])[::-1] for at in range(0, len(spelt), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
