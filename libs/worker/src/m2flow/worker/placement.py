"""Which devices each rank of a group gets, and the one grammar in which to say so.

    placement := item ("," item)* [ "*" RANKS_PER_DEVICE | "/" DEVICES_PER_RANK ]
    item      := [ NODE ":" ] [ KIND ":" ] ( "all" | range | KEY "=" VALUE )
    range     := INT | INT "-" INT

A plain number is a global id; behind a node it counts that node's devices, behind a kind the devices of that kind.
"label=robot" takes the devices whose kind, or one of whose labels, is robot; another key is that label's value.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

from m2flow.worker.cluster import Cluster
from m2flow.worker.device import Device
from m2flow.worker.errors import PlacementError


@dataclass(frozen=True)
class Placement:
    """The device ids of each rank, in rank order."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, device_ids: Sequence[int], devices_per_rank: int | None = 1) -> "Placement":
        """Deals ids to ranks in order, `devices_per_rank` at a time (None: one rank has them all).

        Raises PlacementError where the ids do not divide.
        """
        width = len(device_ids) if devices_per_rank is None else devices_per_rank
        if width < 1 or not device_ids or len(device_ids) % width:
            raise PlacementError(
                f"placement: got {len(device_ids)} devices, want a positive multiple of {width} devices per rank"
            )
        return cls(tuple(tuple(device_ids[at : at + width]) for at in range(0, len(device_ids), width)))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def device_ids(self) -> tuple[int, ...]:
        """Every device, once, in order."""
        return tuple(sorted({number for rank in self.ranks for number in rank}))

    def check(self, cluster: Cluster) -> None:
        """Raises PlacementError on an id that the cluster has not, or a rank over kinds, nodes or gaps."""
        count = len(cluster.devices)
        if not self.ranks:
            raise PlacementError("placement: got no ranks, want at least one")
        for rank, ids in enumerate(self.ranks):
            beyond = [number for number in ids if not 0 <= number < count]
            if beyond or not ids:
                raise PlacementError(f"placement: rank {rank} got devices {list(ids)}, want some of 0 to {count - 1}")
            _check_rank(rank, [cluster.devices[number] for number in ids])


def parse_placement(
    text: str | Sequence[str], cluster: Cluster, *, kind: str = "", devices_per_rank: int | None = 1
) -> Placement:
    """Reads a placement, or a list of them, that shall hold devices of `kind` ("": of one kind, whichever).

    `devices_per_rank` deals the devices to ranks where the text itself does not say it ("/2"); None gives them all to
    one rank. Raises PlacementError on every mistake, with the text, the place in it, and what would be right.
    """
    if not isinstance(text, str):
        return parse_placement(",".join(text), cluster, kind=kind, devices_per_rank=devices_per_rank)
    reader = _Reader(text, cluster, kind)
    body, ranks_per_device, width = reader.suffix(devices_per_rank)
    devices = reader.devices(body)
    ids = [device.id for device in devices]
    if width is not None and len(ids) % width:
        raise reader.error(
            len(body),
            f"{len(ids)} devices do not divide into ranks of {width}",
            f"{len(ids) // width * width or width} or {(len(ids) // width + 1) * width} devices",
        )
    dealt = Placement.of([number for number in ids for _ in range(ranks_per_device)], width)
    try:
        dealt.check(cluster)
    except PlacementError as failure:
        raise reader.error(0, str(failure).removeprefix("placement: "), "neighbouring devices per rank") from None
    return dealt


def _check_rank(rank: int, devices: list[Device]) -> None:
    nodes = sorted({device.node for device in devices})
    kinds = sorted({device.kind for device in devices})
    if len(nodes) > 1:
        raise PlacementError(f"placement: rank {rank} got devices on nodes {nodes}, want one node")
    if len(kinds) > 1:
        raise PlacementError(f"placement: rank {rank} got devices of mixed kinds {kinds}, want one kind")
    ids = [device.id for device in devices]
    if any(after - before != 1 for before, after in pairwise(ids)):
        raise PlacementError(f"placement: rank {rank} got devices {ids} with a gap, want consecutive ids")


