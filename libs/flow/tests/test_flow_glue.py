"""Glue and source order: what is released when, whatever order things arrive in."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.flow import RunError
from m2flow.flow.glue import SPLIT, Glue, Quota
from m2flow.flow.microflow import Op
from m2flow.flow.order import SourceOrder, seq_of_group
from m2flow.worker import Group, Item

HERE = "m2flow.flow.testing"


def samples(num_prompts=3, size=4):
    prompts = [Item((number,), 0) for number in range(num_prompts)]
    return [p.child(index, size, "prompt", reward=float(index)) for p in prompts for index in range(size)]


def gather():
    return Op("gather:prompt", "gather", ("far",), by="prompt")


def test_a_group_is_released_when_it_is_whole_not_when_the_batch_is():
    glue = Glue([gather()], "gather:prompt")
    items = samples(2, 2)
    assert glue.push(items[2], "far") == []
    assert glue.push(items[0], "far") == []
    (whole,) = glue.push(items[3], "far")
    assert whole.seq == (1,)
    assert [member.seq for member in whole.members] == [(1, 0), (1, 1)]
    assert glue.demand(1) == 1
    assert glue.demand(2) == 2


def test_members_are_in_source_order_and_the_dead_are_counted():
    glue = Glue([gather()], "gather:prompt")
    items = samples(1, 3)
    out = [made for item in (items[2], items[1].as_tombstone("too long"), items[0]) for made in glue.push(item, "far")]
    assert [member.seq for member in out[0].members] == [(0, 0), (0, 2)]
    assert glue.lost == {"too long": 1}


def test_a_group_of_tombstones_is_a_tombstone():
    glue = Glue([gather()], "gather:prompt")
    out = [made for item in samples(1, 2) for made in glue.push(item.as_tombstone("bad"), "far")]
    assert [(item.seq, item.tombstone) for item in out] == [((0,), "bad")]


def test_a_tombstone_from_before_the_group_stands_for_all_of_it():
    glue = Glue([gather()], "gather:prompt")
    (out,) = glue.push(Item((7,), 0).as_tombstone("no prompt"), "far")
    assert (out.seq, out.tombstone) == ((7,), "no prompt")


def test_an_incomplete_group_is_an_error_that_counts():
    glue = Glue([gather()], "gather:prompt")
    glue.push(samples(1, 3)[0], "far")
    with pytest.raises(RunError, match="group 0:0 ended the iteration with 1 of 3"):
        glue.finish()


def test_an_item_without_the_group_is_an_error_with_a_remedy():
    with pytest.raises(RunError, match=r"has groups none, want 'prompt'.*parent.child"):
        Glue([gather()], "gather:prompt").push(Item((0,), 0), "far")


def test_an_outer_group_is_gathered_after_the_inner_one():
    grandchild = samples(1, 2)[0].child(0, 3, "step")
    with pytest.raises(
        RunError, match=r"0:0\.0\.0 is one of 3 of 0:0\.0 by 'step'.*gather by 'step', then by 'prompt'"
    ):
        Glue([gather()], "gather:prompt").push(grandchild, "far")


def test_a_group_of_several_source_items_is_refused_where_it_is_not_seen_as_a_whole():
    items = [Item((place,), 0, groups={"prompt": Group("pair", 2)}) for place in range(2)]
    anywhere = Glue([gather()], "gather:prompt")
    assert [made.seq for item in items for made in anywhere.push(item, "far")] == [(0,)]
    with pytest.raises(RunError, match=r"group pair of item 0:0 may hold .* several source items.*one rank"):
        Glue([replace(gather(), local=True)], "gather:prompt").push(items[0], "far")


def test_a_merge_takes_a_place_by_one_way_and_what_died_before_its_split_once():
    merge = Op("merge", "merge", ("one", "two"))
    glue = Glue([merge], "merge")
    dead = Item((1,), 0).as_tombstone("died")
    assert [made.seq for port in ("one", "two") for made in glue.push(dead, port)] == [(1,)]
    assert glue.push(Item((0,), 0), "one")
    with pytest.raises(RunError, match=r"merge: item 0:0 came by one and by two, want different items"):
        glue.push(Item((0,), 0), "two")
    looped = Glue([replace(merge, looped=True)], "merge")
    assert [len(looped.push(Item((0,), 0), port)) for port in ("one", "two")] == [1, 1]


def test_map_and_filter_work_on_the_living():
    ops = [
        gather(),
        Op("filter:is_mixed", "filter", ("gather:prompt",), function=f"{HERE}:is_mixed", reason="all equal"),
        Op("map:mean_reward", "map", ("filter:is_mixed",), function=f"{HERE}:mean_reward"),
    ]
    glue = Glue(ops, "map:mean_reward")
    items = samples(2, 2)
    equal = [item.with_fields(reward=1.0) for item in items[2:]]
    out = [made for item in items[:2] + equal for made in glue.push(item, "far")]
    # By hand: rewards 0 and 1 have mean 0.5; the second group is all-equal.
    assert out[0].fields["advantages"] == [-0.5, 0.5]
    assert (out[1].seq, out[1].tombstone) == ((1,), "all equal")


def test_split_halves_meet_again_in_a_merge():
    split = {"kind": "filter", "inputs": ("far",), "function": f"{HERE}:is_live", "reason": SPLIT}
    ops = [
        Op("yes", branch="yes", **split),
        Op("no", branch="no", **split),
        Op("merge", "merge", ("yes", "no")),
    ]
    items = [Item((number,), 0, {"done": number % 2 == 0}) for number in range(4)]
    only_yes = Glue(ops[:1], "yes")
    assert [made.tombstone for item in items for made in only_yes.push(item, "far")] == [SPLIT, "", SPLIT, ""]
    both = Glue(ops, "merge")
    assert [made.seq for item in items for made in both.push(item, "far")] == [(0,), (1,), (2,), (3,)]


def test_barrier_sees_everything_in_order():
    glue = Glue([Op("barrier", "barrier", ("far",), function=f"{HERE}:whiten")], "barrier")
    items = [Item((number,), 0, {"reward": float(number)}) for number in (2, 0, 1)]
    assert [made for item in items for made in glue.push(item, "far")] == []
    out = glue.finish()
    assert [(item.seq, item.fields["reward"]) for item in out] == [((0,), -1.0), ((1,), 0.0), ((2,), 1.0)]


def test_join_unites_fields_and_members():
    glue = Glue([Op("join", "join", ("a", "b"))], "join")
    members = samples(1, 2)
    one = Item((0,), 0, {"x": 1}, members=tuple(members))
    other = Item((0,), 0, {"y": 2}, members=tuple(member.with_fields(value=7) for member in members))
    assert glue.push(one, "a") == []
    assert glue.demand(1) == 1
    (united,) = glue.push(other, "b")
    assert united.fields == {"x": 1, "y": 2}
    assert [dict(member.fields) for member in united.members] == [
        {"reward": 0.0, "value": 7},
        {"reward": 1.0, "value": 7},
    ]


def test_a_quota_numbers_groups_with_all_that_is_in_them():
    """What they hold can be given again and gathered, in this iteration or in the next."""
    nested = [child for item in samples(3, 2) for child in (item.child(index, 2, "pair") for index in range(2))]
    lost, second, third = gathered(nested)
    carried = []
    for iteration, items in enumerate([[lost.as_tombstone("bad"), second, third], []]):
        op = Op("first", "first", ("far",), count=1, carry_surplus=True)
        quota = Quota(op, iteration, carried, lambda *_: None, Counter())
        (first,) = [made for item in items for made in quota.push(item, "far")] + quota.finish()
        (again,) = gathered([leaf for member in first.members for leaf in member.members])
        assert (first.id, again) == (f"{iteration}:0", first)
        assert [m.fields["reward"] for m in first.members[1].members] == [1.0, 1.0]


def gathered(leaves):
    """Groups by prompt of groups by pair."""
    ops = [
        Op("gather:pair", "gather", ("far",), by="pair"),
        Op("gather:prompt", "gather", ("gather:pair",), by="prompt"),
    ]
    glue = Glue(ops, "gather:prompt")
    return [whole for leaf in leaves for whole in glue.push(leaf, "far")]


def test_seq_of_group():
    assert seq_of_group([(3, 1), (3, 0)]) == (3,)
    assert seq_of_group([(3, 1, 0), (3, 1, 1), (3, 2, 0)]) == (3,)
    assert seq_of_group([(3, 1)]) == (3,)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.randoms())
@settings(max_examples=60, deadline=None)
def test_strict_order_is_the_sorted_order_for_any_arrival(num_prompts, size, depth, chance):
    items = [Item((number,), 3) for number in range(num_prompts)]
    for level in range(depth - 1):
        items = [item.child(index, size, f"level{level}") for item in items for index in range(size)]
    arrival = list(items)
    chance.shuffle(arrival)
    order = SourceOrder(1)
    released = []
    for count, item in enumerate(arrival, start=1):
        released += order.push(item)
        # Nothing that could go on is kept: the next in order has not arrived yet.
        following = sorted(items, key=lambda i: i.seq)[len(released) :]
        assert not following or following[0] not in arrival[:count]
    assert order.finish() == []
    assert released == sorted(items, key=lambda item: item.seq)


@given(st.integers(1, 12), st.integers(2, 4), st.randoms())
@settings(max_examples=60, deadline=None)
def test_windows_keep_their_boundaries_and_free_what_is_inside(count, window, chance):
    arrival = [Item((number,), 0) for number in range(count)]
    chance.shuffle(arrival)
    order = SourceOrder(window)
    released = [item for arriving in arrival for item in order.push(arriving)] + order.finish()
    assert sorted(item.seq for item in released) == [(number,) for number in range(count)]
    assert [item.seq[0] // window for item in released] == sorted(item.seq[0] // window for item in released)
    if count <= window:
        assert released == arrival


def test_a_dealt_consumer_sees_its_own_places_without_gaps():
    order = SourceOrder(1, offset=1, stride=2)
    assert order.push(Item((3,), 0)) == []
    assert [item.seq for item in order.push(Item((1,), 0))] == [(1,), (3,)]


def test_a_tombstone_of_a_parent_fills_the_places_of_its_children():
    order = SourceOrder(1)
    first = Item((0,), 0)
    children = [first.child(index, 2, "p") for index in range(2)]
    lost, last = Item((1,), 0).as_tombstone("x"), Item((2,), 0).child(0, 1, "p")
    arrival = [last, lost, *children]
    random.Random(1).shuffle(arrival)
    assert [item.seq for a in arrival for item in order.push(a)] == [(0, 0), (0, 1), (1,), (2, 0)]
