"""Endpoints on two hosts whose network delays, drops, limits and cuts."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import network_of_two

WHY_NOT = network_of_two.why_not()
pytestmark = [
    pytest.mark.medium,
    pytest.mark.timeout(60),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"kernel: no namespaces with TUN devices here ({WHY_NOT})"),
]

PRELUDE = """
    import sys, time
    from pathlib import Path
    import numpy as np
    from m2flow.comm import *
    endpoint = Endpoint(Path(sys.argv[1]), sys.argv[2], token="t", connect_timeout_s=30)
    if sys.argv[2] == "b":
        endpoint.listen("10.77.0.2:7000")
    else:
        endpoint.add_address("b", "10.77.0.2:7000")
    def say(line):
        print(f"{line}\\n", end="", flush=True)
    endpoint.on_peer_lost(lambda peer: say("lost " + peer))
"""
Start = Callable[[str, str], "subprocess.Popen[str]"]
Hosts = tuple[network_of_two.Network, Start]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with network_of_two.network(tmp_path) as network:

        def start(name: str, text: str) -> "subprocess.Popen[str]":
            program = textwrap.dedent(PRELUDE) + textwrap.dedent(text)
            return network.host(name, "-c", program, str(tmp_path / name), name)

        yield network, start


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


SERVE = """
    endpoint.host_channel("q", capacity=16, producers=["a"], consumers=["b"])
    endpoint.handle("echo", lambda request: request.args)
    say("up")
    channel, seen = endpoint.channel("q", host="b"), []
    while True:
        try:
            lease = channel.get(timeout_s=50)
        except ChannelClosedError:
            break
        seen.append(int(lease.item["x"][-1]))
        channel.ack(lease)
    say(seen == list(range(len(seen))) and len(seen))
    time.sleep(60)
"""
USE = """
    import threading
    large = np.arange(200_000)
    assert np.array_equal(endpoint.request("b", "echo", "", large, timeout_s=50), large)
    assert [f.result(50) for f in [endpoint.request_async("b", "echo", "", i) for i in range(100)]] == list(range(100))
    channel = endpoint.channel("q", host="b")
    for index in range(60):
        channel.put({"x": np.full(5000 if index % 3 else 50, index)}, id=str(index), timeout_s=50)
    channel.close()
    say("done")
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "fields", [{"delay_s": 0.01}, {"loss": 0.01}, {"bytes_per_s": 8e6}], ids=["delay", "loss", "bandwidth"]
)
def test_calls_and_channels_work_over_a_bad_line(hosts: Hosts, fields: dict[str, float]) -> None:
    network, start = hosts
    b = start("b", SERVE)
    a = start("a", USE)
    assert line(b) == "up"
    network.set(**fields)
    assert line(a) == "done"
    assert line(b) == "60"


def cut_when_told(network: network_of_two.Network, a: "subprocess.Popen[str]", b: "subprocess.Popen[str]") -> None:
    """Cuts the line once a says so, which goes on then."""
    assert line(b) == "up"
    assert line(a) == "cut now"
    network.set(cut=True)
    assert a.stdin is not None
    a.stdin.write("go\n")
    a.stdin.flush()


PUT_THROUGH = """
    channel, errors = endpoint.channel("q", host="b"), []
    for index in range(300):
        while True:
            try:
                channel.put({"x": np.full(100, index)}, id=str(index), timeout_s=2)
                break
            except CommError as error:
                if not errors:
                    say(f"{type(error).__name__} {getattr(error, 'peer', '')}")
                errors.append(error)
                time.sleep(0.2)
        if index == 100:
            say("cut now")
            sys.stdin.readline()
        time.sleep(0.001)
    channel.close()
    say("done")
    time.sleep(60)
"""
TAKE_THROUGH = """
    endpoint.host_channel("q", capacity=16, producers=["a"], consumers=["b"])
    say("up")
    channel, seen, errors = endpoint.channel("q", host="b"), [], []
    while True:
        try:
            lease = channel.get(timeout_s=3)
        except ChannelClosedError:
            break
        except CommError as error:
            if not errors:
                say(f"{type(error).__name__} {error.peer}")
            errors.append(error)
            time.sleep(0.2)
            continue
        seen.append(lease.id)
        channel.ack(lease)
    say(seen == [str(index) for index in range(300)])
    time.sleep(60)
"""


