"""The index of a channel, driven directly: no sockets, no clock."""

import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from m2flow.comm._entries import Entry, Filter, Held
from m2flow.comm._index import ChannelIndex
from m2flow.comm._waiting import Caller, Refusal


class Memory(Held):
    """A payload that counts how often it was dropped."""

    def __init__(self) -> None:
        self.drops = 0

    def drop(self) -> None:
        self.drops += 1


class Asked:
    """A request and, once it has one, its answer."""

    def __init__(self) -> None:
        self.answers: list[tuple[list[Entry], Refusal | None]] = []

    def __call__(self, entries: Sequence[Entry], refusal: Refusal | None) -> None:
        self.answers.append((list(entries), refusal))

    @property
    def waits(self) -> bool:
        return not self.answers

    @property
    def ids(self) -> list[str]:
        assert len(self.answers) == 1, "answered exactly once"
        assert self.answers[0][1] is None
        return [entry.id for entry in self.answers[0][0]]

    @property
    def refused(self) -> str:
        assert len(self.answers) == 1, "answered exactly once"
        refusal = self.answers[0][1]
        return "" if refusal is None else refusal.type

    @property
    def leases(self) -> list[int]:
        return [entry.lease for entry in self.answers[0][0]]


class Driver:
    """Talks to an index as its members would; a member's session is its name unless it restarts."""

    def __init__(self, **settings: Any) -> None:
        settings = {"capacity": 0, "producers": ["p"], "consumers": ["c", "d"], **settings}
        self.index = ChannelIndex("q", **settings)
        self._num_requests = 0

    def _caller(self, member: str) -> tuple[Caller, Asked]:
        self._num_requests += 1
        asked = Asked()
        return Caller(member, member, self._num_requests, asked), asked

    def put(self, *ids: str, by: str = "p", wait: bool = True, size_bytes: int = 0, **fields: Any) -> Asked:
        caller, asked = self._caller(by)
        defaults = {"key": "", "weight": 1.0, "iteration": 0, "tombstone": ""}
        entries = [Entry(id=id, producer=by, payload=Memory(), **{**defaults, **fields}) for id in ids]
        self.index.put(caller, entries, wait=wait, size_bytes=size_bytes)
        return asked

    def get(
        self,
        weight: float = 0,
        *,
        at_least: float | None = None,
        by: str = "c",
        key: str | None = None,
        iteration: int | None = None,
        most_bytes: int = 1 << 30,
    ) -> Asked:
        caller, asked = self._caller(by)
        self.index.get(caller, Filter(key, iteration), weight, at_least, most_bytes)
        return asked

    def last_request(self) -> int:
        return self._num_requests

    def end(self, iteration: int, by: str = "p") -> Asked:
        caller, asked = self._caller(by)
        self.index.end(caller, iteration)
        return asked

    def close(self, by: str = "p") -> Asked:
        caller, asked = self._caller(by)
        self.index.close(caller)
        return asked

    def ack(self, asked: Asked, by: str = "c", *, give_back: bool = False) -> None:
        self.index.ack(by, asked.leases, give_back=give_back)

    def die(self, member: str) -> None:
        self.index.left(member, member)

    def keys_of(self, member: str, *, among: Sequence[str] = "abcdefgh") -> list[str]:
        """Returns the keys that a consumer takes while all live, in a channel with routes."""
        assert self.index._homes is not None
        return [key for key in among if self.index._homes.of(key) == member]


def test_order_is_kept_and_a_waiting_get_is_served() -> None:
    q = Driver()
    waiting = q.get()
    assert waiting.waits
    q.put("1", "2", "3")
    assert waiting.ids == ["1"]
    assert q.get().ids == ["2"]


def test_a_full_channel_makes_put_wait_and_put_nowait_fail() -> None:
    q = Driver(capacity=2)
    assert q.put("1", "2").ids == []
    assert q.put("3", wait=False).refused == "ChannelFullError"
    third, fourth = q.put("3"), q.put("4")
    assert third.waits
    assert q.get().ids == ["1"]
    assert third.ids == []
    assert fourth.waits


