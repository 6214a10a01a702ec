"""Spans folded into a profile, profiles merged, and the plan that follows from them."""

from collections.abc import Callable
from typing import Any

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import InputError, fold_spans, merge, plan, usable
from m2flow.sched._build import build
from m2flow.sched._curve import items_for_groups, nearest
from m2flow.sched._hand_offs import lately

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


def test_a_stage_that_gives_items_as_they_finish_leaves_its_curve(make_request: Make) -> None:
    """Two ranks; seven of eight items are out after 2 of 10 seconds, and the curve makes a spatial plan faster."""
    request = make_request(8)
    chosen = plan(request).plans[0].plan
    early = [500_000_000 * i for i in range(1, 5)]
    spans = [
        _span("rollout.generate", 0, 2, rank=0, items=32, output_after_ns=early),
        _span("rollout.generate", 0, 10, rank=1, items=32, output_after_ns=[*early[:3], 9_999_999_000]),
        _span("reward.score", 10, 12, items=512, output_after_ns=[1_999_999_000] * 512),
    ]
    folded = fold_spans(request.profile, flow_pb2.Timeline(spans=spans), request.workflow, chosen)
    (curve,) = folded.curves
    assert curve.stage == "rollout.generate"
    assert list(curve.item_fraction) == [i / 8 for i in range(1, 9)]
    assert list(curve.time_fraction) == pytest.approx([0.05, 0.05, 0.1, 0.1, 0.15, 0.15, 0.2, 1.0], rel=1e-6)
    again = fold_spans(folded, flow_pb2.Timeline(spans=spans[:1]), request.workflow, chosen)
    assert [c.time_fraction[-1] for c in again.curves] == [1.0]
    flat, curved = make_request(8, mode="spatial"), make_request(8, mode="spatial")
    curved.profile.curves.extend(folded.curves)
    assert plan(curved).plans[0].simulated_s < plan(flat).plans[0].simulated_s


def test_a_curve_says_when_groups_are_whole(make_request: Make) -> None:
    """Two prompts of two samples each: half of the samples are out before the first group is."""
    request = make_request(2)
    chosen = plan(request).plans[0].plan
    span = _span(
        "rollout.generate",
        0,
        10,
        items=2,
        inputs=["prompts|0:0", "prompts|0:1"],
        outputs=[f"rollout.generate|{sample}" for sample in ("0:0.0", "0:1.0", "0:0.1", "0:1.1")],
        output_after_ns=[t * 10**9 for t in (1, 2, 5, 10)],
    )
    folded = fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=[span]), request.workflow, chosen)
    (curve,) = folded.curves
    assert list(curve.time_fraction) == [0.1, 0.2, 0.5, 1.0]
    assert list(curve.group_fraction) == [0.0, 0.0, 0.5, 1.0]
    assert [items_for_groups(curve)(groups) for groups in (0.5, 1.0)] == pytest.approx([0.75, 1.0])
    del curve.group_fraction[0]
    with pytest.raises(InputError, match="3 group fractions for 4 item fractions"):
        items_for_groups(curve)


def test_calls_in_chunks_leave_no_curve(make_request: Make) -> None:
    request = make_request(2)
    chosen = plan(request).plans[0].plan
    spans = [_span("rollout.generate", t, t + 1, items=32, output_after_ns=[1000, 2000]) for t in (0, 1)]
    folded = fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=spans), request.workflow, chosen)
    assert not folded.curves


