import pytest

from m2flow.worker import Group, Item, Worker, stage, stage_names


def test_an_id_is_the_iteration_and_the_place() -> None:
    assert Item(seq=(5, 2), iteration=3).id == "3:5.2"


def test_a_child_appends_its_index_keeps_fields_and_joins_its_group() -> None:
    parent = Item(seq=(5,), iteration=1, fields={"answer": 4, "seed": 1}, groups={"batch": Group("b", 2)})
    child = parent.child(1, 4, "prompt", seed=2, reward=0.5)
    assert child.seq == (5, 1)
    assert child.fields == {"answer": 4, "seed": 2, "reward": 0.5}
    assert child.groups == {"batch": Group("b", 2), "prompt": Group("1:5", 4)}
    assert parent.fields["seed"] == 1


@pytest.mark.parametrize("index", [-1, 4])
def test_a_child_beyond_its_group_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"got index {index} of 4, want 0 to 3"):
        Item(seq=(5,), iteration=1).child(index, 4, "prompt")


def test_a_tombstone_keeps_its_place_and_its_group() -> None:
    child = Item(seq=(0,), iteration=0).child(0, 2, "prompt", reward=1.0)
    dead = child.as_tombstone("timed out")
    assert (dead.id, dead.groups, dead.fields, dead.tombstone) == (child.id, child.groups, {}, "timed out")
    with pytest.raises(ValueError, match="want one"):
        child.as_tombstone("")


def test_stages_are_those_marked_in_the_class_and_its_bases() -> None:
    class Base(Worker):
        @stage
        def generate(self, items: list[Item]) -> list[Item]:
            return items

        def plain(self) -> None:
            pass

    class Derived(Base):
        @stage
        def score(self, items: list[Item]) -> list[Item]:
            return items

    assert stage_names(Derived) == ("generate", "score")
