"""Ranks on the nodes of a Ray cluster: Ray finds, places, starts and watches one agent on each node.

An actor per node holds the node's agent as a child process; the driver's session goes to the agent itself. On the
driver's own machine, which may be several nodes of Ray, agents share the run's private directory, so that ranks reach
each other through shared memory. The actor claims from Ray what the run's cluster has on its node, a CPU for each core
of its slots and a GPU for each CUDA device, so that nothing else that Ray starts is given them.
"""

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from m2flow.worker._python import child_environment
from m2flow.worker.cluster import Cluster
from m2flow.worker.device import Device
from m2flow.worker.errors import LaunchError
from m2flow.worker.launchers._agent_process import AgentProcess
from m2flow.worker.launchers._boot import AgentOptions
from m2flow.worker.launchers._link import GrpcLink, LocalLink, control_server
from m2flow.worker.wiring import Link, Wiring

_START_TIMEOUT_S = 120.0


class NodeActor:
    """Lives on a node of Ray and holds its agent, which ends when it does."""

    def __init__(self) -> None:
        self._agent: AgentProcess | None = None
        self._own = ""

    def devices(self, num_cpus: int) -> list[dict[str, Any]]:
        """The slots of one core and the CUDA devices that Ray has to give on this node."""
        return [
            {"kind": one.kind, "memory_bytes": one.memory_bytes, "labels": dict(one.labels), "cores": one.cores}
            for one in Cluster.local().devices
            if one.kind != "cpu" or one.index < num_cpus
        ]

    def missing(self, uuids: Sequence[str]) -> list[str]:
        """Those of these CUDA devices that Ray has not given to this actor."""
        given = {one.labels.get("uuid") for one in Cluster.local().devices}
        return [uuid for uuid in uuids if uuid not in given]

    def start(self, directory: str, token: str, agent: str, preload: Sequence[str]) -> tuple[str, bool]:
        """Starts the agent; its address, and whether it shares the driver's machine."""
        # Ray lowers the priority of its processes below that of its own daemons; the run's workers would inherit that.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        shared = Path(directory).is_dir()
        if shared:
            options = AgentOptions(
                directory, token, agent=agent, preload=preload, owns_directory=False, driver_hears=True
            )
        else:
            self._own = tempfile.mkdtemp(prefix="m2flow-")
            address = f"{ray.util.get_node_ip_address()}:0"
            options = AgentOptions(self._own, token, agent=agent, address=address, preload=preload)
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

    @property
    def host(self) -> str:
        """The node's address; empty on the driver's own machine."""
        return self._link.host

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


def ray_cluster(cpu_slots: int | None = None) -> Cluster:
    """The devices that Ray has to give, of all its living nodes, named node0, node1 ... in the order of their ids.

    A "cpu" slot is one core; `cpu_slots` takes so many of them, of the first nodes. Where the program has not called
    `ray.init`, Ray is found or started as that does: the one at RAY_ADDRESS, or one of this machine that runs, or one
    of its own that ends with this process. Blocks; raises LaunchError where there is none at the address, or its GPUs
    are in use, ValueError on more slots than cores.
    """
    nodes = _nodes()
    # Without a claim Ray hides the GPUs.
    actors = [_actor(node, num_gpus=int(has.get("GPU", 0))) for node, has in nodes.items()]
    try:
        found = _answers(
            [one.devices.remote(int(has.get("CPU", 0))) for one, has in zip(actors, nodes.values(), strict=True)]
        )
    finally:
        for actor in actors:
            ray.kill(actor)
    cluster = Cluster.from_nodes({f"node{number}": devices for number, devices in enumerate(found)})
    if cpu_slots is None:
        return cluster
    cores = [one.id for one in cluster.devices if one.kind == "cpu"]
    if not 0 <= cpu_slots <= len(cores):
        raise ValueError(f"cpu_slots: got {cpu_slots}, want 0 to {len(cores)}, the cores that Ray has: lower it")
    return Cluster.of([one for one in cluster.devices if one.id not in cores[cpu_slots:]])


def connect(nodes: Mapping[str, Sequence[Device]], wiring: Wiring) -> Mapping[str, Link]:
    """An agent on as many nodes of Ray, in the order of their ids."""
    alive = list(_nodes())
    if len(nodes) > len(alive):
        raise LaunchError(f"ray: got {len(nodes)} nodes to start on, want at most {len(alive)}, those that are alive")
    actors = [
        _actor(node, num_cpus=sum(len(one.cores) for one in devices), num_gpus=len(_uuids(devices)))
        for node, devices in zip(alive, nodes.values(), strict=False)
    ]
    servers = {name: control_server(wiring, f"agent.{name}") for name in nodes}
    try:
        _check_gpus(nodes, actors)
        starting = [
            actor.start.remote(str(wiring.directory), wiring.token, f"agent.{name}", list(wiring.preload))
            for actor, name in zip(actors, nodes, strict=True)
        ]
        links: dict[str, Link] = {}
        for actor, name, (address, shared) in zip(actors, nodes, _answers(starting), strict=True):
            link = (
                LocalLink(address, wiring, servers[name]) if shared else GrpcLink(address, wiring, token=wiring.token)
            )
            links[name] = RayLink(actor, link)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        for server in servers.values():
            server.close()
        raise
    return links


def _check_gpus(nodes: Mapping[str, Sequence[Device]], actors: Sequence[Any]) -> None:
    missing = _answers([one.missing.remote(_uuids(has)) for one, has in zip(actors, nodes.values(), strict=True)])
    for name, uuids in zip(nodes, missing, strict=True):
        if uuids:
            raise LaunchError(
                f"ray: the run's devices on {name} include {uuids[0]}, which Ray has given to another: "
                "use all of a node's GPUs, or those that ray_cluster() finds now"
            )


def _uuids(devices: Sequence[Device]) -> list[str]:
    return [one.labels["uuid"] for one in devices if one.kind == "cuda"]


def _answers(asked: Sequence[Any]) -> list[Any]:
    try:
        answers: list[Any] = ray.get(list(asked), timeout=_START_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as late:
        raise LaunchError(
            f"ray: waited {_START_TIMEOUT_S:.0f} s for CPUs or GPUs that others hold: Ray has "
            f"{ray.available_resources()} to give now: end what holds them, or use fewer devices"
        ) from late
    return answers


def _nodes() -> dict[str, Mapping[str, float]]:
    """What each living node of Ray was declared to have, by its id, in their order."""
    if not ray.is_initialized():
        _initialise()
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return dict(sorted(alive.items()))


def _initialise() -> None:
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as failure:
        raise LaunchError(f"ray: {failure}") from failure
    finally:
        # Ray takes SIGTERM for itself, which is the program's.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)


def _actor(node: str, *, num_cpus: int = 0, num_gpus: int = 0) -> Any:
    placed = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    environment = {"env_vars": {"PYTHONPATH": child_environment()["PYTHONPATH"]}}
    actor = ray.remote(NodeActor).options(
        num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=placed, runtime_env=environment
    )
    return actor.remote()
