"""Starts a run: its private directory, the driver's endpoint, and the agents of its nodes."""

import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from m2flow.comm import Endpoint
from m2flow.comm.token import check_token
from m2flow.worker.cluster import Cluster
from m2flow.worker.errors import LaunchError
from m2flow.worker.group import WorkerGroup
from m2flow.worker.placement import Placement
from m2flow.worker.session import LogSink, Session
from m2flow.worker.spec import GroupSpec
from m2flow.worker.target import resolve_target
from m2flow.worker.wiring import Link, Wiring

LAUNCHERS: Mapping[str, str] = {
    "inproc": "m2flow.worker.launchers.inproc:connect",
    "process": "m2flow.worker.launchers.process:connect",
    "ray": "m2flow.worker.launchers.ray:connect",
}
"""Each launcher's way in, by name, so that one that is not used is not imported.

It is given the devices of each node that it is to start on, and gives a link to each.
"""

_RAY_CLUSTER = "m2flow.worker.launchers.ray:ray_cluster"
_PREFIX = "m2flow-"
_JOIN = "m2flow.worker.launchers._link:GrpcLink"


@dataclass(frozen=True)
class AgentAddress:
    """Where an agent that was started by hand waits, "HOST:PORT", and the token that it asks for.

    Raises ValueError for a token that is empty or not printable ASCII.
    """

    address: str
    token: str = field(repr=False)

    def __post_init__(self) -> None:
        check_token(self.token)


def find_cluster(launcher: str, cpu_slots: int | None = None) -> Cluster:
    """The devices that a launcher can start on: this machine's, as `Cluster.local` gives them, or those of Ray's nodes.

    Of Ray's cores, a slot each, `cpu_slots` are taken, of the first nodes. Finding Ray, or starting it, blocks; see
    `ray_cluster`. Raises ValueError on more slots than cores, LaunchError where Ray cannot be found.
    """
    if launcher != "ray":
        return Cluster.local(cpu_slots)
    try:
        found: Cluster = resolve_target(_RAY_CLUSTER)(cpu_slots)
    except ModuleNotFoundError as missing:
        raise LaunchError(f"ray: {missing}: pip install 'm2flow-worker[ray]'") from missing
    return found


def launch_run(
    cluster: Cluster,
    *,
    launcher: str = "process",
    run_dir: Path | str = ".",
    preload: Sequence[str] = (),
    agents: Mapping[str, AgentAddress] | None = None,
    on_log: LogSink | None = None,
    max_restarts: int = 3,
    silence_s: float = 120.0,
    start_timeout_s: float = 120.0,
) -> Session:
    """Starts the agents of a run and returns its session, which is closed by `close` or by `with`. Blocks.

    `preload` names modules to import before the first rank starts, so that ranks start warm. `agents` are joined at
    their addresses for the nodes that they are given for; the launcher starts the others. `on_log` hears (group, rank,
    line) of what workers print; None prints it to standard error. A rank whose class says "retry" or "drop" may fail
    `max_restarts` times without an answer in between. After `silence_s` without an answer, a start or a line, who waits
    for whom is printed to standard error. `start_timeout_s` bounds how long groups take to start, where the call says
    nothing else. Raises ValueError on an unknown launcher or node, LaunchError where an agent does not start or is not
    there.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher: got {launcher!r}, want one of {', '.join(map(repr, LAUNCHERS))}")
    joined = dict(agents or {})
    if unknown := sorted(joined.keys() - set(cluster.nodes)):
        raise ValueError(f"agents: got node {unknown[0]!r}, want some of {', '.join(map(repr, cluster.nodes))}")
    _sweep(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    token = secrets.token_hex(16)
    endpoint: Endpoint | None = None
    try:
        endpoint = Endpoint(directory, "driver", token=token)
        return Session(
            cluster,
            endpoint,
            Path(run_dir).resolve(),
            connect=partial(_connect, cluster, launcher, joined),
            directory=directory,
            token=token,
            preload=preload,
            on_log=on_log or _print_log,
            max_restarts=max_restarts,
            silence_s=silence_s,
            start_timeout_s=start_timeout_s,
            say=_print_notice,
        )
    except BaseException:
        if endpoint is not None:
            endpoint.close()
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _sweep(parent: Path) -> None:
    """Removes what drivers left that were killed with nobody to clean up after them, as one whose ranks are threads."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.1)
            try:
                probe.connect(str(directory / "driver.sock"))
            except ConnectionRefusedError:
                shutil.rmtree(directory, ignore_errors=True)
            except OSError:
                pass  # Not ours, or being made, or busy: none is a dead driver's.


def _connect(cluster: Cluster, launcher: str, joined: Mapping[str, AgentAddress], wiring: Wiring) -> Mapping[str, Link]:
    links: dict[str, Link] = {}
    try:
        for node, agent in joined.items():
            links[node] = resolve_target(_JOIN)(agent.address, wiring, token=agent.token)
        started = {node: cluster.on(node) for node in cluster.nodes if node not in joined}
        if started:
            links.update(resolve_target(LAUNCHERS[launcher])(started, wiring))
    except BaseException:
        for link in dict.fromkeys(links.values()):
            link.close()
        raise
    return links


@contextmanager
def launch(
    spec: GroupSpec, cluster: Cluster, placement: Placement | str = "all", *, launcher: str = "process"
) -> Iterator[WorkerGroup]:
    """One group alone, for use without flow; it ends with the `with`. Raises as `launch_run` and `Session.start` do."""
    with launch_run(cluster, launcher=launcher) as session:
        yield session.start(spec, placement)


def _print_notice(text: str) -> None:
    print(f"[m2flow] {text}", file=sys.stderr)


def _print_log(group: str, rank: int, line: str) -> None:
    print(f"[{group}.{rank}] {line}", file=sys.stderr)
