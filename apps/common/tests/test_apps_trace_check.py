"""The validator of Chrome traces finds each kind of fault, and none in a good trace."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from m2flow.apps.testing import example_trace
from m2flow.apps.testing.trace_check import trace_problems

Trace = dict[str, Any]


def _good() -> Trace:
    trace: Trace = copy.deepcopy(example_trace(2))
    arrow = {"name": "item", "cat": "flow", "id": "1:0"}
    trace["traceEvents"] += [
        {**arrow, "ph": "s", "ts": 2_000_000, "pid": 1, "tid": 1},
        {**arrow, "ph": "f", "ts": 2_500_000, "pid": 2, "tid": 2, "bp": "e"},
    ]
    return trace


def _first(trace: Trace, phase: str) -> dict[str, Any]:
    return next(event for event in trace["traceEvents"] if event["ph"] == phase)


def test_a_good_trace_has_no_problem() -> None:
    assert trace_problems(_good()) == []


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda trace: trace.pop("traceEvents"), "want traceEvents"),
        (lambda trace: _first(trace, "X").update(ph="Z"), "no known phase"),
        (lambda trace: _first(trace, "X").update(ts="0"), "ts is '0', want a number"),
        (lambda trace: _first(trace, "X").update(dur=-1), "lasts -1 us"),
        (lambda trace: _first(trace, "X").pop("name"), "has no name"),
        (lambda trace: _first(trace, "X").update(dur=3_500_000), "cuts rollout.generate"),
        (lambda trace: _first(trace, "s").pop("id"), "an arrow without id"),
        (lambda trace: trace["traceEvents"].remove(_first(trace, "f")), "got only ['s']"),
        (lambda trace: _first(trace, "f").update(ts=1_500_000), "ends before it starts"),
        (lambda trace: _first(trace, "f").update(ts=90_000_000), "is in no slice"),
        (lambda trace: trace["traceEvents"].append(dict(_first(trace, "s"))), "two ends of phase s"),
    ],
)
def test_each_fault_is_found(spoil: Callable[[Trace], object], problem: str) -> None:
    trace = _good()
    spoil(trace)
    assert any(problem in found for found in trace_problems(trace))