def test_a_put_of_more_than_the_capacity_goes_in_by_parts() -> None:
    q = Driver(capacity=2)
    put = q.put("1", "2", "3", "4", "5")
    assert [q.get().ids for _ in range(3)] == [["1"], ["2"], ["3"]]
    assert put.ids == []


def test_a_batch_never_exceeds_its_weight_unless_the_first_alone_does() -> None:
    q = Driver()
    q.put("1", weight=3)
    q.put("2", weight=3)
    q.put("heavy", weight=50)
    assert q.get(7).ids == ["1", "2"]
    assert q.get(7).ids == ["heavy"]


def test_weights_that_sum_with_rounding_are_enough() -> None:
    q = Driver()
    for index in range(10):
        q.put(str(index), weight=0.1)
    assert len(q.get(1.0).ids) == 10


def test_a_batch_that_waits_does_not_keep_others_from_items() -> None:
    q = Driver()
    batch, single = q.get(10), q.get(by="d")
    q.put("1")
    assert single.ids == ["1"]
    assert batch.waits


@pytest.mark.parametrize("capacity", [0, 8])
def test_a_batch_that_waits_is_whole_though_items_come_several_at_once(capacity: int) -> None:
    q = Driver(capacity=capacity)
    batch = q.get(4)
    q.put("1", "2", "3")
    assert batch.waits
    q.put("4", "5")
    assert batch.ids == ["1", "2", "3", "4"]


def test_a_batch_takes_what_has_arrived_once_the_least_is_there() -> None:
    q = Driver()
    assert q.get(5, at_least=0).ids == []
    waiting = q.get(5, at_least=2)
    q.put("1")
    assert waiting.waits
    q.put("2", "3")
    assert waiting.ids == ["1", "2", "3"]
    q.put(*"4567890")
    assert q.get(5, at_least=2).ids == ["4", "5", "6", "7", "8"]
    assert q.get(5, at_least=0, iteration=1).ids == []
    q.end(1)
    assert q.get(5, at_least=0, iteration=1).refused == "IterationEnded"


def test_a_get_of_another_key_does_not_wait() -> None:
    q = Driver()
    a = q.get(key="a")
    q.put("1", key="b")
    assert q.get(key="b").ids == ["1"]
    q.put("2", key="a")
    assert a.ids == ["2"]


