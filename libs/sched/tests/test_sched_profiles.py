"""Spans folded into a profile, profiles merged, and the plan that follows from them."""

from collections.abc import Callable
from typing import Any

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import InputError, fold_spans, merge, plan, usable

Make = Callable[..., sched_pb2.PlanRequest]
BUSY, ONLOAD = flow_pb2.SPAN_KIND_BUSY, flow_pb2.SPAN_KIND_ONLOAD


def _span(stage: str, start_s: float, end_s: float, **fields: Any) -> flow_pb2.Span:
    kind = fields.pop("kind", BUSY)
    group = str(fields.pop("group", "actor" if stage == "publish" else stage.split(".")[0]))
    times = {"start_ns": int(start_s * 1e9), "end_ns": int(end_s * 1e9)}
    return flow_pb2.Span(stage=stage, group=group, kind=kind, **times, **fields)


def test_ranks_side_by_side_make_one_sample(make_request: Make) -> None:
    """Two ranks with 2 calls of 16 items each: 32 items a call of the group, by the slower rank."""
    request = make_request(2, mode="temporal")
    chosen = plan(request).plans[0].plan
    spans = [
        _span("rollout.generate", 0, 4, rank=0, items=16, tokens=1600, peak_bytes=5),
        _span("rollout.generate", 4, 9, rank=0, items=16, tokens=1700),
        _span("rollout.generate", 0, 4, rank=1, items=16, tokens=1600, peak_bytes=7),
        _span("rollout.generate", 4, 8, rank=1, items=16, tokens=1500),
    ]
    folded = fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=spans), request.workflow, chosen)
    (sample,) = folded.samples
    assert (sample.stage, sample.devices, sample.items, sample.tokens) == ("rollout.generate", 2, 32, 3200)
    assert (sample.seconds, sample.peak_bytes) == (4.5, 7)
    assert not sample.beside


def test_neighbours_switches_and_syncs_are_measured(make_request: Make) -> None:
    request = make_request(4, mode="spatial")
    chosen = plan(request).plans[0].plan
    spans = [
        _span("rollout.generate", 0, 10, items=64),
        _span("actor.train", 4, 9, items=64),
        _span("reward.score", 20, 21, items=512),
        _span("actor.train", 3, 3.5, kind=ONLOAD),
        _span("publish", 30, 30.25, rank=0),
        _span("publish", 30, 30.5, rank=1),
        _span("publish", 25, 30.55, group="rollout", kind=flow_pb2.SPAN_KIND_WAIT_WEIGHTS),
        _span("publish", 30.6, 30.75, group="rollout"),
    ]
    before = sched_pb2.Profile()
    folded = fold_spans(before, flow_pb2.Timeline(spans=spans), request.workflow, chosen)
    beside = {s.stage: list(s.beside) for s in folded.samples}
    assert beside == {"rollout.generate": ["actor.train"], "actor.train": ["rollout.generate"], "reward.score": []}
    assert [(s.group, s.onload_s) for s in folded.switches] == [("actor", 0.5)]
    assert [(s.source, s.target, s.seconds) for s in folded.syncs] == [("actor", "rollout", pytest.approx(0.7))]
    assert before == sched_pb2.Profile()


def test_a_measured_profile_moves_the_prediction(make_request: Make) -> None:
    request = make_request(2, kind="cpu", mode="temporal")
    request.profile.Clear()
    chosen = plan(request).plans[0].plan
    spans = [_span("rollout.generate", 0, 6, items=64), _span("reward.score", 6, 7, items=512)]
    spans += [_span("actor.train", 7, 10, items=64), _span("publish", 10, 10.5)]
    request.profile.CopyFrom(fold_spans(request.profile, flow_pb2.Timeline(spans=spans), request.workflow, chosen))
    answer = plan(request)
    assert not answer.notes[:-1]
    assert answer.plans[0].searched_s == pytest.approx(10.5)


def test_a_span_of_another_workflow_is_refused(make_request: Make) -> None:
    request = make_request(2)
    timeline = flow_pb2.Timeline(spans=[_span("critic.values", 0, 1, items=1)])
    with pytest.raises(InputError, match=r"critic\.values"):
        fold_spans(request.profile, timeline, request.workflow, plan(request).plans[0].plan)


def test_only_the_latest_samples_are_kept(make_request: Make) -> None:
    request = make_request(2, mode="temporal")
    chosen = plan(request).plans[0].plan
    spans = [_span("actor.train", i, i + 0.5, items=64, iteration=i) for i in range(400)]
    folded = fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=spans), request.workflow, chosen)
    assert len(folded.samples) == 256


def test_merging_adds_samples_and_keeps_the_latest_switch() -> None:
    older = sched_pb2.Profile(model="m", hardware="h", version="1")
    older.samples.add(stage="a", devices=1, items=1, seconds=1)
    older.switches.add(group="g", onload_s=1)
    newer = sched_pb2.Profile()
    newer.CopyFrom(older)
    newer.switches[0].onload_s = 2
    merged = merge([older, newer])
    assert len(merged.samples) == 2
    assert [s.onload_s for s in merged.switches] == [2]


def test_profiles_of_other_versions_are_not_used() -> None:
    old, new = sched_pb2.Profile(model="m", version="1"), sched_pb2.Profile(model="m", version="2")
    assert not usable(old, model="m", hardware="", version="2")
    with pytest.raises(InputError, match="version '2'"):
        merge([old, new])