def test_what_passes_between_stages_is_measured(make_request: Make) -> None:
    """Free devices and ready items, and nobody at work: 0.2 s at the start, 0.1 s to the slower rank of the reward,
    0.3 s to the actor beside its onload and the rollout's offload, 0.05 s to publication."""
    request = make_request(2, mode="temporal")
    chosen = plan(request).plans[0].plan
    spans = [
        _span("publish", 0, 9, rank=0, group="rollout", kind=flow_pb2.SPAN_KIND_WAIT_WEIGHTS),
        _span("rollout.generate", 0.2, 4, inputs=["prompts|0:0"], outputs=["r|a", "r|b"], device_ids=[0, 1]),
        _span("rollout.generate", 4, 4.5, kind=flow_pb2.SPAN_KIND_OFFLOAD, device_ids=[0, 1]),
        _span("reward.score", 4.55, 5, rank=0, inputs=["r|a"], outputs=["w|a"], device_ids=[0]),
        _span("reward.score", 4.6, 5, rank=1, inputs=["r|b"], outputs=["w|b"], device_ids=[1]),
        _span("actor.train", 5.2, 6.2, kind=ONLOAD, device_ids=[0, 1]),
        _span("actor.train", 6.3, 8, inputs=["w|a", "w|b"], device_ids=[0, 1]),
        _span("publish", 8.05, 8.1, device_ids=[0, 1]),
    ]
    folded = fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=spans), request.workflow, chosen)
    found = {h.stage: pytest.approx(h.seconds) for h in folded.hand_offs}
    assert found == {"actor.train": 0.3, "publish": 0.05, "reward.score": 0.1, "rollout.generate": 0.2}
    request.profile.transfer_latency_s = 0
    before = plan(request).plans[0].searched_s
    request.profile.hand_offs.extend(folded.hand_offs)
    assert plan(request).plans[0].searched_s == pytest.approx(before + 0.65)


def test_items_that_come_out_during_a_call_are_ready_then(make_request: Make) -> None:
    """The reward's second call waits for an item of the middle of the rollout's: what came out early is no hand-off."""
    request = make_request(2, mode="spatial")
    chosen = plan(request).plans[0].plan
    out = [1_000_000_000, 2_000_000_000]
    spans = [
        _span("rollout.generate", 0, 4, outputs=["r|a", "r|b"], output_after_ns=out, device_ids=[0]),
        _span("reward.score", 1.1, 1.5, inputs=["r|a"], device_ids=[1]),
        _span("reward.score", 2.3, 2.5, inputs=["r|b"], device_ids=[1]),
    ]
    folded = fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=spans), request.workflow, chosen)
    assert {h.stage: h.seconds for h in folded.hand_offs} == {"reward.score": pytest.approx(0.2)}
    chosen.staleness = 1
    assert not fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=spans), request.workflow, chosen).hand_offs


def test_the_median_of_the_last_hand_offs_counts(make_request: Make) -> None:
    request = make_request(2, mode="spatial")
    chosen = plan(request).plans[0].plan
    profile = sched_pb2.Profile()
    for seconds in (9.0, 0.2, 0.1, 0.4):
        spans = [
            _span("actor.train", 0, 20, kind=flow_pb2.SPAN_KIND_WAIT_INPUT),
            _span("rollout.generate", seconds, 20, inputs=["prompts|0:0"], device_ids=[0]),
        ]
        profile = fold_spans(profile, flow_pb2.Timeline(spans=spans), request.workflow, chosen)
    assert [h.seconds for h in profile.hand_offs] == [0.2, 0.1, 0.4]
    assert lately(profile.hand_offs) == {"rollout.generate": 0.2}
    assert lately(merge([profile, profile]).hand_offs) == {"rollout.generate": 0.2}


def conversations() -> tuple[sched_pb2.PlanRequest, flow_pb2.ExecutionPlan]:
    """Four conversations in a loop of an engine and a tool, each on a device, one round unless measured."""
    graph = flow_pb2.WorkflowGraph(name="agent", source_items=4)
    for name in ("engine.speak", "tool.call"):
        graph.stages.add(name=name, kind=flow_pb2.STAGE_KIND_WORK, group=name.split(".")[0], expansion=1)
        graph.groups.add(name=name.split(".")[0], device_kind="cpu", devices_per_rank=1)
    graph.streams.add(producer="engine.speak", consumer="tool.call")
    graph.streams.add(producer="tool.call", consumer="engine.speak", feedback=True, rounds=1)
    request = sched_pb2.PlanRequest(workflow=graph)
    request.cluster.nodes.add(name="n", cores=2).devices.add(kind="cpu", count=2)
    chosen = flow_pb2.ExecutionPlan(mode="spatial")
    for device, name in enumerate(("engine.speak", "tool.call")):
        chosen.groups.add(group=name.split(".")[0], device_ids=[device], num_ranks=1)
        chosen.stages.add(stage=name, granularity=4, position=device)
    return request, chosen


