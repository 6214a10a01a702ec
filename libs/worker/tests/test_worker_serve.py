"""Workers started by hand, joined by their address: over loopback, and from another network namespace."""

import os
import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from m2flow.proto.worker.v1.worker_pb2_grpc import WorkerServiceStub
from m2flow.worker import AgentAddress, Cluster, LaunchError, WorkerFailed, launch_run
from m2flow.worker.__main__ import main
from m2flow.worker.testing import Probe, RetryProbe
from m2flow.worker.testing.conformance import DEADLINE_S
from m2flow.worker.testing.served import served
from m2flow.worker.testing.sharded import ShardedProbe

pytestmark = pytest.mark.medium

PROBE = "m2flow.worker.testing.probe:Probe"
ROBOT = Cluster.virtual(1).with_resource("robot", node="robot-pc")


def test_a_worker_started_by_hand_joins_by_address_and_waits_again_after_a_run() -> None:
    token = secrets.token_hex(8)
    with served(PROBE, "127.0.0.1:0", token) as (server, address):
        for _ in range(2):
            with launch_run(
                ROBOT, launcher="inproc", agents={"robot-pc": AgentAddress(address, token)}, on_log=lambda *_: None
            ) as session:
                here, there = session.start_all(
                    [
                        (Probe.group(name="here", device_kind="virtual"), "0"),
                        (Probe.group(name="there", device_kind="robot"), "label=robot"),
                    ]
                )
                assert there.whoami().result(10)[0]["pid"] not in (os.getpid(), server.pid)
                assert here.whoami().result(10)[0]["pid"] == os.getpid()
                big = bytes(8 << 20)
                assert there.echo(big).result(20) == [big]
            assert server.stdout is not None
            assert server.stdout.readline().strip() == f"{PROBE} waits at {address}"


def test_a_joined_rank_has_channels_and_calls_to_the_rest_of_the_run() -> None:
    with served("m2flow.worker.testing.probe:RetryProbe", "127.0.0.1:0", "t") as (_, address):
        agents = {"robot-pc": AgentAddress(address, "t")}
        with launch_run(ROBOT.with_resource("robot"), agents=agents, on_log=lambda *_: None) as session:
            here = session.start(Probe.group(name="here", device_kind="virtual"), "0")
            there = session.start(RetryProbe.group(name="there", device_kind="robot"), "robot-pc:all")
            later = session.start(Probe.group(name="later", device_kind="virtual"), "0")
            session.endpoint.host_channel("out", producers=["here.0"], consumers=["there.0"])
            session.endpoint.host_channel("back", producers=["there.0"], consumers=["later.0"])
            big = np.arange(1 << 18)
            here.put("out", big).wait(20)
            (arrived,) = there.get("out").result(20)
            there.put("back", arrived).wait(20)
            assert np.array_equal(later.get("back").result(20)[0], big)
            assert there.ask("later.0", "a question").result(20) == ["a question"]
            assert here.ask("there.0", "another").result(20) == ["another"]
            assert there.die_once().result(20) == [1]
            assert there.ask("here.0", "and back").result(20) == ["and back"]
            moved = session.replace(there, "node0:all")
            assert here.ask("there.0", "a third").result(20) == ["a third"]
            assert moved.ask("here.0", "and back").result(20) == ["and back"]


def test_a_group_is_replaced_from_one_machine_to_another_with_its_state() -> None:
    config = {"rows": 6, "columns": 4}
    cluster = Cluster.virtual(1).with_resource("robot").with_resource("robot", node="robot-pc")
    with served("m2flow.worker.testing.sharded:ShardedProbe", "127.0.0.1:0", "t") as (_, address):
        agents = {"robot-pc": AgentAddress(address, "t")}
        with launch_run(cluster, agents=agents, on_log=lambda *_: None) as session:
            group = session.start(ShardedProbe.group(config, device_kind="robot"), "node0:all")
            group.fill(7).wait(20)
            (before,) = group.held().result(20)
            for placement in ("robot-pc:all", "all", "node0:all"):
                group = session.replace(group, placement)
                held = group.held().result(20)
                assert np.array_equal(np.concatenate([part["rows"] for part in held]), before["rows"])
                assert np.array_equal(np.concatenate([part["columns"] for part in held], axis=1), before["columns"])
                assert {part["count"] for part in held} == {7}


def test_a_wrong_token_another_class_and_nobody_there_are_refused() -> None:
    with served(PROBE, "127.0.0.1:0", "right") as (_, address), pytest.raises(LaunchError, match="another token"):
        launch_run(ROBOT, launcher="inproc", agents={"robot-pc": AgentAddress(address, "wrong")})
    with served(PROBE, "127.0.0.1:0", "right") as (_, address):
        agents = {"robot-pc": AgentAddress(address, "right")}
        with launch_run(ROBOT, launcher="inproc", agents=agents) as session:
            spec = Probe.group(name="other", device_kind="robot")
            object.__setattr__(spec, "target", "m2flow.worker.testing.holder:Holder")
            with pytest.raises(WorkerFailed, match=r"want m2flow\.worker\.testing\.probe:Probe: what is served here"):
                session.start(spec, "label=robot")
    with pytest.raises(ValueError, match="got node 'robot', want some of 'node0', 'robot-pc'"):
        launch_run(ROBOT, agents={"robot": AgentAddress(address, "right")})


