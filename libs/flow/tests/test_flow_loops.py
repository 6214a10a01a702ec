"""Loops with several feeds, loops in loops, and deaths on the way back: each item leaves once, whatever the plan."""

import pytest

from m2flow.flow import Runtime, spatial_plan, temporal_plan, trace
from m2flow.flow.testing import SyntheticHand, goes_round, is_odd
from m2flow.worker import Cluster, Item, launch_run

LEFT = [0, 1, 2, 3, 4, 7]


def results(program, does=None, names="abc"):
    """What the program gives, in turns on one device and side by side on six: outputs and tombstones."""
    config = {name: {"does": (does or {}).get(name, {})} for name in names}
    groups = {name: SyntheticHand.group(config[name], name=name, device_kind="virtual") for name in names}
    graph = trace(program, groups, source_items=len(LEFT))
    for make, num_devices in ((temporal_plan, 1), (spatial_plan, 6)):
        cluster = Cluster.virtual(num_devices)
        with (
            launch_run(cluster, launcher="inproc") as session,
            Runtime(graph, make(graph, cluster), session) as runtime,
        ):
            runtime.start()
            result = runtime.run(0, [Item((place,), 0, {"left": left}) for place, left in enumerate(LEFT)])
        yield {item.seq[0]: (item.fields["left"], item.fields["seen"]) for item in result.outputs}, result.tombstones


def two_feeds(flow, a, b, c):
    head = flow.loop(flow.source("items"))
    to_b, rest = flow.split(is_odd, a.work(head))
    to_c, done = flow.split(goes_round, rest)
    head.feed(b.work(to_b))
    head.feed(c.work(to_c))
    return done


def two_bare_feeds(flow, a, b, c):
    head = flow.loop(flow.source("items"))
    odd, rest = flow.split(is_odd, c.work(b.work(a.work(head))))
    even, done = flow.split(goes_round, rest)
    head.feed(odd)
    head.feed(even)
    return done


def meets_inside(flow, a, b, c):
    head = flow.loop(flow.source("items"))
    again, done = flow.split(goes_round, a.work(head))
    odd, even = flow.split(is_odd, again)
    head.feed(c.work(flow.merge(b.work(odd), even)))
    return done


def nested(flow, a, b, c):
    outer = flow.loop(a.work(flow.source("items")))
    inner = flow.loop(b.work(outer))
    again, out = flow.split(is_odd, c.work(inner))
    inner.feed(again)
    around, done = flow.split(goes_round, out)
    outer.feed(around)
    return done


def by_hand(program, left):
    """What becomes of an item: rounds left, and how many stages have seen it."""
    seen = 0

    def work(times=1):
        nonlocal left, seen
        left, seen = max(0, left - times), seen + times

    if program in (two_feeds, meets_inside):
        work()
        while left:
            work(1 if program is two_feeds or left % 2 == 0 else 2)
            work()
    elif program is two_bare_feeds:
        work(3)
        while left:
            work(3)
    else:
        work(2)
        work()
        while left:
            work(1 if left % 2 else 2)
    return left, seen


@pytest.mark.medium
@pytest.mark.parametrize("program", [two_feeds, two_bare_feeds, meets_inside, nested])
def test_every_item_leaves_once_after_its_rounds(program):
    wanted = {place: by_hand(program, left) for place, left in enumerate(LEFT)}
    for outputs, tombstones in results(program):
        assert outputs == wanted
        assert tombstones == {}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("program", "killer", "survivors"),
    [
        pytest.param(two_feeds, "c", {0, 1, 2, 4, 5}, id="behind the way out"),
        pytest.param(two_feeds, "a", {0, 1, 2, 4, 5}, id="in front of two ways back"),
        pytest.param(nested, "c", {0, 1, 2, 4, 5}, id="in a loop in a loop"),
    ],
)
def test_a_death_inside_a_loop_is_counted_once(program, killer, survivors):
    for outputs, tombstones in results(program, does={killer: {"3": "drop"}}):
        assert set(outputs) == survivors
        assert tombstones == {"dropped": 1}


@pytest.mark.medium
def test_several_epochs_behind_a_loop_give_each_item_as_often():
    """A first epoch counts from the round in which an item left its loop, the next must not be taken for it."""

    def program(flow, a, b):
        head = flow.loop(flow.source("items"))
        again, done = flow.split(goes_round, a.work(head))
        head.feed(again)
        return b.work(flow.epochs(done, 3))

    groups = {name: SyntheticHand.group({}, name=name, device_kind="virtual") for name in "ab"}
    graph, cluster = trace(program, groups, source_items=3), Cluster.virtual(2)
    plan = spatial_plan(graph, cluster)
    with launch_run(cluster, launcher="inproc") as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        result = runtime.run(0, [Item((place,), 0, {"left": place + 1}) for place in range(3)])
    assert [item.seq for item in result.outputs] == [(place,) for place in range(3) for _ in range(3)]