@pytest.mark.parametrize("until_lost", [False, True], ids=["short", "until lost"])
def test_a_partition_is_named_at_both_ends_and_after_it_nothing_is_lost_or_doubled(
    hosts: Hosts, until_lost: bool
) -> None:
    network, start = hosts
    b = start("b", TAKE_THROUGH)
    a = start("a", PUT_THROUGH)
    cut_when_told(network, a, b)
    assert line(a) in ("TimeoutError_ b", "PeerLostError b")
    assert line(b) in ("TimeoutError_ a", "PeerLostError a")
    if until_lost:
        assert (line(a), line(b)) == ("lost b", "lost a")
    network.set(cut=False)
    assert line(a) == "done"
    assert line(b) == "True"


PUT_HERE = """
    endpoint.host_channel("q", capacity=16, producers=["b"], consumers=["a"])
    say("up")
    channel = endpoint.channel("q", host="b")
    for index in range(300):
        channel.put({"x": np.full(100, index)}, id=str(index))
    channel.close()
    time.sleep(60)
"""
TAKE_THERE = """
    channel, done, committed, lost = endpoint.channel("q", host="b"), [], [], []
    while True:
        try:
            got = channel.get(ack=done, timeout_s=3)
        except ChannelClosedError:
            break
        except LeaseLostError:
            lost, done = done, []
            continue
        except CommError:
            time.sleep(0.2)
            continue
        committed += [lease.id for lease in done]
        done = [got]
        if got.id == "100" and not lost:
            say("cut now")
            sys.stdin.readline()
        time.sleep(0.001)
    committed += [lease.id for lease in done]
    say(([lease.id for lease in lost], committed == [str(index) for index in range(300)]))
    time.sleep(60)
"""


@pytest.mark.parametrize("until_lost", [False, True], ids=["short", "until lost"])
def test_what_a_consumer_commits_behind_a_partition_is_neither_lost_nor_doubled(hosts: Hosts, until_lost: bool) -> None:
    network, start = hosts
    b = start("b", PUT_HERE)
    a = start("a", TAKE_THERE)
    cut_when_told(network, a, b)
    if until_lost:
        assert {line(a), line(b)} == {"lost b", "lost a"}
    else:
        time.sleep(2)
    network.set(cut=False)
    assert line(a) == str((["100"] if until_lost else [], True))


LIFE = """
import os, sys, time
from pathlib import Path
from m2flow.comm import Endpoint
endpoint = Endpoint(Path(sys.argv[1]), "b", token="t")
endpoint.handle("life", lambda request: os.getpid())
endpoint.listen("10.77.0.2:7000")
print(flush=True)
time.sleep(60)
"""
RESTARTS = f"""
    import subprocess
    endpoint.close()
    for _ in range(2):
        life = subprocess.Popen([sys.executable, "-c", {LIFE!r}, sys.argv[1]], stdout=subprocess.PIPE)
        life.stdout.readline()
        say(life.pid)
        sys.stdin.readline()
        life.kill()
        life.wait()
"""
CALLS = """
    lives = [0]
    while True:
        try:
            life = endpoint.request("b", "life", "", timeout_s=25)
        except PeerLostError:
            continue
        except TimeoutError_ as error:
            say(f"vanished: {error}")
            break
        if life != lives[-1]:
            lives.append(life)
            say(life)
"""


def test_a_call_to_a_peer_that_restarted_behind_a_partition_does_not_vanish(hosts: Hosts) -> None:
    """Its end of the old connection is gone without a word: whoever called over it must hear of that."""
    network, start = hosts
    b = start("b", RESTARTS)
    a = start("a", CALLS)
    first = line(b)
    assert line(a) == first
    network.set(cut=True)
    assert b.stdin is not None
    b.stdin.write("restart\n")
    b.stdin.flush()
    second = line(b)
    network.set(cut=False)
    assert (line(a), line(a)) in (("lost b", second), (second, "lost b"))


STAGE = """
    endpoint.stage_weights("w", 1, {str(index): np.full(1 << 17, index) for index in range(4)})
    say("up")
    time.sleep(60)
"""
PREPARE = """
    import threading
    second = Endpoint(Path(sys.argv[1]), "a2", token="t", connect_timeout_s=30, by_reference=False)
    second.add_address("b", "10.77.0.2:7000")
    receivers = [one.weight_receiver("w", sources=["b"], bucket_bytes=1 << 20) for one in (endpoint, second)]
    moved = []
    def prepare(receiver):
        moved.append(receiver.prepare(1, timeout_s=50).moved_bytes)
    threads = [threading.Thread(target=prepare, args=(receiver,)) for receiver in receivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(sorted(moved))
    time.sleep(60)
"""


def test_weights_come_once_over_a_slow_line_for_two_receivers_of_a_host(hosts: Hosts) -> None:
    network, start = hosts
    b, a = start("b", STAGE), start("a", PREPARE)
    network.set(bytes_per_s=8e6)
    assert line(b) == "up"
    assert line(a) == f"[0, {4 << 20}]"
