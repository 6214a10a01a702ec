"""The served lock: turns between endpoints, and what follows from a holder's death."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow.comm import Endpoint, RemoteError
from m2flow.worker import Cluster, DeviceLock, LockServer, LockTimeout, launch_run
from m2flow.worker.testing.holder import Holder

TOKEN = "t"


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[list[Endpoint]]:
    made = [Endpoint(tmp_path / "run", name, token=TOKEN) for name in ("driver", "a.0", "b.0")]
    yield made
    for end in made:
        end.close()


def test_turns_exclude_each_other_and_go_by_ticket(ends: list[Endpoint]) -> None:
    server = LockServer(ends[0])
    order: list[str] = []

    def take(lock: DeviceLock, owner: str, ticket: tuple[int, int]) -> None:
        with lock.turn(owner, [0, 1], ticket):
            order.append(owner)

    first, second = DeviceLock(ends[1]), DeviceLock(ends[2])
    with first.turn("a", [0], (0, 0)) as waited_s:
        assert waited_s < 5
        threads = []
        for lock, owner, ticket in [(second, "late", (1, 0)), (second, "early", (0, 1)), (first, "middle", (0, 2))]:
            threads.append(threading.Thread(target=take, args=(lock, owner, ticket)))
            threads[-1].start()
        while len(server.stats().waiters) < 3:
            time.sleep(0.01)
        assert [waiter.owner for waiter in server.stats().waiters] == ["early", "middle", "late"]
        assert order == []
    for thread in threads:
        thread.join(5)
    assert order == ["early", "middle", "late"]
    assert server.stats().num_grants == 4


def test_a_wait_that_runs_out_names_the_holder_and_leaves_the_queue(ends: list[Endpoint]) -> None:
    server = LockServer(ends[0])
    with DeviceLock(ends[1]).turn("a", [0], (0, 0)):
        late = DeviceLock(ends[2]).turn("b", [0], (0, 1), timeout_s=0.05)
        with pytest.raises(LockTimeout, match=r"b waited 0.05 s for devices \[0\]; a \(a.0\) holds \[0\]"), late:
            pass
        while server.stats().waiters:
            time.sleep(0.01)


def test_other_devices_in_the_same_turn_are_refused(ends: list[Endpoint]) -> None:
    LockServer(ends[0])
    lock = DeviceLock(ends[1])
    more = lock.turn("a", [0, 1], (0, 0))
    with lock.turn("a", [0], (0, 0)), pytest.raises(RemoteError, match="all its devices in one turn"), more:
        pass


@pytest.mark.medium
def test_a_killed_holder_frees_its_devices_within_two_seconds() -> None:
    with launch_run(Cluster.virtual(1), on_log=lambda *_: None) as session:
        server = LockServer(session.endpoint)
        group = session.start(Holder.group(device_kind="virtual"), "0*2")
        group.on(0).hold(60.0)
        while not server.stats().holds:
            time.sleep(0.01)
        waiting = group.on(1).hold(0.0)
        group.kill(0)
        assert waiting.result(2.0) == ["held"]
        assert session.failure is None
