"""Processes that are killed: no memory stays, no reader is disturbed, nothing is lost and nothing doubled."""

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import Endpoint, IterationEnded, Put

# Children of a process that has imported everything and has no endpoint yet: a worker's zygote does the same.
NURSERY = """
    import os, signal
    directory, token = Path(sys.argv[1]), sys.argv[3]
    endpoint.close()
    def child(name, work):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            work(Endpoint(directory, name, token=token), write)
            os._exit(0)
        os.close(write)
        return pid, read
"""


def test_a_hundred_killed_owners_leave_no_memory_and_no_descriptor(make_endpoint: Any, peer: Any) -> None:
    earlier = _mapped()  # what tests before this one may still hold
    host = make_endpoint("host")
    host.host_channel("q", producers=[f"o{index}" for index in range(100)], consumers=["host"])
    channel = host.channel("q", host="host")
    nursery = peer(
        "nursery",
        NURSERY
        + """
    def work(endpoint, write):
        channel = endpoint.channel("q", host="host")
        for index in range(3):
            channel.put(np.full(30_000, index, np.float64))
        channel.close()
        endpoint.stage_weights("w", 1, {"x": np.ones(30_000)})
        os.write(write, b"x")
        time.sleep(60)
    say("up")
    sys.stdin.readline()
    for index in range(100):
        pid, read = child(f"o{index}", work)
        assert os.read(read, 1) == b"x"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
    say("done")
    """,
    )
    assert nursery.line() == "up"
    descriptors = len(os.listdir("/proc/self/fd"))
    nursery.process.stdin.write("begin\n")
    nursery.process.stdin.flush()
    taken = 0
    while taken < 300:
        leases = channel.get_batch(8, timeout_s=30) if taken < 292 else [channel.get(timeout_s=30)]
        taken += len(leases)
        assert all(lease.item[-1] in (0, 1, 2) for lease in leases)
        channel.ack(leases)
    assert nursery.line() == "done"
    del leases
    gc.collect()
    deadline = time.monotonic() + 5
    while (_mapped() - earlier or len(os.listdir("/proc/self/fd")) > descriptors) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _mapped() - earlier == set()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def _mapped() -> set[str]:
    """The segments that this process maps, by inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:m2flow" in line}


def _described() -> set[int]:
    """The segments that this process has descriptors of, by inode."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:m2flow" in os.readlink(descriptor):
                found.add(descriptor.stat().st_ino)
    return found


@pytest.mark.parametrize("way", ["call", "channel", "channel of the host's process"])
def test_who_keeps_one_array_of_a_dead_peer_keeps_none_of_its_others(run_dir: Path, peer: Any, way: str) -> None:
    earlier = _described()
    within = way == "channel of the host's process"
    with (
        Endpoint(run_dir, "host", token="token-of-this-run", by_reference=within) as host,
        Endpoint(run_dir, "reader", token="token-of-this-run", by_reference=within) as reader,
    ):
        host.host_channel("q", producers=["far"], consumers=["reader"])
        channel = reader.channel("q", host="host")
        far = peer(
            "far",
            f"""
    endpoint.handle("ones", lambda request: np.ones(request.args, np.uint8))
    for size in {() if way == "call" else (50_000, 20 << 20)}:
        endpoint.channel("q", host="host").put(np.ones(size, np.uint8))
    sys.stdin.readline()
    """,
        )

        def ones(size: int) -> Any:
            if way == "call":
                return reader.request("far", "ones", "", size, timeout_s=30)
            lease = channel.get(timeout_s=30)
            channel.ack(lease)
            return lease.item

        kept, other = ones(50_000), ones(20 << 20)
        assert (kept.size, other.size) == (50_000, 20 << 20)
        del other
        far.kill()
        deadline = time.monotonic() + 5
        while len(_described() - earlier) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(_described() - earlier) <= 1
        assert kept.min() == 1


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "exits"])
def test_a_reader_that_is_gone_takes_nothing_from_another(make_endpoint: Any, peer: Any, killed: bool) -> None:
    trainer, rollout = make_endpoint("trainer"), make_endpoint("rollout")
    trainer.stage_weights("w", 1, {"x": np.full(500_000, 1.0)})
    kept = rollout.fetch_weights("trainer", "w", 1)["x"]
    victim = peer("victim", "w = endpoint.fetch_weights('trainer', 'w', 1); say(w['x'][0]); sys.stdin.readline()")
    assert victim.line() == "1.0"
    if killed:
        victim.kill()
    else:
        victim.process.stdin.write("exit\n")
        victim.process.stdin.flush()
        assert victim.finish() == 0
    for version in range(2, 8):
        trainer.stage_weights("w", version, {"x": np.full(500_000, float(version))})
        assert rollout.fetch_weights("trainer", "w", version)["x"][-1] == version
    assert kept.min() == kept.max() == 1