class _Reader:
    """One text being read; an error of it shows where."""

    def __init__(self, text: str, cluster: Cluster, kind: str) -> None:
        self._text = text
        self._cluster = cluster
        self._kind = kind

    def error(self, at: int, got: str, want: str) -> PlacementError:
        where = f"{self._text}\n{' ' * at}^"
        return PlacementError(f"placement {self._text!r}, at {at + 1}: got {got}, want {want}\n{where}")

    def suffix(self, devices_per_rank: int | None) -> tuple[str, int, int | None]:
        """The text without its "*4" or "/2", the ranks per device, the devices per rank."""
        found = re.search(r"[*/]", self._text)
        if found is None:
            return self._text, 1, devices_per_rank
        at = found.start()
        count = self._text[at + 1 :].strip()
        if not count.isdigit() or int(count) < 1:
            raise self.error(at + 1, repr(count), f'a positive number behind "{found.group()}"')
        if found.group() == "/":
            return self._text[:at], 1, int(count)
        if devices_per_rank != 1:
            raise self.error(
                at, f"several ranks on a device of a group with devices_per_rank={devices_per_rank}", "one or the other"
            )
        return self._text[:at], int(count), 1

    def devices(self, body: str) -> list[Device]:
        chosen: dict[int, Device] = {}
        at = 0
        for element in body.split(","):
            start = at + len(element) - len(element.lstrip())
            for device in self._element(element.strip(), start):
                if device.id in chosen:
                    raise self.error(
                        start,
                        f"device {device.id} a second time",
                        'each device once: "0*2" puts two ranks on one device',
                    )
                chosen[device.id] = device
            at += len(element) + 1
        kinds = sorted({device.kind for device in chosen.values()})
        if len(kinds) > 1:
            raise self.error(0, f"devices of mixed kinds {kinds}", f'one kind, such as "{kinds[0]}:all"')
        return list(chosen.values())

    def _element(self, element: str, at: int) -> list[Device]:
        if not element:
            raise self.error(at, "nothing between commas" if self._text.strip() else "nothing", _EXAMPLES)
        *scopes, last = element.split(":")
        pool = list(self._cluster.devices)
        for scope in scopes:
            pool = self._scope(scope, pool, at)
            at += len(scope) + 1
        if "=" in last:
            return self._labelled(last, pool, at)
        if last == "all":
            wanted = [device for device in pool if self._kind in ("", device.kind)]
            if not wanted:
                raise self.error(at, f"no device of kind {self._kind!r}", f"one of {_kinds(pool)}")
            return wanted
        return self._range(last, pool, at)

    def _scope(self, scope: str, pool: list[Device], at: int) -> list[Device]:
        inside = [device for device in pool if scope in (device.node, device.kind)]
        if not inside:
            known = sorted({device.node for device in pool}) + _kinds(pool)
            near = get_close_matches(scope, known, 1)
            want = f"{near[0]!r}" if near else f"a node or a kind: {', '.join(known)}"
            raise self.error(at, f"{scope!r}, which is no node and no kind", want)
        return inside

    def _labelled(self, element: str, pool: list[Device], at: int) -> list[Device]:
        key, value = (word.strip() for word in element.split("=", 1))
        if key == "label":
            found = [device for device in pool if device.has_label(value)]
        else:
            found = [device for device in pool if device.labels.get(key) == value]
        if not found:
            words = sorted({f"{k}={v}" for device in pool for k, v in device.labels.items()})
            words += [f"label={kind}" for kind in _kinds(pool)]
            near = get_close_matches(element, words, 1, 0.4)
            raise self.error(at, f"no device with {element!r}", repr(near[0]) if near else f"one of {words}")
        return found

    def _range(self, element: str, pool: list[Device], at: int) -> list[Device]:
        found = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", element)
        if found is None:
            raise self.error(at, repr(element), _EXAMPLES)
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if last < first:
            raise self.error(at, f"a range that falls, {element!r}", f'"{last}-{first}"')
        if last >= len(pool):
            raise self.error(
                at, f"{element!r}, beyond the end", f"0 to {len(pool) - 1}: there are {len(pool)} such devices"
            )
        devices = pool[first : last + 1]
        wrong = [device for device in devices if self._kind not in ("", device.kind)]
        if wrong:
            raise self.error(
                at, f"device {wrong[0].id}, which is a {wrong[0].kind!r}", f'devices of kind "{self._kind}"'
            )
        return devices


_EXAMPLES = '"all", "0-3", "node1:0-7", "cpu:0", "label=robot", or a list of these'


def _kinds(pool: Sequence[Device]) -> list[str]:
    return sorted({device.kind for device in pool})
