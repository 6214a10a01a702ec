import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.worker import Cluster, Device, Placement, PlacementError, parse_placement
from m2flow.worker.cluster import _visible_cuda

CLUSTER = Cluster.of(
    [
        *Cluster.virtual(8, num_nodes=2, memory_bytes=100).devices,
        Device(0, "node1", "robot", 0, labels={"arm": "left"}),
        Device(0, "node1", "robot", 1, labels={"arm": "right"}),
    ]
)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [[0]]),
        ("0-3", [[0], [1], [2], [3]]),
        ("0,2,5-6", [[0], [2], [5], [6]]),
        ("node1:0-2", [[4], [5], [6]]),
        ("node1:virtual:1", [[5]]),
        ("virtual:7", [[7]]),
        ("virtual:all", [[n] for n in range(8)]),
        ("robot:all", [[8], [9]]),
        ("label=robot", [[8], [9]]),
        ("label=left", [[8]]),
        ("arm=right", [[9]]),
        ("node0:all, node1:0", [[0], [1], [2], [3], [4]]),
        ("0-1*2", [[0], [0], [1], [1]]),
        ("0-3/2", [[0, 1], [2, 3]]),
        (["0-1", "node1:0"], [[0], [1], [4]]),
    ],
)
def test_what_the_grammar_says(text: str | list[str], ranks: list[list[int]]) -> None:
    assert parse_placement(text, CLUSTER).ranks == tuple(map(tuple, ranks))


def test_all_takes_the_kind_that_is_asked_for() -> None:
    assert parse_placement("all", CLUSTER, kind="robot").ranks == ((8,), (9,))


def test_devices_per_rank_from_the_group() -> None:
    assert parse_placement("0-3", CLUSTER, devices_per_rank=2).ranks == ((0, 1), (2, 3))
    assert parse_placement("0-3", CLUSTER, devices_per_rank=None).ranks == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("text", "at", "got", "want"),
    [
        ("", 1, "nothing", '"0-3"'),
        ("0,,2", 3, "nothing between commas", '"all"'),
        ("0-3,2", 5, "device 2 a second time", '"0*2"'),
        ("3-1", 1, "falls", '"1-3"'),
        ("0-12", 1, "beyond the end", "0 to 9"),
        ("node1:0-9", 7, "beyond the end", "0 to 5"),
        ("nod1:0", 1, "no node and no kind", "'node1'"),
        ("cpu:0", 1, "no node and no kind", "virtual"),
        ("0-x", 1, "'0-x'", '"0-3"'),
        ("label=robt", 1, "no device with", "label=robot"),
        ("arm=middle", 1, "no device with", "arm="),
        ("all", 1, "mixed kinds", '"robot:all"'),
        ("0-2/2", 4, "do not divide", "2 or 4"),
        ("0-3/0", 5, "'0'", "positive number"),
        ("0-3*x", 5, "'x'", "positive number"),
        ("0,2/2", 1, "gap", "neighbouring"),
        ("3-4/2", 1, "nodes", "one node"),
    ],
)
def test_every_mistake_shows_its_place_and_what_would_be_right(text: str, at: int, got: str, want: str) -> None:
    with pytest.raises(PlacementError) as caught:
        parse_placement(text, CLUSTER)
    message = str(caught.value)
    assert message.startswith(f"placement {text!r}, at {at}: got")
    assert got in message
    assert want in message
    assert message.splitlines()[-1] == " " * (at - 1) + "^"


def test_a_kind_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlacementError, match="no device of kind 'cuda'"):
        parse_placement("all", CLUSTER, kind="cuda")
    with pytest.raises(PlacementError, match="device 8, which is a 'robot'"):
        parse_placement("8", CLUSTER, kind="virtual")


def test_ranks_per_device_and_devices_per_rank_exclude_each_other() -> None:
    with pytest.raises(PlacementError, match="one or the other"):
        parse_placement("0-3*2", CLUSTER, devices_per_rank=2)


@given(st.text(alphabet="0123456789-,*/:=alrobtnde ", max_size=20))
def test_no_text_escapes_the_parser(text: str) -> None:
    try:
        placement = parse_placement(text, CLUSTER)
    except PlacementError:
        return
    placement.check(CLUSTER)


def test_a_placement_made_by_hand_is_checked() -> None:
    with pytest.raises(PlacementError, match=r"rank 1 got devices \[99\], want some of 0 to 9"):
        Placement(((0,), (99,))).check(CLUSTER)
    with pytest.raises(PlacementError, match="mixed kinds"):
        Placement(((7, 8),)).check(CLUSTER)
    with pytest.raises(PlacementError, match="got 3 devices, want a positive multiple of 2"):
        Placement.of([0, 1, 2], 2)
    assert Placement.of([0, 1, 1, 2], 2).device_ids == (0, 1, 2)


def test_local_slots_split_the_cores_that_may_be_used() -> None:
    cores = sorted(os.sched_getaffinity(0))
    slots = [device for device in Cluster.local().devices if device.kind == "cpu"]
    assert [device.cores for device in slots] == [(core,) for core in cores]
    one = [device for device in Cluster.local(1).devices if device.kind == "cpu"]
    assert [device.cores for device in one] == [tuple(cores)]
    assert one[0].memory_bytes > 1 << 28
    with pytest.raises(ValueError, match="place several on one slot"):
        Cluster.local(len(cores) + 1)


SMI = """\
0, GPU-aa, NVIDIA H200, 143771
1, GPU-bb, NVIDIA H200, 143771
"""


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [(None, ["GPU-aa", "GPU-bb"]), ("1", ["GPU-bb"]), ("GPU-bb,0", ["GPU-bb", "GPU-aa"]), ("", [])],
)
def test_cuda_devices_are_those_that_may_be_seen(visible: str | None, uuids: list[str]) -> None:
    devices = _visible_cuda(SMI, visible)
    assert [device.labels["uuid"] for device in devices] == uuids
    assert [device.index for device in devices] == list(range(len(uuids)))
    assert all(device.memory_bytes == 143771 << 20 and device.kind == "cuda" for device in devices)


def test_a_cuda_device_that_shares_the_host_s_memory_has_none_that_is_known() -> None:
    (device,) = _visible_cuda("0, GPU-cc, NVIDIA GB10, [N/A]\n", None)
    assert (device.memory_bytes, device.labels["model"]) == (0, "NVIDIA GB10")


def test_resources_and_nodes() -> None:
    cluster = Cluster.virtual(2).with_resource("robot", count=2, labels={"arm": "left"})
    assert [device.name for device in cluster.devices] == ["virtual:0", "virtual:1", "robot:0", "robot:1"]
    assert cluster.nodes == ("node0",)
    assert len(cluster.on("node0")) == 4
    with pytest.raises(ValueError, match="a word of your own"):
        cluster.with_resource("cuda")
    with pytest.raises(ValueError, match="multiple of the nodes"):
        Cluster.virtual(3, num_nodes=2)
    with pytest.raises(ValueError, match=r"use Cluster\.of"):
        Cluster((Device(3, "node0", "cpu", 0),))