def test_a_batch_larger_than_the_room_takes_what_is_there() -> None:
    q = Driver(capacity=2)
    batch = q.get(5)
    q.put("1")
    assert batch.waits
    q.put("2")
    assert batch.ids == ["1", "2"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_put_that_finds_no_room_lets_a_batch_take_what_is_there(wait: bool) -> None:
    q = Driver(capacity=2)
    batch = q.get(5, key="k")
    q.put("1", key="k")
    q.put("2")
    assert batch.waits
    late = q.put("3", wait=wait)
    assert batch.ids == ["1"]
    assert late.ids == []
    assert q.put("4", wait=False).refused == "ChannelFullError"


def test_a_batch_holds_what_one_answer_can_and_the_rest_stays_queued() -> None:
    q = Driver()
    for name in "abcd":
        q.put(name, key="n" * 100, size_bytes=1_000)
    assert q.get(4, most_bytes=1_200).ids == ["a", "b"], "128 bytes each, and four for each letter"
    assert q.get(2, most_bytes=1).ids == ["c"]
    assert q.get(1, most_bytes=1).ids == ["d"]


def test_the_tail_is_flushed_and_each_consumer_hears_the_end() -> None:
    q = Driver(producers=["p", "r"])
    q.put("1", "2", iteration=4)
    batch = q.get(8, iteration=4)
    q.end(4)
    assert batch.waits
    q.end(4, by="r")
    assert batch.ids == ["1", "2"]
    for consumer in ("c", "d", "c"):
        assert q.get(8, by=consumer, iteration=4).refused == "IterationEnded"
    assert q.get(8, iteration=5).waits


def test_the_tail_is_flushed_for_a_get_of_any_iteration() -> None:
    q = Driver()
    batch = q.get(8)
    q.put("1")
    q.end(0)
    assert batch.ids == ["1"]


def test_a_put_after_the_end_of_an_iteration_is_an_error() -> None:
    q = Driver()
    q.end(0)
    assert q.put("1").refused == "IterationOverError"


def test_what_waits_for_room_has_not_ended() -> None:
    q = Driver(capacity=1)
    q.put("filler", iteration=1, key="a")
    put = q.put("1", iteration=0, key="b")
    q.end(0)
    tail = q.get(8, iteration=0)
    q.close()
    by_key, other = q.get(key="b", by="d"), q.get(key="c", by="d")
    assert tail.waits
    assert by_key.waits
    assert other.refused == "ChannelClosedError"
    assert q.get().ids == ["filler"]
    assert put.ids == []
    assert tail.ids == ["1"]
    assert by_key.refused == "ChannelClosedError"


def test_what_waited_for_room_in_vain_has_ended() -> None:
    q = Driver(capacity=1)
    q.put("1")
    q.ack(q.get())
    q.put("filler", iteration=1)
    q.put("1")
    q.end(0)
    doubled = q.get(iteration=0)
    assert doubled.waits
    q.get(iteration=1)
    assert doubled.refused == "IterationEnded", "it is dropped as it comes in"
    q.put("another", iteration=1)
    q.put("2", iteration=2)
    cancelled = q.last_request()
    q.end(2)
    late = q.get(iteration=2)
    q.index.cancel("c", q.last_request())
    assert late.answers[0][1] == Refusal("TimeoutError_", peers=("p",))
    waiting = q.get(iteration=2)
    assert waiting.waits
    q.index.cancel("p", cancelled)
    assert waiting.refused == "IterationEnded"


def test_close_lets_consumers_drain() -> None:
    q = Driver(producers=["p", "r"])
    q.put("1")
    q.close()
    assert q.put("2").refused == "ChannelClosedError"
    q.close(by="r")
    assert q.get().ids == ["1"]
    assert q.get().refused == "ChannelClosedError"


def test_close_by_one_who_is_no_member_ends_it_for_all() -> None:
    q = Driver(capacity=1)
    q.put("1")
    waiting = q.put("2")
    q.close(by="driver")
    assert waiting.refused == "ChannelClosedError"
    assert q.get().ids == ["1"]
    assert q.get().refused == "ChannelClosedError"


def test_a_dead_producer_is_named_after_what_it_put_is_drained() -> None:
    q = Driver(producers=["p", "r"])
    q.put("1")
    batch = q.get(5)
    q.die("p")
    assert batch.ids == ["1"]
    lost = q.get(5)
    assert lost.refused == "PeerLostError"
    refusal = lost.answers[0][1]
    assert refusal is not None
    assert refusal.peers == ("p",)


def test_a_dead_producer_with_a_successor_is_waited_for() -> None:
    q = Driver()
    q.index.announce_successor("p", "p2")
    q.die("p")
    waiting = q.get()
    assert waiting.waits
    q.put("1", by="p2")
    assert waiting.ids == ["1"]


def test_a_producer_that_closed_before_it_died_is_not_lost() -> None:
    q = Driver()
    q.close()
    q.die("p")
    assert q.get().refused == "ChannelClosedError"


def test_a_dead_consumers_leases_are_given_out_again_in_order_once() -> None:
    q = Driver()
    q.put(*map(str, range(6)))
    first, second = q.get(2), q.get(2, by="d")
    q.die("d")
    q.die("c")
    assert first.ids + second.ids == ["0", "1", "2", "3"]
    again = q.get(6)
    assert again.ids == ["0", "1", "2", "3", "4", "5"]
    q.ack(again)
    assert (q.index.num_queued, q.index.num_leased, q.index.counts.regiven) == (0, 0, 4)


def test_an_acknowledged_item_is_dropped_and_a_late_ack_ignored() -> None:
    q = Driver()
    q.put("1")
    taken = q.get()
    q.die("c")
    q.ack(taken)
    again = q.get(by="d")
    assert again.ids == ["1"]
    memory: Any = again.answers[0][0][0].payload
    assert memory.drops == 0
    q.ack(again, by="d")
    q.ack(again, by="d")
    assert memory.drops == 1


def test_a_doubled_id_is_dropped_within_its_iteration() -> None:
    q = Driver()
    q.put("1", "1", iteration=0)
    q.put("1", iteration=1)
    q.put("", "", iteration=0)
    assert q.get(9, iteration=0).waits
    assert q.index.num_queued == 4
    assert q.index.counts.dropped == 1


def test_a_withdrawn_request_loses_nothing() -> None:
    q = Driver(capacity=1)
    get = q.get()
    q.index.cancel("c", q.last_request())
    assert get.refused == "TimeoutError_"
    q.put("1")
    put = q.put("2")
    q.index.cancel("p", q.last_request())
    assert put.refused == "TimeoutError_"
    taken = q.get()
    assert taken.ids == ["1"]
    q.ack(taken, give_back=True)
    assert q.get().ids == ["1"]
    assert q.put("2", wait=False).ids == []


def test_a_dead_producers_waiting_put_may_be_put_again() -> None:
    q = Driver(capacity=1)
    q.put("1")
    q.put("2")
    q.die("p")
    q.get()
    assert q.put("2").ids == []
    assert q.get().ids == ["2"]


def test_keys_and_iterations_leave_nothing_behind() -> None:
    q = Driver()
    for start in range(0, 1000, 100):
        for index in range(start, start + 100):
            q.put(str(index), key=f"k{index}", iteration=index)
        for index in reversed(range(start, start + 100)):
            q.ack(q.get(key=f"k{index}"))
            q.end(index)
    assert q.index.num_states() == 0
    assert len(q.index._seen) == 0
    assert len(q.index.members.producers["p"][0].ended) == 1


@pytest.mark.medium
def test_many_fresh_keys_leave_nothing_behind_and_their_ids_nothing_once_the_iteration_has_ended() -> None:
    # Of more keys than `filters_of` remembers.
    q, keys = Driver(), range(100_000)
    for index in keys:
        q.put(str(index), key=f"k{index}")
    for index in keys:
        q.ack(q.get(key=f"k{index}"))
    assert q.index.num_states() == 0
    assert sum(map(len, q.index._seen.values())) == len(keys)
    q.end(0)
    assert len(q.index._seen) == 0
    assert len(q.index._queue._views) == 0


def test_long_keys_leave_no_memory_behind() -> None:
    q = Driver()
    tracemalloc.start()
    try:
        for index in range(100):
            key = f"{index}" + "k" * 100_000
            q.put(str(index), key=key)
            q.ack(q.get(key=key))
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("by", ["p", "a driver"])
def test_of_a_closed_and_drained_channel_nothing_is_remembered(by: str) -> None:
    q = Driver()
    q.put("1", "2", key="k")
    q.ack(q.get())
    q.close(by=by)
    assert q.put("1").refused == "ChannelClosedError"
    q.ack(q.get())
    assert (q.index.num_states(), len(q.index._seen)) == (0, 0)


def test_a_weight_is_not_lost_beside_one_that_is_much_greater() -> None:
    q = Driver()
    q.put("heavy", weight=2.0**53)
    q.put(*"abcd", weight=0.25)
    assert q.get().ids == ["heavy"]
    assert q.index.queued_weight == 1.0
    assert q.get(1.0).ids == list("abcd")


def test_a_sum_of_weights_does_not_drift_with_what_comes_and_goes() -> None:
    q, rng = Driver(), random.Random(0)
    for _ in range(3000):
        q.put("", weight=rng.choice([0.1, 1e6 * rng.random()]))
    q.put(*"abcdefgh", weight=0.1)
    for _ in range(3000):
        q.get()
    assert q.index.queued_weight == pytest.approx(0.8, rel=1e-12)
    assert q.get(0.8).ids == list("abcdefgh")


@pytest.mark.timeout(6)
@pytest.mark.parametrize("route", ["any", "by_key"])
def test_what_a_dead_consumer_leaves_is_taken_in_order(route: str) -> None:
    q = Driver(route=route)
    for member in "cd":
        for key, iteration in [("none", None), (None, 9), ("none", 9)]:
            q.get(1, at_least=0, by=member, key=key, iteration=iteration)
    keys = [f"k{index}" for index in range(100)]
    for index in range(20_000):
        q.put(str(index), key=keys[index % 100], iteration=index % 3)
    mine = keys if route == "any" else q.keys_of("c", among=keys)
    for key in mine[::2]:
        q.get(key=key)
    q.get(8)
    assert q.index.num_leased == len(mine[::2]) + 8
    q.die("c")
    assert q.index.counts.regiven == len(mine[::2]) + 8
    for wanted, view in q.index._queue._views.items():
        orders = [entry.order for entry in view]
        assert orders == sorted(orders)
        assert all(wanted in entry.filters for entry in view)
    assert q.get(20_000, by="d").ids == [str(index) for index in range(20_000)]


@pytest.mark.parametrize("route", ["any", "by_key"])
def test_a_death_a_return_and_a_close_are_no_more_work_however_much_is_queued(route: str) -> None:
    few, many = _work_of_leaving(route, 2_000), _work_of_leaving(route, 40_000)
    assert len(few) == 3
    assert all(more < 1.5 * less + 50 for less, more in zip(few, many, strict=True)), (few, many)


def _work_of_leaving(route: str, count: int) -> list[int]:
    """Returns how many functions a death, a return and a close call, with so many items queued beside 64 leases."""
    q = Driver(route=route)
    keys = [f"k{index}" for index in range(count)]
    q.get(1, at_least=0, key="none")  # from now on it is queued by key too
    q.index.put(q._caller("p")[0], [Entry(key, key, 1.0, 0, "p", "", b"") for key in keys], wait=True)
    mine = keys if route == "any" else q.keys_of("c", among=keys)
    # From all over the queue, in the middle of what stays.
    leased = [q.get(key=key).ids[0] for key in mine[:: len(mine) // 64][:64]]
    died = _num_calls(lambda: q.die("c"))
    assert [q.get(key=key, by="d").ids[0] for key in leased] == leased
    return [died, _num_calls(lambda: q.get(key="none", at_least=0)), _num_calls(lambda: q.close(by="c"))]


def _num_calls(action: Callable[[], Any]) -> int:
    """Returns how many functions an action calls, C's among them."""
    events: Counter[str] = Counter()
    sys.setprofile(lambda _frame, event, _argument: events.update([event]))
    try:
        action()
    finally:
        sys.setprofile(None)
    return events["call"] + events["c_call"]


def test_who_waits_for_more_has_what_is_left_once_nothing_more_comes() -> None:
    q = Driver()
    q.put("1", iteration=0)
    q.put("2", iteration=1)
    waiting = q.get(3)
    q.end(0)
    assert waiting.waits
    assert q.get(by="d", iteration=1).ids == ["2"]
    assert waiting.ids == ["1"]


def test_who_waits_for_more_has_what_fills_the_channel_alone() -> None:
    q = Driver(capacity=1)
    q.put("1", iteration=0)
    taken = q.get(by="d")
    q.put("2", iteration=1)
    waiting = q.get(5, iteration=0)
    q.ack(taken, by="d", give_back=True)
    assert waiting.waits
    assert q.index.num_queued == 2, "one more than its capacity"
    assert q.get(by="d", iteration=1).ids == ["2"]
    assert waiting.ids == ["1"]


def test_a_producer_that_was_followed_may_close_late() -> None:
    q = Driver(producers=["p", "s"])
    q.put("1", by="p")
    q.die("p")
    q.index.announce_successor("p", "s")
    assert q.close(by="p").refused == ""
    assert not q.index.closed
    assert q.put("2", by="s").refused == ""


def test_who_waits_for_the_leases_of_the_dead_has_them_in_the_order_of_their_key() -> None:
    q = Driver(route="by_key")
    key = q.keys_of("c")[0]
    q.put("1", "2", "3", key=key)
    first, _ = q.get(), q.get()
    q.ack(first, give_back=True)
    waiting = [q.get(by="d", key=key) for _ in range(3)]
    q.die("c")
    assert [get.ids for get in waiting] == [["1"], ["2"], ["3"]]


def test_what_comes_back_again_and_again_keeps_its_place() -> None:
    q, rng = Driver(), random.Random(0)
    q.put(*map(str, range(40)))
    for _ in range(200):
        held = q.get(rng.randint(1, 40))
        q.index.ack("c", rng.sample(held.leases, rng.randint(0, len(held.leases))), give_back=True)
        q.die("c")
        orders = [entry.order for entry in q.index._queue.all()]
        assert orders == list(range(1, 41))
    assert q.get(40).ids == list(map(str, range(40)))


@pytest.mark.parametrize("route", ["any", "by_key"])
def test_what_comes_back_leaves_nothing_behind_once_it_is_taken(route: str) -> None:
    q = Driver(route=route)
    for index in range(20):
        q.put(str(index), key=f"k{index}")
        q.get(1, at_least=0)
        q.die("c")
        q.ack(q.get(1, by="d"), by="d")
    q.end(0)
    assert q.index.num_states() == 0


def test_a_channel_full_of_what_came_back_gives_out_less_than_was_asked_for() -> None:
    q = Driver(capacity=2)
    q.put("1", "2")
    q.ack(q.get(2), give_back=True)
    assert q.get(3).ids == ["1", "2"]


def test_a_route_puts_a_key_on_one_consumer_for_as_long_as_it_lives() -> None:
    q = Driver(route="by_key")
    assert len(q.keys_of("c")) > 0 < len(q.keys_of("d"))
    for key in "abcdefgh":
        q.put(key, key=key)
    assert [q.get(by="c").ids[0] for _ in q.keys_of("c")] == q.keys_of("c")
    assert q.get(by="c").waits
    q.die("c")
    assert [q.get(by="d").ids[0] for _ in "abcdefgh"] == list("abcdefgh"), "in order of arrival, its own or inherited"


@pytest.mark.parametrize("back", ["c", "d"])
def test_who_returns_first_takes_what_was_for_those_who_are_dead(back: str) -> None:
    q = Driver(route="by_key")
    q.put(*"abcdefgh", key="")
    for key in "abcdefgh":
        q.put(f"of {key}", key=key)
    q.die("c")
    q.die("d")
    assert len([q.get(by=back).ids for _ in range(16)]) == 16
    assert q.index.num_queued == 0


def test_an_heir_is_woken_by_what_it_inherits_and_by_what_comes_for_it() -> None:
    q = Driver(route="by_key")
    key, other = q.keys_of("c")[0], q.keys_of("d")[0]
    q.put("1", key=key)
    batch, by_key = q.get(3, by="d"), q.get(by="d", key=key)
    q.put("2", key=other)
    assert batch.waits
    assert by_key.waits
    q.die("c")
    assert by_key.ids == ["1"]
    q.put("3", key=other)
    assert batch.waits
    q.put("4", key=key)
    assert batch.ids == ["2", "3", "4"]


def test_who_stood_in_for_one_who_is_back_does_not_wait_for_what_is_for_that_one() -> None:
    q = Driver(route="by_key", capacity=1)
    q.put("1", key=q.keys_of("d")[0], iteration=1)
    q.put("2", key=q.keys_of("c")[0], iteration=0)
    q.end(0)
    q.die("c")
    tail = q.get(by="d", iteration=0)
    assert tail.waits
    back = q.get()
    assert tail.refused == "IterationEnded"
    assert q.get(by="d").ids == ["1"]
    assert back.ids == ["2"]


def test_a_key_goes_home_with_its_consumer() -> None:
    q = Driver(route="by_key")
    mine = q.keys_of("c")
    q.put(*mine[:1], key=mine[0])
    q.die("c")
    q.put("2", key=mine[0])
    waiting = q.get(by="c", key="other")
    assert waiting.waits
    assert [q.get(by="c").ids for _ in range(2)] == [[mine[0]], ["2"]]
    assert q.get(by="d").waits


def test_the_end_of_an_earlier_life_is_no_death_of_the_next() -> None:
    q = Driver(route="by_key")
    key = q.keys_of("c")[0]
    waiting = q.get()
    q.index.left("an earlier connection", "c")
    q.put("1", key=key)
    assert waiting.ids == ["1"]
    q.index.left("an earlier connection", "p")
    assert q.get().waits


def test_a_successor_goes_on_where_the_other_left_off() -> None:
    q = Driver()
    q.put("1", "2", iteration=0)
    q.end(0)
    tail = q.get(8, iteration=0)
    q.ack(tail)
    q.die("p")
    q.index.announce_successor("p", "p2")
    assert q.get(iteration=0).refused == "IterationEnded"
    assert q.put("1", by="p2", iteration=0).refused == "IterationOverError"
    assert q.put("1", by="p2", iteration=1).ids == []
    assert q.put("1", iteration=1).refused == "CommError", "its place is taken"
    q.die("p2")
    q.get(iteration=1)
    lost = q.get()
    assert lost.answers[0][1] == Refusal("PeerLostError", peers=("p2",))


def test_a_producer_that_follows_another_answers_for_both() -> None:
    q = Driver(producers=["p", "r"])
    q.end(0)
    q.end(1)
    q.end(0, by="r")
    q.die("r")
    q.index.announce_successor("r", "p")
    assert q.get(iteration=0).refused == "IterationEnded"
    waiting = q.get(iteration=1)
    assert waiting.waits
    q.put("1", iteration=1)
    assert waiting.ids == ["1"]
    q.end(1)
    assert q.get(iteration=1).refused == "IterationEnded"


def test_only_a_producer_can_be_followed() -> None:
    q = Driver()
    with pytest.raises(ValueError, match="got 'x' to be followed, want one of the producers p"):
        q.index.announce_successor("x", "p2")
    assert q.put("1", by="p2").refused == "CommError"


def test_a_producer_that_is_gone_before_it_has_put_is_named_until_it_is_back() -> None:
    q = Driver()
    waiting = q.get()
    q.die("p")
    assert waiting.refused == "PeerLostError"
    q.put("1")
    assert q.get().ids == ["1"]
    assert q.get().waits


def test_a_producer_that_is_back_is_awaited_though_its_put_is_refused() -> None:
    q = Driver(capacity=1)
    q.put("1")
    q.die("p")
    assert q.put("2", wait=False).refused == "ChannelFullError"
    assert q.get().ids == ["1"]
    assert q.get().waits


def test_the_last_consumer_to_close_ends_what_waits() -> None:
    q = Driver(capacity=1)
    q.put("1", key="k")
    put, get = q.put("2"), q.get(by="d", key="other")
    q.close(by="c")
    assert put.waits
    q.close(by="d")
    assert get.refused == "ChannelClosedError"
    assert put.refused == "ChannelClosedError"
    assert q.get().ids == ["1"], "one that comes back finds what is queued"
    assert q.put("3").ids == []


def test_a_lease_of_an_earlier_channel_of_this_name_is_unknown() -> None:
    earlier, q = Driver(), Driver()
    earlier.put("old")
    q.put("new")
    old, _ = earlier.get(), q.get()
    q.ack(old)
    assert q.index.num_leased == 1


def test_consumers_that_pull_are_balanced_by_their_own_speed() -> None:
    q = Driver(capacity=4)
    seconds = {"c": 1, "d": 4}
    taken = dict.fromkeys(seconds, 0)
    free_at, held = dict.fromkeys(seconds, 0), {}
    for index in range(1000):
        q.put(str(index))
        consumer = min(free_at, key=lambda name: free_at[name])
        if consumer in held:
            q.ack(held[consumer], by=consumer)
        held[consumer] = q.get(by=consumer)
        taken[consumer] += len(held[consumer].ids)
        free_at[consumer] += seconds[consumer]
    assert sum(taken.values()) / max(free_at.values()) >= 0.9 * (1 + 1 / 4)


def test_strangers_are_refused() -> None:
    q = Driver()
    assert q.put("1", by="x").refused == "CommError"
    assert q.get(by="x").refused == "CommError"
    assert q.end(0, by="x").refused == "CommError"


def test_a_consumer_that_closes_gives_its_leases_back() -> None:
    q = Driver()
    q.put("1")
    q.get()
    q.close(by="c")
    assert q.get(by="d").ids == ["1"]
    q.close(by="d")
    assert q.put("2").refused == "ChannelClosedError"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"consumers": [], "route": "by_key"}, "got no consumers, want at least one to route keys to"),
        ({"capacity": -1}, "got capacity -1, want an int: 1 or more, or 0 for no bound"),
        ({"route": "by-key"}, "got route 'by-key', want 'any' or 'by_key'"),
        ({"producers": "ab"}, r"got producers 'ab', want a list of names: give it \['ab'\]"),
        ({"consumers": "c"}, "got consumers 'c', want a list of names"),
    ],
    ids=str,
)
def test_a_channel_that_cannot_be_is_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"channel 'q': {fault}"):
        Driver(**settings)


