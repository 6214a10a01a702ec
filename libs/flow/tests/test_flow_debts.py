"""What a stage owes: each item once, as itself or as all its children."""

import random

import pytest

from m2flow.flow import RunError
from m2flow.flow._debts import Debts
from m2flow.flow.microflow import MicroStage
from m2flow.worker import Item


def debts(*places, keeps=False):
    owed = Debts(MicroStage("one.work", "work", keeps=keeps))
    owed.take([Item((place,), 3) for place in places])
    return owed


def pay(owed, paid):
    for item in paid:
        owed.pay(item)
    owed.settle()


def test_items_are_paid_as_themselves_as_tombstones_and_as_children_of_children_in_any_order():
    whole, gone, parent = (Item((place,), 3) for place in range(3))
    children = [parent.child(index, 3, "child") for index in range(3)]
    paid = [whole, gone.as_tombstone("bad"), children[0], children[2].as_tombstone("bad")]
    paid += [children[1].child(index, 2, "grandchild") for index in range(2)]
    for seed in range(20):
        random.Random(seed).shuffle(paid)
        pay(debts(0, 1, 2), paid)


@pytest.mark.parametrize(
    ("paid", "message"),
    [
        pytest.param([], r"one\.work: the stage returned and still owes 3:0, 3:1: want each item", id="nothing"),
        pytest.param([Item((0,), 3), Item((0,), 3)], "gave 3:0 and owes 3:1", id="twice"),
        pytest.param([Item((7,), 3)], "gave 3:7 and owes 3:0, 3:1", id="another's"),
        pytest.param([Item((0,), 3).child(1, 3, "child"), Item((1,), 3)], r"still owes 3:0\.0, 3:0\.2", id="a child"),
        pytest.param([Item((0,), 3).child(0, 1, "child"), Item((0,), 3)], "gave 3:0 and owes 3:1", id="parent too"),
        pytest.param([Item((0, 1), 3)], r"gave 3:0\.1 and owes 3:0, 3:1: .*item\.child", id="of no group"),
    ],
)
def test_what_is_owed_is_named(paid, message):
    with pytest.raises(RunError, match=message):
        pay(debts(0, 1), paid)


def test_inside_a_loop_items_go_on_as_themselves():
    with pytest.raises(RunError, match=r"gave 3:0\.0 and owes 3:0: .*inside a loop that gathers nothing"):
        debts(0, keeps=True).pay(Item((0,), 3).child(0, 1, "child"))
