"""The lock's state on a virtual clock: exclusion, order, no deadlock, no starvation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.worker.lock import LockTable, Ticket


def test_all_or_none_and_the_earlier_ticket_is_not_overtaken() -> None:
    table = LockTable()
    assert table.ask(1, "rollout", [0], (0, 0), peer="a", now_s=0.0) == [1]
    assert table.ask(2, "actor", [0, 1], (0, 1), peer="b", now_s=1.0) == []
    # Device 1 is free, but actor has waited for it with an earlier ticket.
    assert table.ask(3, "reward", [1], (0, 2), peer="c", now_s=2.0) == []
    assert table.release(1, now_s=5.0) == [2]
    stats = table.stats()
    assert [(hold.owner, hold.waited_s) for hold in stats.holds] == [("actor", 4.0)]
    assert [waiter.owner for waiter in stats.waiters] == ["reward"]
    assert table.release(2, now_s=6.0) == [3]
    assert table.stats().held_s == 6.0


def test_tickets_go_by_iteration_then_position_then_arrival() -> None:
    table = LockTable()
    table.ask(0, "holder", [0], (0, 0), peer="p", now_s=0)
    for request, ticket in enumerate([(1, 0), (0, 2), (0, 1), (0, 1)], start=1):
        table.ask(request, f"unit{request}", [0], ticket, peer="p", now_s=0)
    order = []
    holder = 0
    while granted := table.release(holder, now_s=0):
        (holder,) = granted
        order.append(holder)
    assert order == [3, 4, 2, 1]


def test_a_unit_that_holds_is_let_in_whichever_of_its_ranks_asks() -> None:
    table = LockTable()
    table.ask(1, "actor", [0, 1], (0, 1), peer="actor.0", now_s=0)
    table.ask(2, "rollout", [0], (0, 0), peer="rollout.0", now_s=0)
    assert table.ask(3, "actor", [0, 1], (0, 1), peer="actor.1", now_s=0) == [3]
    assert table.release(1, now_s=0) == []
    assert table.lose("actor.1", now_s=0) == [2]


def test_a_unit_asks_for_all_its_devices_at_once() -> None:
    table = LockTable()
    table.ask(1, "actor", [0], (0, 0), peer="p", now_s=0)
    with pytest.raises(ValueError, match=r"has a turn on \[0\] and asks for \[0, 1\]"):
        table.ask(2, "actor", [0, 1], (0, 0), peer="p", now_s=0)
    with pytest.raises(ValueError, match="no devices"):
        table.ask(3, "other", [], (0, 0), peer="p", now_s=0)


def test_a_hold_is_in_the_way_of_whoever_waits_for_one_of_its_devices() -> None:
    table = LockTable()
    table.ask(1, "a", [0, 1], (0, 0), peer="p", now_s=0)
    table.ask(2, "b", [2], (0, 1), peer="p", now_s=0)
    assert table.in_the_way() == set()
    table.ask(3, "c", [1, 3], (0, 2), peer="p", now_s=0)
    assert table.in_the_way() == {1}
    assert table.release(1, now_s=0) == [3]
    assert table.in_the_way() == set()


def test_the_dead_neither_hold_nor_wait() -> None:
    table = LockTable()
    table.ask(1, "a", [0], (0, 0), peer="dead", now_s=0)
    table.ask(2, "b", [0], (0, 1), peer="dead", now_s=0)
    table.ask(3, "c", [0], (0, 2), peer="alive", now_s=0)
    assert table.lose("dead", now_s=1) == [3]
    assert table.release(1, now_s=2) == []


REQUESTS = st.lists(
    st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30
)


@given(REQUESTS, st.randoms(use_true_random=False))
def test_random_overlapping_requests_exclude_each_other_and_all_are_served(
    requests: list[tuple[set[int], int, int]], random: object
) -> None:
    table = LockTable()
    devices = {number: frozenset(wanted) for number, (wanted, _, _) in enumerate(requests)}
    tickets: dict[int, Ticket] = {number: (iteration, place) for number, (_, iteration, place) in enumerate(requests)}
    to_ask = list(devices)
    holding: set[int] = set()
    served: set[int] = set()
    now = 0.0
    while len(served) < len(devices):
        now += 1.0
        asking = to_ask and (not holding or random.random() < 0.6)  # type: ignore[attr-defined]
        if asking:
            number = to_ask.pop(0)
            granted = table.ask(number, f"unit{number}", list(devices[number]), tickets[number], peer="p", now_s=now)
        else:
            # Whoever asked and is not served waits for a holder: if nobody held, this would be a deadlock.
            assert holding
            number = random.choice(sorted(holding))  # type: ignore[attr-defined]
            holding.discard(number)
            served.add(number)
            granted = table.release(number, now_s=now)
        for new in granted:
            assert not any(devices[new] & devices[other] for other in holding)
            holding.add(new)
        waiting = {waiter.request for waiter in table.stats().waiters}
        for earlier in waiting:
            # Nobody is passed over on a device that is free: the first in line for all its devices has them.
            blockers = {n for n in holding if devices[n] & devices[earlier]}
            before = {
                n for n in waiting if devices[n] & devices[earlier] and (tickets[n], n) < (tickets[earlier], earlier)
            }
            assert blockers or before
        for new in granted:
            overtaken = {n for n in waiting if devices[n] & devices[new] and (tickets[n], n) < (tickets[new], new)}
            assert not overtaken
    assert not table.stats().holds
