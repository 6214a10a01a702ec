"""Ranks on the nodes of a Ray cluster: Ray finds, places, starts and watches one agent on each node.

An actor per node holds the node's agent as a child process; the driver's session goes to the agent itself. On the
driver's own machine, which may be several nodes of Ray, agents share the run's private directory, so that ranks reach
each other through shared memory. Ray's CPU and GPU counts are not claimed: a run is given whole nodes.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from m2flow.worker._python import child_environment
from m2flow.worker.cluster import Cluster
from m2flow.worker.errors import LaunchError
from m2flow.worker.launchers._agent_process import AgentOptions, AgentProcess
from m2flow.worker.launchers._link import GrpcLink, LocalLink, control_server
from m2flow.worker.session import Link, Wiring

_START_TIMEOUT_S = 120.0


class NodeActor:
    """Lives on a node of Ray and holds its agent, which ends when it does."""

    def __init__(self) -> None:
        self._agent: AgentProcess | None = None
        self._own = ""

    def devices(self) -> list[dict[str, Any]]:
        """The core slots and CUDA devices of this node."""
        return [
            {"kind": one.kind, "memory_bytes": one.memory_bytes, "labels": dict(one.labels), "cores": one.cores}
            for one in Cluster.local().devices
        ]

    def start(self, directory: str, token: str, agent: str, preload: Sequence[str]) -> tuple[str, bool]:
        """Starts the agent; its address, and whether it shares the driver's machine."""
        shared = Path(directory).is_dir()
        if shared:
            options = AgentOptions(
                Path(directory), token, agent=agent, preload=preload, owns_directory=False, driver_hears=True
            )
        else:
            self._own = tempfile.mkdtemp(prefix="m2flow-")
            address = f"{ray.util.get_node_ip_address()}:0"
            options = AgentOptions(Path(self._own), token, agent=agent, address=address, preload=preload)
        self._agent = AgentProcess(options)
        return self._agent.address, shared

    def end(self) -> None:
        """Ends the agent and what is left of it."""
        if self._agent is not None:
            self._agent.end()
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)


class RayLink:
    """A session with the agent of one node, and the actor that holds it."""

    def __init__(self, actor: Any, link: GrpcLink) -> None:
        self._actor = actor
        self._link = link

    @property
    def lost(self) -> bool:
        """Whether the agent has gone, unasked."""
        return self._link.lost

    def send(self, request: Any) -> None:
        """Says something. Does not block."""
        self._link.send(request)

    def close(self) -> None:
        """Ends the session, the agent and the actor."""
        self._link.close()
        # An error means that the node has gone, and its agent with it.
        with suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(self._actor.end.remote(), timeout=10.0)
        ray.kill(self._actor)


def ray_cluster() -> Cluster:
    """The core slots and CUDA devices of all living nodes of Ray, named node0, node1 ... in the order of their ids.

    Blocks; raises LaunchError where Ray is not initialised.
    """
    actors = [_actor(node) for node in _nodes()]
    found = ray.get([actor.devices.remote() for actor in actors], timeout=_START_TIMEOUT_S)
    for actor in actors:
        ray.kill(actor)
    return Cluster.from_nodes({f"node{number}": devices for number, devices in enumerate(found)})


def connect(nodes: Sequence[str], wiring: Wiring) -> Mapping[str, Link]:
    """An agent on as many nodes of Ray, in the order of their ids."""
    alive = _nodes()
    if len(nodes) > len(alive):
        raise LaunchError(f"ray: got {len(nodes)} nodes to start on, want at most {len(alive)}, those that are alive")
    actors = [_actor(node) for node, _ in zip(alive, nodes, strict=False)]
    servers = {name: control_server(wiring, f"agent.{name}") for name in nodes}
    try:
        starting = [
            actor.start.remote(str(wiring.directory), wiring.token, f"agent.{name}", list(wiring.preload))
            for actor, name in zip(actors, nodes, strict=True)
        ]
        links: dict[str, Link] = {}
        for actor, name, (address, shared) in zip(
            actors, nodes, ray.get(starting, timeout=_START_TIMEOUT_S), strict=True
        ):
            link = LocalLink(address, wiring, servers[name]) if shared else GrpcLink(address, wiring)
            links[name] = RayLink(actor, link)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        for server in servers.values():
            server.close()
        raise
    return links


def _nodes() -> list[str]:
    if not ray.is_initialized():
        raise LaunchError(
            'ray: it is not initialised: call ray.init(address=...) first, "local" for a cluster of its own'
        )
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _actor(node: str) -> Any:
    placed = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    environment = {"env_vars": {"PYTHONPATH": child_environment()["PYTHONPATH"]}}
    return ray.remote(NodeActor).options(num_cpus=0, scheduling_strategy=placed, runtime_env=environment).remote()
