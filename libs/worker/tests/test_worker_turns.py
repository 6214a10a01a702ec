"""The served lock: turns between endpoints, and what follows from a holder's death."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m2flow.comm import Endpoint, RemoteError, Request
from m2flow.worker import Cluster, DeviceLock, LockServer, LockTimeout, launch_run
from m2flow.worker.testing.holder import Holder
from m2flow.worker.turns import RECALL, SERVICE

TOKEN = "t"


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[list[Endpoint]]:
    made = [Endpoint(tmp_path / "run", name, token=TOKEN, connect_timeout_s=1.0) for name in ("driver", "a.0", "b.0")]
    yield made
    for end in made:
        end.close()


class _Mutex:
    """Runs `then`, once, when it is let go: what another thread might do in that moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.then: Callable[[], object] | None = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        then, self.then = self.then, None
        if then is not None:
            then()


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


def test_a_unit_keeps_its_devices_until_another_asks(ends: list[Endpoint]) -> None:
    server = LockServer(ends[0])
    lock, other = DeviceLock(ends[1]), DeviceLock(ends[2])
    for iteration in range(3):
        with lock.turn("a", [0], (iteration, 0)):
            pass
    assert server.stats().num_grants == 1
    assert [hold.owner for hold in server.stats().holds] == ["a"]
    with other.turn("b", [0], (0, 1), timeout_s=5.0):
        assert [hold.owner for hold in server.stats().holds] == ["b"]
    with lock.turn("a", [0], (3, 0), timeout_s=5.0):
        assert [hold.owner for hold in server.stats().holds] == ["a"]
    with lock.turn("a", [0, 1], (4, 0), timeout_s=5.0):  # another plan
        assert [hold.devices for hold in server.stats().holds] == [{0, 1}]


def test_a_turn_that_is_recalled_ends_when_its_block_does(ends: list[Endpoint]) -> None:
    server = LockServer(ends[0])
    lock, other = DeviceLock(ends[1]), DeviceLock(ends[2])
    for iteration in range(50):
        inside = threading.Event()

        def wait(ticket: tuple[int, int], inside: threading.Event = inside) -> None:
            with other.turn("b", [0], ticket, timeout_s=5.0):
                inside.set()

        with lock.turn("a", [0], (iteration, 0), timeout_s=5.0):
            thread = threading.Thread(target=wait, args=((iteration, 1),))
            thread.start()
            while not server.stats().waiters:
                time.sleep(0.001)
            assert not inside.is_set()
        assert inside.wait(5.0)
        thread.join(5.0)
    assert server.stats().num_grants == 100


def test_a_turn_that_another_thread_takes_up_as_it_is_kept_is_not_given_back(ends: list[Endpoint]) -> None:
    LockServer(ends[0])
    lock, other = DeviceLock(ends[1]), DeviceLock(ends[2])
    next_turn = lock.turn("a", [0], (1, 0))
    mutex = _Mutex()
    lock._mutex = mutex  # type: ignore[assignment]
    with lock.turn("a", [0], (0, 0)):
        mutex.then = next_turn.__enter__
    with pytest.raises(LockTimeout), other.turn("b", [0], (0, 1), timeout_s=0.5):
        pass
    next_turn.__exit__(None, None, None)
    with other.turn("b", [0], (0, 1), timeout_s=5.0):
        pass


def test_units_that_take_turns_all_get_on(ends: list[Endpoint]) -> None:
    LockServer(ends[0])
    locks = [DeviceLock(ends[1]), DeviceLock(ends[2])]
    inside: list[str] = []
    most: list[int] = []

    def work(number: int) -> None:
        for iteration in range(100):
            with locks[number % 2].turn(f"unit{number}", [0, number % 3 + 1], (iteration, number), timeout_s=10.0):
                inside.append(f"unit{number}")
                most.append(len(inside))
                inside.remove(f"unit{number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(most) == 600
    assert max(most) == 1


def test_a_lock_that_is_closed_keeps_nothing(ends: list[Endpoint]) -> None:
    server = LockServer(ends[0])
    lock = DeviceLock(ends[1])
    with lock.turn("a", [0], (0, 0)):
        pass
    lock.close()
    with lock.turn("a", [1], (0, 0)):
        pass
    while server.stats().holds:
        time.sleep(0.01)


def test_what_a_process_kept_is_free_when_it_has_left(ends: list[Endpoint]) -> None:
    LockServer(ends[0])
    with DeviceLock(ends[1]).turn("a", [0], (0, 0)):
        pass
    ends[1].close()
    with DeviceLock(ends[2]).turn("b", [0], (0, 1), timeout_s=20.0):
        pass


def test_a_holder_that_fails_to_give_back_fails_who_waits_for_it(ends: list[Endpoint]) -> None:
    server = LockServer(ends[0])

    def recall(request: Request) -> None:
        raise RuntimeError("broken")

    ends[1].handle(RECALL, recall, prompt=True)
    assert ends[1].request(ends[0].name, SERVICE, "acquire", (1, "a", [0, 1], [0, 0]), timeout_s=5)
    second = DeviceLock(ends[2])
    for _ in range(2):  # the second time it is asked again
        turn = second.turn("b", [1], (0, 1), timeout_s=5)
        with pytest.raises(RemoteError, match=r"b waits for devices \[1\], which a does not give back: .*broken"), turn:
            pass
    with second.turn("b", [2], (0, 1), timeout_s=5):
        assert [hold.owner for hold in server.stats().holds] == ["a", "b"]
    assert server.stats().waiters == ()


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