def test_what_items_do_in_a_loop_is_measured() -> None:
    """Two turns for two of four conversations, which join a call of 8 s again after their tool; the tool takes 2 s for
    one and 1 s for the other, side by side."""
    request, chosen = conversations()
    names = ["0:0", "0:1", "0:2", "0:3"]
    second = 10**9
    engine = _span(
        "engine.speak",
        0,
        8,
        items=6,
        tokens=60,
        inputs=[*(f"problems|{n}" for n in names), "tool.call|0:1", "tool.call|0:2"],
        outputs=[f"engine.speak|{n}" for n in (*names, "0:2", "0:1")],
        output_after_ns=[4 * second] * 4 + [7 * second, 8 * second],
    )
    tool = _span(
        "tool.call",
        4,
        6,
        items=2,
        inputs=["engine.speak|0:1", "engine.speak|0:2"],
        outputs=["tool.call|0:2", "tool.call|0:1"],
        output_after_ns=[1 * second, 2 * second],
    )
    timeline = flow_pb2.Timeline(spans=[engine, tool])
    request.profile.CopyFrom(fold_spans(sched_pb2.Profile(), timeline, request.workflow, chosen))
    spoken, called = request.profile.loop_items
    assert (list(spoken.passes), spoken.pulls) == ([1, 2, 2, 1], True)
    assert list(spoken.relative) == pytest.approx([8 / 7, 6 / 7, 6 / 7, 8 / 7])
    assert (list(called.passes), called.pulls) == ([1, 1], False)
    assert list(called.relative) == pytest.approx([4 / 3, 2 / 3])
    samples = {s.stage: s for s in request.profile.samples}
    # 4 items x 4 s and 2 x 2 s were with the engine for 8 s; each took 20 / 6 s.
    assert samples["engine.speak"].items == pytest.approx(20 / 8)
    assert samples["engine.speak"].tokens == pytest.approx(20 / 8 * 10)
    assert samples["engine.speak"].seconds == pytest.approx(20 / 6)
    assert samples["tool.call"].seconds == pytest.approx(2.0)
    assert build(request).workflow.nodes[0].rounds == 1.5


def test_curves_are_kept_by_number_of_devices() -> None:
    curves = [sched_pb2.CompletionCurve(stage="a", devices=n) for n in (0, 2, 16)]
    assert [nearest(curves, "a", n).devices for n in (1, 2, 5, 8, 64)] == [2, 2, 2, 16, 16]  # type: ignore[union-attr]
    assert nearest(curves[:1], "a", 8) is curves[0]
    assert nearest(curves, "b", 8) is None


def test_an_item_that_waits_at_the_head_of_its_loop_is_not_with_the_engine() -> None:
    """Two at once: the third and the fourth enter when the first two are through, at 2 s and at 3 s."""
    request, chosen = conversations()
    chosen.edges.add(producer="tool.call", consumer="engine.speak", capacity=2)
    names = ["0:0", "0:1", "0:2", "0:3"]
    engine = _span(
        "engine.speak",
        0,
        6,
        items=4,
        inputs=[f"problems|{n}" for n in names],
        outputs=[f"engine.speak|{n}" for n in names],
        output_after_ns=[t * 10**9 for t in (2, 3, 5, 6)],
    )
    folded = fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=[engine]), request.workflow, chosen)
    (sample,) = folded.samples
    assert (sample.seconds, sample.items) == (pytest.approx((2 + 3 + 3 + 3) / 4), pytest.approx(11 / 6))
    assert folded.loop_items[0].pulls


def test_a_stage_in_a_loop_says_whether_items_come_out_one_by_one() -> None:
    request, chosen = conversations()
    for out, one_by_one in (([2, 10], True), ([10, 10], False)):
        spans = [
            _span(
                "engine.speak",
                0,
                10,
                items=2,
                outputs=["engine.speak|0:0", "engine.speak|0:1"],
                output_after_ns=[t * 10**9 for t in out],
            ),
            _span("engine.speak", 20, 25, items=1, outputs=["engine.speak|0:2"], output_after_ns=[10**9]),
        ]
        folded = fold_spans(sched_pb2.Profile(), flow_pb2.Timeline(spans=spans), request.workflow, chosen)
        assert [i.one_by_one for i in folded.loop_items] == [one_by_one]
        assert not folded.curves
        assert [(s.items, s.seconds) for s in folded.samples] == [(1, 5), (2, 10)]
