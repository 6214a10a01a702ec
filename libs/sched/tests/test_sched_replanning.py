"""Changing plans in a run: when lengths drift, for a gain that pays, and not to and fro."""

from collections.abc import Callable

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import fold_spans, plan, replan, simulate

Make = Callable[..., sched_pb2.PlanRequest]
GIB = 2.0**30


def _measured(truth: sched_pb2.PlanRequest, chosen: flow_pb2.ExecutionPlan, tokens: float) -> flow_pb2.Timeline:
    """What a run of the plan would record under the true costs: spans with their tokens."""
    timeline = simulate(sched_pb2.SimulateRequest(request=truth, plan=chosen)).timeline
    for span in timeline.spans:
        span.tokens = round(span.items * tokens)
    return timeline


def _drifted(make_request: Make, factor: float) -> sched_pb2.PlanRequest:
    """The same workflow with rollouts that take `factor` as long; switching makes turns expensive."""
    request = make_request(8, memory_bytes=80 * GIB, resident_bytes=35 * GIB)
    for sample in request.profile.samples:
        sample.tokens = sample.items * 100
        if sample.stage == "rollout.generate":
            sample.seconds *= factor
    return request


def test_lengths_that_grow_fourfold_change_the_plan_once(make_request: Make) -> None:
    """Fifty steps; what is measured is folded in after each, and after every fifth the plan may change."""
    believed = _drifted(make_request, 0.25)
    current = plan(believed).plans[0].plan
    first, changes = current, []
    for step in range(50):
        growth = 1 + 3 * step / 49
        truth = _drifted(make_request, 0.25 * growth)
        timeline = _measured(truth, current, 100 * growth)
        believed.profile.CopyFrom(fold_spans(believed.profile, timeline, believed.workflow, current))
        if step % 5 < 4:
            continue
        decision = replan(believed, current, remaining_iterations=50 - step, switch_s=2.0, margin=0.02)
        if decision.plan is not None:
            changes.append(step)
            current = decision.plan
    assert 1 <= len(changes) <= 3
    assert current != first
    best = plan(_drifted(make_request, 1.0)).plans[0].simulated_s
    took = simulate(sched_pb2.SimulateRequest(request=_drifted(make_request, 1.0), plan=current)).iteration_s
    assert took == pytest.approx(best, rel=0.05)


def test_a_small_gain_is_left_alone(make_request: Make) -> None:
    request = make_request(8)
    second = plan(request).plans[1]
    decision = replan(request, second.plan, remaining_iterations=1000, switch_s=0, margin=0.5)
    assert decision.plan is None
    assert "within 50%" in decision.reason


def test_a_gain_must_pay_for_the_change(make_request: Make) -> None:
    request = make_request(8)
    worst = plan(request).plans[-1].plan
    few = replan(request, worst, remaining_iterations=1, switch_s=1000.0)
    many = replan(request, worst, remaining_iterations=100_000, switch_s=1000.0)
    assert few.plan is None
    assert "the change costs" in few.reason
    assert many.plan is not None
    assert many.best_s < many.current_s


def test_the_new_plan_is_not_left_again(make_request: Make) -> None:
    request = make_request(8)
    worst = plan(request).plans[-1].plan
    changed = replan(request, worst, remaining_iterations=1000, switch_s=1.0)
    assert changed.plan is not None
    assert replan(request, changed.plan, remaining_iterations=1000, switch_s=0.0).plan is None
