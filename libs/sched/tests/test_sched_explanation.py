"""What is said about a plan, and that what is said is true."""

import re
from collections.abc import Callable

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import compare, explain, plan

Make = Callable[..., sched_pb2.PlanRequest]
GIB = 2.0**30


def test_the_explanation_names_plan_runners_up_and_devices(make_request: Make) -> None:
    answer = explain(sched_pb2.ExplainRequest(request=make_request(8)))
    best = answer.response.plans[0]
    least = min(p.searched_s for p in answer.response.plans)
    assert answer.text.startswith(f"Temporal: {best.shape}, {best.simulated_s:.4g} s")
    for words in (
        "Runner-up: ",
        f"What follows is by the closed form alone, of which the best plan takes {least:.4g} s.",
        "Best spatial: ",
        "Best hybrid: ",
        "Binding: ",
        "With 1 cuda device more: ",
        "fewer: ",
    ):
        assert words in answer.text


def test_nothing_has_no_sign(make_request: Make) -> None:
    text = explain(make_request(8)).text
    assert "+0.0%" in text
    assert "-0.0%" not in text


def test_what_one_device_more_brings_is_what_planning_with_it_gives(make_request: Make) -> None:
    text = explain(make_request(8)).text
    seconds = plan(make_request(9)).lower_bound_s
    assert f"With 1 cuda device more: {seconds:.4g} s" in text


def test_one_core_more_or_fewer_is_planned_with_too(make_request: Make) -> None:
    """Devices of kind cpu that no node lists are its cores."""
    request = make_request(8, kind="cpu")
    request.cluster.nodes[0].ClearField("devices")
    seconds = {}
    for cores in (3, 5, 4):
        request.cluster.nodes[0].cores = cores
        seconds[cores] = plan(request).lower_bound_s
    text = explain(request).text
    assert f"With 1 cpu device more: {seconds[5]:.4g} s" in text
    assert f"With 1 cpu device fewer: {seconds[3]:.4g} s" in text


def test_memory_binds_where_it_makes_groups_switch(make_request: Make) -> None:
    answer = explain(make_request(8, memory_bytes=80 * GIB, resident_bytes=50 * GIB))
    assert answer.binding_constraint.startswith("memory twice as large would save")


def test_a_sensitivity_is_where_the_choice_flips(make_request: Make) -> None:
    request = make_request(8, memory_bytes=80 * GIB, resident_bytes=35 * GIB)
    before = min(plan(request).plans, key=lambda p: p.searched_s)
    found = next(s for s in explain(request).sensitivities if s.what.endswith(" seconds") and s.factor < 1)
    for factor, same in ((found.factor * 0.97, False), (found.factor * 1.15, True)):
        changed = sched_pb2.PlanRequest()
        changed.CopyFrom(request)
        for sample in changed.profile.samples:
            if sample.stage == found.what.removesuffix(" seconds"):
                sample.seconds *= factor
        after = min(plan(changed).plans, key=lambda p: p.searched_s)
        assert (_kind(after) == _kind(before)) is same


def _kind(ranked: sched_pb2.RankedPlan) -> str:
    return ranked.plan.mode + re.sub(r" x\d+", "", ranked.shape)


def test_comparing_names_the_ratio_and_who_moved(make_request: Make) -> None:
    answer = compare(sched_pb2.CompareRequest(left=make_request(4), right=make_request(8)))
    ratio = answer.left.plans[0].simulated_s / answer.right.plans[0].simulated_s
    assert f"The right one is {ratio:.3g} times as fast." in answer.text
    assert "rollout: 4 -> 8 devices" in answer.text


def test_switching_known_by_its_bytes_is_explained_as_it_is_planned(make_request: Make) -> None:
    """What was not measured takes its bytes at 10 GB/s, in a what-if as in the plan."""
    request = make_request(4, memory_bytes=80 * GIB, resident_bytes=50 * GIB)
    for switch in request.profile.switches:
        switch.onload_s = switch.offload_s = 0.0
    found = {}
    for mode in ("", "temporal", "spatial", "hybrid"):
        request.mode = mode
        found[mode] = min((p.searched_s for p in plan(request).plans), default=None)
    request.mode = ""
    answer = explain(request)
    best = answer.response.plans[0]
    for mode in {"temporal", "spatial", "hybrid"} - {best.plan.mode}:
        said = f"Best {mode}: {found[mode]:.4g} s" if found[mode] else f"No {mode} plan fits."
        assert said in answer.text


def test_devices_more_are_counted_in_the_units_of_the_plan(make_request: Make) -> None:
    """On 64 devices the units are single ones; 65 planned anew would be taken in pairs, and bring nothing."""
    request = make_request(64)
    text = explain(request).text
    changed = make_request(65)
    changed.device_quantum = plan(request).device_quantum
    assert f"With 1 cuda device more: {plan(changed).lower_bound_s:.4g} s" in text
    assert plan(changed).lower_bound_s < plan(request).lower_bound_s


def test_no_smaller_change_of_a_number_flips_the_choice(make_request: Make) -> None:
    request = make_request(8, memory_bytes=80 * GIB, resident_bytes=35 * GIB)
    before = _kind(min(plan(request).plans, key=lambda p: p.searched_s))
    for found in explain(request).sensitivities:
        if not found.what.endswith(" seconds"):
            continue
        for step in range(1, 8):
            factor = (found.factor * (1.005 if found.factor < 1 else 1 / 1.005)) ** (step / 7)
            changed = sched_pb2.PlanRequest()
            changed.CopyFrom(request)
            for sample in changed.profile.samples:
                if sample.stage == found.what.removesuffix(" seconds"):
                    sample.seconds *= factor
            assert _kind(min(plan(changed).plans, key=lambda p: p.searched_s)) == before, (found, factor)
