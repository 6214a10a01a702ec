"""Every second of a device has one cause, and a trace that Perfetto opens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.flow._spans import num_tokens
from m2flow.flow.timeline import CAUSES, account, account_table, chrome_trace, save_trace
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Item

S = 10**9


def span(kind, start, end, *, stage="a.run", group="a", rank=0, devices=(0,), **fields):
    return pb.Span(
        kind=getattr(pb, f"SPAN_KIND_{kind}"),
        start_ns=int(start * S),
        end_ns=int(end * S),
        stage=stage,
        group=group,
        rank=rank,
        device_ids=devices,
        **fields,
    )


def causes(*spans, start=0.0, end=10.0):
    (line,) = account(pb.Timeline(spans=spans), int(start * S), int(end * S), [0])
    return {cause: seconds for cause, seconds in line.causes.items() if seconds}


def test_one_stage_by_hand():
    got = causes(
        span("WAIT_INPUT", 1, 2),
        span("WAIT_LOCK", 2, 3),
        span("ONLOAD", 3, 4),
        span("BUSY", 4, 7),
        span("OFFLOAD", 7.5, 8),
    )
    assert got == {
        "waiting for input": 1.0,
        "waiting for the lock": 1.0,
        "switching": 1.5,
        "busy": 3.0,
        "unattributed": 0.5,
        "bubble": 3.0,
    }


def test_what_a_device_does_outranks_what_another_rank_waits_for():
    got = causes(
        span("BUSY", 2, 6),
        span("WAIT_LOCK", 0, 8, group="b"),
        span("WAIT_WEIGHTS", 0, 10, group="a"),
        span("WAIT_OUTPUT", 5, 6),
    )
    assert got == {"busy": 3.0, "waiting for output": 1.0, "waiting for the lock": 4.0, "waiting for weights": 2.0}


def test_a_device_without_spans_is_a_bubble_and_spans_outside_do_not_count():
    assert causes() == {"bubble": 10.0}
    assert causes(span("BUSY", 0, 4), start=3, end=5) == {"busy": 1.0, "bubble": 1.0}


kinds = st.sampled_from(["BUSY", "WAIT_INPUT", "WAIT_LOCK", "WAIT_WEIGHTS", "WAIT_OUTPUT", "ONLOAD", "OFFLOAD"])
pieces = st.lists(st.tuples(kinds, st.integers(0, 30), st.integers(1, 10)), max_size=12)


@given(pieces)
@settings(max_examples=80, deadline=None)
def test_causes_add_up_and_agree_with_looking_at_every_moment(drawn):
    spans = [span(kind, start, start + length) for kind, start, length in drawn]
    got = causes(*spans, start=5, end=25)
    assert sum(got.values()) == pytest.approx(20.0)
    # The naive way: ask at the middle of each second.
    ranked = ["WAIT_OUTPUT", "BUSY", "ONLOAD", "OFFLOAD", "WAIT_LOCK", "WAIT_INPUT", "WAIT_WEIGHTS"]
    busy = 0
    for second in range(5, 25):
        there = [kind for kind, start, length in drawn if start <= second < start + length]
        busy += bool(there) and min(there, key=ranked.index) == "BUSY"
    assert got.get("busy", 0.0) == pytest.approx(busy)


def test_the_table_names_every_cause():
    table = account_table(account(pb.Timeline(spans=[span("BUSY", 0, 5)]), 0, 10 * S))
    assert "50.0%" in table
    assert table.count("\n") == 3
    for cause in CAUSES:
        assert cause.split()[-1] in table


def test_the_trace_has_spans_names_and_arrows(tmp_path):
    timeline = pb.Timeline(
        spans=[
            span("BUSY", 0, 2, stage="rollout.generate", group="rollout", outputs=["rollout.generate|0:0.0"]),
            span("BUSY", 1, 3, stage="reward.score", group="reward", inputs=["rollout.generate|0:0.0"], items=1),
        ]
    )
    save_trace([timeline], tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert events == chrome_trace([timeline])["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in spans] == [
        ("rollout.generate", 0.0, 2e6),
        ("reward.score", 1e6, 2e6),
    ]
    start, finish = (next(event for event in events if event["ph"] == ph) for ph in "sf")
    assert start["id"] == finish["id"]
    assert (start["pid"], finish["pid"]) == (spans[0]["pid"], spans[1]["pid"])
    assert start["ts"] <= finish["ts"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"rollout", "reward", "rank 0: rollout.generate", "rank 0: reward.score"}


def test_an_item_that_goes_round_has_an_arrow_each_time_from_whoever_made_it_last():
    act, step = "policy.act|0:0", "env.step|0:0"
    timeline = pb.Timeline(
        spans=[
            span("BUSY", 0, 1, stage="policy.act", group="policy", outputs=[act]),
            span("BUSY", 2, 3, stage="env.step", group="env", inputs=[act], outputs=[step]),
            span("BUSY", 4, 5, stage="policy.act", group="policy", inputs=[step], outputs=[act]),
            span("BUSY", 6, 7, stage="env.step", group="env", inputs=[act], outputs=[step]),
        ]
    )
    events = chrome_trace([timeline])["traceEvents"]
    ends = {phase: {e["id"]: (e["name"], e["ts"]) for e in events if e["ph"] == phase} for phase in "sf"}
    assert list(ends["s"].values()) == [(act, 1e6), (step, 3e6), (act, 5e6)]
    assert list(ends["f"].values()) == [(act, 2e6), (step, 4e6), (act, 6e6)]
    assert ends["s"].keys() == ends["f"].keys()


def test_a_call_worked_on_what_its_outputs_say_or_on_the_tokens_that_passed():
    group = Item((0,), 1, members=[Item((0, i), 1, {"completion_ids": [7] * 5}) for i in range(3)])
    short = Item((0,), 1, {"completion_ids": [7]})
    assert num_tokens([group], [short]) == num_tokens([short], [group]) == 15
    assert num_tokens([group, group], [Item((0,), 1, {"worked_tokens": n}) for n in (4, 0)]) == 4
    assert num_tokens([group], [Item((0,), 1, {"worked_tokens": 0})]) == 1  # 0 would be: nobody counted
