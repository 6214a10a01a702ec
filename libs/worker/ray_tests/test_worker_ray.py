"""The conformance suite on a real Ray cluster of two nodes on this machine."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from m2flow.worker import Cluster, LaunchError, Session, WorkerFailed, find_cluster, launch_run
from m2flow.worker.launchers import ray as launcher
from m2flow.worker.launchers.ray import ray_cluster
from m2flow.worker.testing import Probe
from m2flow.worker.testing.conformance import LauncherConformance

pytestmark = [pytest.mark.medium, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def two_nodes() -> Iterator[RayCluster]:
    """One cluster for the session, under an address of its own."""
    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class TestRay(LauncherConformance):
    launcher = "ray"

    @classmethod
    def launch(cls) -> Session:
        return launch_run(Cluster.virtual(2, num_nodes=2), launcher="ray", on_log=lambda *_: None)


def test_the_devices_of_all_nodes_are_found() -> None:
    cluster = ray_cluster()
    assert cluster.nodes == ("node0", "node1")
    # As many cores as Ray was told of, not as many as the machine has.
    assert [device.node for device in cluster.devices if device.kind == "cpu"] == ["node0", "node1"]


def test_as_many_cores_are_taken_as_are_asked_for() -> None:
    assert [(one.node, one.kind) for one in find_cluster("ray", 1).devices if one.kind == "cpu"] == [("node0", "cpu")]
    with pytest.raises(ValueError, match="cpu_slots: got 3, want 0 to 2, the cores that Ray has: lower it"):
        find_cluster("ray", 3)


def test_a_run_claims_its_cores_from_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ray_cluster()
    with launch_run(cluster, launcher="ray", on_log=lambda *_: None) as session:
        assert session.start(Probe.group(), "all").echo(1).result(30) == [1, 1]
        assert ray.available_resources().get("CPU", 0) == 0
        monkeypatch.setattr(launcher, "_START_TIMEOUT_S", 3.0)
        with pytest.raises(LaunchError, match="waited 3 s for CPUs or GPUs that others hold"):
            launch_run(cluster, launcher="ray")
    end = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_more_nodes_than_ray_has_are_refused() -> None:
    with pytest.raises(LaunchError, match="got 3 nodes to start on, want at most 2"):
        launch_run(Cluster.virtual(3, num_nodes=3), launcher="ray")


def test_ranks_are_on_the_node_of_their_devices_and_end_with_its_actor() -> None:
    with launch_run(Cluster.virtual(2, num_nodes=2), launcher="ray", on_log=lambda *_: None) as session:
        group = session.start(Probe.group(device_kind="virtual"), "0-1")
        first, second = group.pids
        if os.geteuid() == 0:  # Ray's own are lower; only root may raise them again.
            assert os.getpriority(os.PRIO_PROCESS, first) == 0
        start = time.monotonic()
        ray.kill(session._links["node1"]._actor)  # type: ignore[attr-defined]
        with pytest.raises(WorkerFailed):
            group.sleep(60.0).result(10)
        assert time.monotonic() - start < 5
        assert session.failure is not None
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