def test_what_is_acknowledged_after_its_lease_was_lost_is_told_once_and_given_out_again() -> None:
    driver = Driver()
    driver.put("a", "b")
    leases = driver.get(2).leases
    driver.die("c")
    for _ in range(3):
        driver.index.ack("c", leases, give_back=False)
    assert driver.get().answers == [([], Refusal("LeaseLostError", "'a' and 1 more"))]
    again = driver.get(2)
    assert again.ids == ["a", "b"]
    # Acknowledged by another lease it is done, and nobody hears of the first one any more.
    driver.ack(again)
    driver.index.ack("c", leases, give_back=False)
    driver.put("c")
    assert driver.get().ids == ["c"]
    assert driver.index.counts.acked == 2
    driver.close()
    assert driver.index.num_states() == 1


def test_an_acknowledgement_over_a_new_connection_ends_a_lease_of_the_one_before() -> None:
    driver = Driver()
    driver.put("a")
    leases = driver.get().leases
    driver.index.ack("c anew", leases, give_back=False)
    driver.die("c")
    assert driver.index.counts.acked == 1
    assert driver.index.num_queued == 0
    # The host had heard of it, though not its answer.
    driver.index.ack("c", leases, give_back=False)
    driver.close()
    assert driver.get().refused == "ChannelClosedError"


@pytest.mark.timeout(10)
def test_withdrawing_many_who_wait_takes_no_longer_for_each() -> None:
    driver = Driver(capacity=1)
    driver.put("full")
    asked = [driver.put(str(number)) for number in range(20_000)]
    asked += [driver.get(key=str(number)) for number in range(20_000)]
    for request in range(driver.last_request(), driver.last_request() - len(asked), -1):
        driver.index.cancel("p" if request <= len(asked) // 2 + 1 else "c", request)
    assert {one.refused for one in asked} == {"TimeoutError_"}


def test_withdrawing_a_put_behind_another_looks_at_nobody_who_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(capacity=1)
    driver.put("full")
    waits = driver.get(key="k")
    first, second = driver.put("1"), driver.put("2")
    with monkeypatch.context() as patch:
        patch.setattr(driver.index, "_serve_all", None)
        driver.index.cancel("p", driver.last_request())
    assert second.refused == "TimeoutError_"
    assert first.waits
    assert waits.waits