RELAY = """
    source, sink = endpoint.channel("in", host="host"), endpoint.channel("out", host="host")
    say("up")
    while True:
        try:
            leases = source.get_batch(4, iteration=0)
        except IterationEnded:
            break
        sink.put_many([Put(item={"x": lease.item["x"] + 1}, id=lease.id, iteration=0) for lease in leases])
        time.sleep(0.002)
        source.ack(leases)
    sink.end(0)
    say("end")
    time.sleep(60)
"""


@pytest.mark.timeout(120)
def test_workers_killed_at_any_moment_lose_and_double_nothing(make_endpoint: Any, peer: Any) -> None:
    host = make_endpoint("host")
    names = [f"w{index}" for index in range(5)]
    host.host_channel("in", capacity=32, producers=["host"], consumers=names)
    host.host_channel("out", producers=names, consumers=["host"])
    source, sink = host.channel("in", host="host"), host.channel("out", host="host")
    count = 400

    def feed() -> None:
        for index in range(count):
            size = 20_000 if index % 4 == 0 else 10
            source.put({"x": np.full(size, index)}, id=str(index), iteration=0)
        source.end(0)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    results: dict[str, int] = {}
    workers = [peer(name, RELAY) for name in names[:-1]]
    for name, worker in zip(names[:-1], workers, strict=True):
        assert worker.line() == "up"
        collected = 0
        while collected < 40:
            leases = sink.get_batch(8, timeout_s=30)
            _collect(leases, results)
            sink.ack(leases)
            collected += len(leases)
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        host.announce_successor("out", lost=name, successor=names[-1])
    # It ends for all whom it succeeds: when they are dead, and what they had is queued again.
    workers.append(peer(names[-1], RELAY))
    while len(results) < count:
        leases = sink.get_batch(16, timeout_s=30)
        _collect(leases, results)
        sink.ack(leases)
    assert workers[-1].line() == "up"
    assert workers[-1].line() == "end"
    assert results == {str(index): index + 1 for index in range(count)}
    # Else its endpoint is closed while it waits to hear that it has ended.
    feeder.join(30)
    assert not feeder.is_alive()
    assert source.stats().leased == source.stats().queued == 0
    with pytest.raises(IterationEnded):
        sink.get(iteration=0)