def test_silent_strangers_keep_no_driver_out() -> None:
    with served(PROBE, "127.0.0.1:0", "right") as (_, address), ExitStack() as strangers:
        for _ in range(8):
            channel = strangers.enter_context(grpc.insecure_channel(address))
            silence: queue.SimpleQueue[None] = queue.SimpleQueue()
            WorkerServiceStub(channel).Session(iter(silence.get, None))
            strangers.callback(silence.put, None)
            grpc.channel_ready_future(channel).result(10)
        agents = {"robot-pc": AgentAddress(address, "right")}
        with launch_run(ROBOT, launcher="inproc", agents=agents, on_log=lambda *_: None) as session:
            group = session.start(Probe.group(device_kind="robot"), "label=robot")
            assert group.echo(1).result(10) == [1]


def test_when_the_far_side_is_killed_the_run_fails_within_five_seconds() -> None:
    with served(PROBE, "127.0.0.1:0", "t") as (server, address):
        agents = {"robot-pc": AgentAddress(address, "t")}
        with launch_run(ROBOT, launcher="inproc", agents=agents, on_log=lambda *_: None) as session:
            group = session.start(Probe.group(device_kind="robot"), "label=robot")
            (pid,) = group.pids
            server.kill()
            start = time.monotonic()
            with pytest.raises(WorkerFailed):
                group.sleep(60.0).result(DEADLINE_S)
            while Path(f"/proc/{pid}").exists():
                assert time.monotonic() - start < DEADLINE_S
                time.sleep(0.02)


def test_a_proxy_is_not_asked_for_the_way_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    # Where nobody listens.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with served(PROBE, "127.0.0.1:0", "t") as (_, address):
        agents = {"robot-pc": AgentAddress(address, "t")}
        with launch_run(ROBOT, launcher="inproc", agents=agents, on_log=lambda *_: None) as session:
            group = session.start(Probe.group(device_kind="robot"), "label=robot")
            assert group.echo(1).result(10) == [1]


def test_serving_at_an_address_that_is_taken_is_refused() -> None:
    with served(PROBE, "127.0.0.1:0", "t") as (_, address):
        command = [sys.executable, "-m", "m2flow.worker", "serve", PROBE, "--address", address]
        environment = {**os.environ, "M2FLOW_TOKEN": "t"}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=False)
    assert answer.returncode != 0
    assert f"bind to address {address}" in answer.stderr


def test_serving_without_a_token_is_refused() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "M2FLOW_TOKEN"}
    command = [sys.executable, "-m", "m2flow.worker", "serve", PROBE, "--address", "127.0.0.1:0"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=False)
    assert answer.returncode != 0
    assert "want one in --token-file" in answer.stderr


@contextmanager
def two_namespaces() -> Iterator[tuple[list[str], list[str], str]]:
    """Two network namespaces joined by a cable: commands that run inside each, and the second one's address."""
    names = [f"m2f{secrets.token_hex(3)}" for _ in range(2)]
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"kernel: no network namespaces here: {made.stderr.strip()}")
    try:
        for command in (
            f"ip netns add {names[1]}",
            f"ip -n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}",
            f"ip -n {names[0]} addr add 10.9.8.1/24 dev eth0",
            f"ip -n {names[1]} addr add 10.9.8.2/24 dev eth0",
            f"ip -n {names[0]} link set eth0 up",
            f"ip -n {names[1]} link set eth0 up",
        ):
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"kernel: no cable between namespaces here: {done.stderr.strip()}")
        inside = [["ip", "netns", "exec", name] for name in names]
        yield inside[0], inside[1], "10.9.8.2"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


DRIVER = """
import sys
from m2flow.worker import AgentAddress, Cluster, launch_run
from m2flow.worker.testing import Probe
from m2flow.worker.testing.conformance import DEADLINE_S
cluster = Cluster.virtual(1).with_resource("robot", node="robot-pc")
agents = {"robot-pc": AgentAddress(sys.argv[1], "t")}
with launch_run(cluster, launcher="inproc", agents=agents) as session:
    group = session.start(Probe.group(device_kind="robot"), "label=robot")
    session.endpoint.host_channel("out", producers=["driver"], consumers=["probe.0"])
    session.endpoint.channel("out", host="driver").put("a cable")
    print(group.echo("across").result(20), group.get("out").result(20))
"""


def test_the_robots_computer_is_in_another_network() -> None:
    with (
        two_namespaces() as (ours, theirs, host),
        served(PROBE, f"{host}:7421", "t", prefix=theirs) as (_, address),
    ):
        answer = subprocess.run(
            [*ours, sys.executable, "-c", DRIVER, address], capture_output=True, text=True, timeout=50, check=False
        )
        assert answer.stdout.strip() == "['across'] ['a cable']", answer.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "no_such_module:Worker"], "serve: got 'no_such_module:Worker', want module:qualname"),
        (["reward", "math:no_such"], "reward: got 'math:no_such', want module:qualname"),
        (["reward", "math"], "reward: got 'math', want module:qualname"),
        (["serve", "json:JSONDecoder"], "serve: got 'json:JSONDecoder', want a class of Worker"),
        (["reward", "math:pi"], "reward: got 'math:pi', want a function"),
        (["serve", PROBE, "--address", "7400"], "got '7400', want HOST:PORT"),
        (["serve", PROBE, "--address", "127.0.0.1:74000"], "got '127.0.0.1:74000', want HOST:PORT with a port of 0 to"),
        (["serve", PROBE, "--token-file", "no/such"], "serve: cannot read --token-file no/such: "),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words if "--address" in words else [*words, "--address", "127.0.0.1:0"]
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert said in f"{ended.value} {capsys.readouterr().err}"
