import pytest

from m2flow.worker import Cluster, MemoryRefused, WorkerFailed, launch_run
from m2flow.worker.residency import ResidencyTable
from m2flow.worker.testing import SyntheticConfig, SyntheticWorker


def test_what_does_not_fit_is_refused_with_the_account() -> None:
    table = ResidencyTable(Cluster.virtual(2, memory_bytes=100 << 20).devices)
    table.claim("rollout.0", [0, 1], 60 << 20)
    table.claim("actor.0", [0], 30 << 20)
    with pytest.raises(MemoryRefused) as caught:
        table.claim("critic.0", [1, 0], 20 << 20)
    assert str(caught.value).splitlines() == [
        "critic.0 asks for 20.0 MiB on device 0 (virtual:0 on node0, 100.0 MiB), want at most 10.0 MiB: "
        "offload another, or give the group more devices",
        "device 0 (virtual:0 on node0, 100.0 MiB):",
        "  actor.0: 30.0 MiB",
        "  rollout.0: 60.0 MiB",
    ]
    assert table.held() == {0: {"actor.0": 30 << 20, "rollout.0": 60 << 20}, 1: {"rollout.0": 60 << 20}}


def test_a_claim_replaces_the_last_and_ends_with_its_owner() -> None:
    table = ResidencyTable(Cluster.virtual(1, memory_bytes=100).devices)
    table.claim("a", [0], 80)
    table.claim("a", [0], 100)
    table.claim("a", [0], 0)
    table.claim("b", [0], 100)
    table.release("b")
    table.claim("a", [0], 50)
    assert table.held() == {0: {"a": 50}}
    assert "a: 50 bytes" in table.account(0)


def test_unknown_sizes_are_never_refused() -> None:
    table = ResidencyTable(Cluster.virtual(1).devices)
    table.claim("a", [0], 1 << 50)
    assert table.held() == {0: {"a": 1 << 50}}


def test_virtual_devices_enforce_their_memory() -> None:
    cluster = Cluster.virtual(1, memory_bytes=100)
    with launch_run(cluster, launcher="inproc") as session:
        first = session.start(
            SyntheticWorker.group(SyntheticConfig(memory_bytes=80), name="first", device_kind="virtual"), "0"
        )
        assert session.residency.held() == {0: {"first.0": 80}}
        first.offload().wait(5)
        second = session.start(
            SyntheticWorker.group(SyntheticConfig(memory_bytes=80), name="second", device_kind="virtual"), "0"
        )
        assert second.resident_bytes().result(5) == [80]
        session.stop(second)
        assert session.residency.held() == {}
        first.onload().wait(5)
        session.start(SyntheticWorker.group(SyntheticConfig(memory_bytes=10), name="third", device_kind="virtual"), "0")
        with pytest.raises(WorkerFailed, match=r"MemoryRefused: fourth\.0 asks for 11 bytes"):
            session.start(
                SyntheticWorker.group(SyntheticConfig(memory_bytes=11), name="fourth", device_kind="virtual"), "0"
            )