def test_who_polls_has_the_leases_of_one_killed_in_order_however_many_keys_are_queued(
    make_endpoint: Any, peer: Any
) -> None:
    host = make_endpoint("host")
    host.host_channel("q", producers=["host"], consumers=["victim", "host"], route="by_key")
    channel = host.channel("q", host="host")
    channel.put_many([Put(item=index, id=str(index), key=str(index)) for index in range(40_000)])
    own = channel.get_batch(40_000, at_least=0)
    assert 19_000 < len(own) < 21_000
    victim = peer(
        "victim",
        """
        leases = endpoint.channel("q", host="host").get_batch(64)
        say(" ".join(lease.id for lease in leases))
        time.sleep(60)
        """,
    )
    ids = victim.line().split()
    assert len(ids) == 64
    os.kill(victim.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not (leases := channel.get_batch(64, at_least=0)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [lease.id for lease in leases] == ids


def _collect(leases: list[Any], results: dict[str, int]) -> None:
    for lease in leases:
        assert lease.id not in results, "an output came twice"
        results[lease.id] = int(lease.item["x"][0])


def test_an_endpoint_made_after_a_fork_works(peer: Any, make_endpoint: Any) -> None:
    a = make_endpoint("a")
    nursery = peer(
        "nursery",
        NURSERY
        + """
    def work(endpoint, write):
        endpoint.handle("echo", lambda request: request.args)
        os.write(write, b"x")
        time.sleep(60)
    pid, read = child("b", work)
    os.read(read, 1)
    say(pid)
    time.sleep(60)
    """,
    )
    pid = int(nursery.line())
    assert a.request("b", "echo", "", np.arange(100_000), timeout_s=10).size == 100_000
    os.kill(pid, signal.SIGKILL)


def test_a_forked_child_that_closes_its_copy_changes_nothing_for_its_parent(peer: Any) -> None:
    parent = peer(
        "parent",
        """
        import os
        directory, token = Path(sys.argv[1]), sys.argv[3]
        endpoint.close()
        size = 48 << 10
        with Endpoint(directory, "a", token=token, by_reference=False) as a, \\
                Endpoint(directory, "b", token=token, by_reference=False) as b:
            a.stage_weights("w", 1, {"x": np.ones(size, np.uint8)})
            kept = b.fetch_weights("a", "w", 1)["x"]
            # Of the same segment, free when the child begins and in use when it ends.
            a.stage_weights("v", 1, {"x": np.ones(size, np.uint8)})
            a.release_weights("v", 1)
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.read(read, 1)
                try:
                    a.stage_weights("v", 3, {"x": np.zeros(size, np.uint8)})
                except CommError as error:
                    say(error)
                raise SystemExit(7)
            a.stage_weights("v", 2, {"x": np.full(size, 2, np.uint8)})
            new = b.fetch_weights("a", "v", 2)["x"]
            os.write(write, b"x")
            say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            say((int(kept.min()), int(new.min()), int(new.max())))
        """,
    )
    assert parent.line() == "endpoint 'a' is the parent process's: make one after the fork"
    assert (parent.line(), parent.line()) == ("7", "(1, 2, 2)")


def test_put_many_in_batches_keeps_order_across_a_host(make_endpoint: Any) -> None:
    host, producer, consumer = make_endpoint("host"), make_endpoint("p"), make_endpoint("c")
    host.host_channel("q", capacity=16, producers=["p"], consumers=["c"])
    puts, gets = producer.channel("q", host="host"), consumer.channel("q", host="host")

    def feed() -> None:
        puts.put_many([Put(item=index) for index in range(200)])
        puts.end(0)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    taken: list[int] = []
    while len(taken) < 200:
        leases = gets.get_batch(7, timeout_s=10)
        taken += [lease.item for lease in leases]
        gets.ack(leases)
    assert taken == list(range(200))
    # Else its endpoint is closed while it waits to hear that it has ended.
    feeder.join(30)
    assert not feeder.is_alive()


def test_no_signal_comes_of_writing_to_who_is_gone(peer: Any) -> None:
    """A process may have SIGPIPE at its default, as those do whose output is cut off by `head`."""
    writer = peer(
        "writer",
        """
        import signal, socket
        from m2flow.comm._frames import Kind
        from m2flow.comm._loop import Loop
        from m2flow.comm._unix import UnixLink
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # Its thread is not started: it would see the end first.
        loop = Loop("idle", before_sleep=lambda: None)
        for fd in (None, 0):
            near, far = socket.socketpair()
            link = UnixLink(loop, on_frame=print, take=print, on_closed=print)
            link.attach(near)
            far.close()
            link.send(Kind.CALL, 1, b"body", fd)
            say(fd)
        """,
    )
    assert [writer.line(), writer.line()] == ["None", "0"]
