"""Tools that raise, hang, die, or say far too much: the model reads a short error, it is counted, nothing is stuck."""

import time

import pytest

from m2flow.agentic.conversation import opened
from m2flow.worker import Item

pytestmark = [pytest.mark.medium, pytest.mark.timeout(60)]


def asked(*calls: tuple[str, str]) -> list[Item]:
    """Conversations that wait for these tools."""
    begun = [opened(Item((n,), 1, {}), 0, 1, prompt_ids=[1], seed=n) for n in range(len(calls))]
    return [item.with_fields(tool=tool, argument=text) for item, (tool, text) in zip(begun, calls, strict=True)]


def counted(item: Item) -> set[str]:
    return {name for name, count in item.fields["counts"].items() if count}


@pytest.mark.parametrize(
    ("argument", "count", "says"),
    [
        ("raise", "tool/errors", "no such luck"),
        ("sleep 60", "tool/timeouts", "took longer than 1.0 s"),
        ("exit 3", "tool/deaths", "the process ended"),
        ("long", "tool/too_long", "a result of 1000000 characters"),
    ],
)
def test_a_tool_that_fails_is_a_short_error_and_is_counted(tools, argument: str, count: str, says: str) -> None:
    (item,) = tools().results(asked(("obey", argument)))
    assert item.fields["result"].startswith("error: ")
    assert says in item.fields["result"]
    assert len(item.fields["result"]) < 80
    assert counted(item) == {count}


def test_an_unknown_tool_is_an_error_that_names_the_known_ones(tools) -> None:
    (item,) = tools().results(asked(("search", "x")))
    assert item.fields["result"] == "error: no tool 'search', there is calc, obey"
    assert counted(item) == {"tool/unknown"}


def test_the_others_do_not_wait_for_one_that_hangs(tools, waiting) -> None:
    worker = tools(timeout_s=3.0)
    worker.results(asked(("obey", "warm")))
    began = time.monotonic()
    arrived = {
        item.seq[0]: (time.monotonic() - began, item.fields["result"])
        for item in worker.call(
            waiting(asked(("obey", "sleep 60"), ("obey", "quick"), ("calc", "3+4"), ("obey", "again")))
        )
    }
    assert [arrived[place][1] for place in (1, 2, 3)] == ["quick", "7", "again"]
    assert all(arrived[place][0] < 2.0 for place in (1, 2, 3))
    assert arrived[0][0] >= 3.0


def test_a_pool_whose_processes_all_hung_works_again(tools) -> None:
    worker = tools(timeout_s=0.3)
    hung = worker.results(asked(*[("obey", "sleep 60")] * 4))
    assert [counted(item) for item in hung] == [{"tool/timeouts"}] * 4
    (item,) = worker.results(asked(("obey", "still here")))
    assert item.fields["result"] == "still here"
