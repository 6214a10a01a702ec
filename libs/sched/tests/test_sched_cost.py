"""Cost models: what they interpolate, what they ignore, and how sure they say they are."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import InputError, plan
from m2flow.sched.cost import assumed_stage, fit_corun, fit_stage, slowdown
from m2flow.sched.memory import active_parameters, fit_memory, footprint, num_parameters
from m2flow.sched.roofline import hardware_scale, named_device, roofline

LLAMA_8B = sched_pb2.Transformer(
    layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocabulary=128256
)  # 8.03e9 weights


def _samples(cells: list[tuple[int, float, float]], tokens_per_item: float = 0) -> list[sched_pb2.Sample]:
    return [sched_pb2.Sample(stage="s", devices=n, items=x, seconds=t, tokens=x * tokens_per_item) for n, x, t in cells]


def _truth(n: int, x: float) -> float:
    return 0.5 + 3 * x / n + 0.01 * x


GRID = [(n, x, _truth(n, x)) for n in (1, 2, 4) for x in (4, 16, 64)]


def test_exact_samples_are_met_between_and_beyond_them() -> None:
    model = fit_stage(_samples(GRID))
    for n, x in ((1, 10), (3, 16), (8, 256)):
        assert model.estimate(x, n).seconds == pytest.approx(_truth(n, x), rel=1e-3)


def test_the_error_grows_with_the_distance_and_is_named() -> None:
    model = fit_stage(_samples(GRID))
    inside, between, outside, far = (model.estimate(x, n) for x, n in ((16, 2), (10, 3), (128, 4), (4096, 64)))
    assert [e.origin for e in (inside, between, outside, far)] == [
        "measured",
        "interpolated",
        "extrapolated",
        "extrapolated",
    ]
    assert inside.relative_error < between.relative_error < outside.relative_error < far.relative_error
    assert far.low_s < _truth(64, 4096) < far.high_s


@pytest.mark.parametrize("wild", range(len(GRID)))
def test_one_wild_sample_does_not_bend_the_curve(wild: int) -> None:
    cells = list(GRID)
    cells[wild] = (*cells[wild][:2], cells[wild][2] * 20)
    model = fit_stage(_samples(cells))
    for n, x, seconds in GRID:
        assert model.estimate(x, n).seconds == pytest.approx(seconds, rel=0.1)


def test_repeats_are_answered_by_their_median() -> None:
    model = fit_stage(_samples([(2, 16, 1.0), (2, 16, 1.02), (2, 16, 30.0)]))
    assert model.estimate(16, 2).seconds == pytest.approx(1.02)


def test_a_shape_that_is_none_of_the_terms_is_passed_through_where_measured() -> None:
    """A GPU that is not filled: 8 items take as long as 1; the fit cannot, the residuals do."""
    cells = [(1, x, max(8.0, x)) for x in (1, 2, 4, 8, 16, 32)]
    model = fit_stage(_samples(cells))
    for _, x, seconds in cells:
        assert model.estimate(x, 1).seconds == pytest.approx(seconds, rel=0.02)


def test_one_sample_says_how_much_work_there_is() -> None:
    model = fit_stage(_samples([(2, 16, 4.0)]))
    assert model.estimate(32, 4).seconds == pytest.approx(4.0)
    assert model.estimate(32, 4).relative_error > model.estimate(16, 2).relative_error


def test_longer_items_cost_more_at_once() -> None:
    """Two samples have four times the tokens an item: so has the next prediction. One alone changes nothing."""
    old = _samples([(n, x, _truth(n, x)) for n, x, _ in GRID] * 7, tokens_per_item=100)
    new = _samples([(2, 64, _truth(2, 256))], tokens_per_item=400)
    assert fit_stage(old + new).estimate(64, 1).seconds == pytest.approx(_truth(1, 64), rel=0.02)
    assert fit_stage(old + 2 * new).estimate(64, 1).seconds == pytest.approx(_truth(1, 256), rel=0.02)


def test_corun_is_the_ratio_to_the_time_alone() -> None:
    alone = {"s": fit_stage(_samples(GRID))}
    beside = [
        sched_pb2.Sample(stage="s", devices=2, items=16, seconds=1.5 * _truth(2, 16), beside=["a"]),
        sched_pb2.Sample(stage="s", devices=2, items=16, seconds=1.2 * _truth(2, 16), beside=["b"]),
        sched_pb2.Sample(stage="s", devices=2, items=16, seconds=0.9 * _truth(2, 16), beside=["c"]),
    ]
    factors = fit_corun(beside, alone)
    assert slowdown(factors, "s", frozenset({"a"})) == pytest.approx(1.5)
    assert slowdown(factors, "s", frozenset({"a", "b"})) == pytest.approx(1.8)
    assert slowdown(factors, "s", frozenset({"c", "d"})) == 1.0


def test_weights_are_counted_as_the_model_card_says() -> None:
    assert num_parameters(LLAMA_8B) == pytest.approx(8.03e9, rel=0.002)
    mixtral = sched_pb2.Transformer(
        layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocabulary=32000, experts=8, active_experts=2
    )
    assert num_parameters(mixtral) == pytest.approx(46.7e9, rel=0.002)
    assert active_parameters(mixtral) == pytest.approx(12.9e9, rel=0.002)


def test_training_holds_eighteen_bytes_a_weight_over_all_shards() -> None:
    model = sched_pb2.StageModel(stage="t", transformer=LLAMA_8B, phase=sched_pb2.PHASE_TRAIN, tokens_in_flight=8192)
    held = footprint(model, data=8, tensor=1, pipeline=1)
    assert held.weights + held.gradients + held.optimiser == pytest.approx(18 * 8.03e9 / 8, rel=0.002)
    assert held.activations == 8192 * (2 * 4096 * 32 + 34 * 4096 + 4 * 128256)
    assert held.cache == 0


def test_the_cache_is_two_vectors_a_layer_and_token() -> None:
    model = sched_pb2.StageModel(stage="g", transformer=LLAMA_8B, phase=sched_pb2.PHASE_GENERATE, tokens_in_flight=1000)
    assert footprint(model, data=1, tensor=2, pipeline=1).cache == 1000 * 2 * 32 * 8 * 128 * 2 / 2


def test_measured_peaks_correct_the_closed_form() -> None:
    model = sched_pb2.StageModel(stage="t", transformer=LLAMA_8B, phase=sched_pb2.PHASE_TRAIN, tokens_in_flight=8192)
    bare = footprint(model, data=8, tensor=1, pipeline=1).total
    peaks = [sched_pb2.Sample(stage="t", devices=8, items=1, seconds=1, peak_bytes=1.2 * bare)]
    fitted = fit_memory(peaks, model)
    assert fitted is not None
    assert fitted.peak_bytes(1.0, np.array([16.0]))[0] == pytest.approx(
        1.2 * footprint(model, data=16, tensor=1, pipeline=1).total
    )


def test_peaks_alone_are_fitted_in_devices() -> None:
    peaks = [sched_pb2.Sample(stage="t", devices=n, items=8, seconds=1, peak_bytes=4 + 60 / n) for n in (1, 2, 4)]
    fitted = fit_memory(peaks, None)
    assert fitted is not None
    assert fitted.peak_bytes(8.0, np.array([8.0]))[0] == pytest.approx(4 + 60 / 8, rel=0.01)


def test_a_roofline_brackets_what_is_published() -> None:
    """Llama 8B on one H100: decoding one token of a small batch reads 16 GB of weights: 4.8 ms at the ceiling."""
    model = sched_pb2.StageModel(
        stage="g", transformer=LLAMA_8B, phase=sched_pb2.PHASE_GENERATE, prompt_tokens=1, new_tokens=1000
    )
    estimate = roofline(model, named_device("h100-sxm")).estimate(1, 1)
    assert estimate.origin == "roofline"
    assert estimate.low_s < 1000 * 16.06e9 / 3.35e12 / 0.7 < estimate.high_s


def test_far_outside_the_samples_the_curve_goes_on_as_the_roofline() -> None:
    model = sched_pb2.StageModel(
        stage="s", transformer=LLAMA_8B, phase=sched_pb2.PHASE_TRAIN, prompt_tokens=512, new_tokens=512
    )
    roof = roofline(model, named_device("h100-sxm"))
    fitted = fit_stage(_samples(GRID))
    guarded = replace(fitted, roof=roof)
    assert guarded.estimate(16, 2).origin == "measured"
    edge = fitted.points[:, 0].max() + np.log(8)  # in items, on as many devices as were measured
    inside, outside = (guarded.estimate(float(np.exp(edge + step)), 2) for step in (-1e-6, 1e-6))
    assert (inside.origin, outside.origin) == ("extrapolated", "roofline")
    assert outside.seconds == pytest.approx(inside.seconds, rel=1e-4)
    further = guarded.estimate(float(np.exp(edge)) * 64, 2)
    assert further.seconds / outside.seconds == pytest.approx(
        roof.estimate(float(np.exp(edge)) * 64, 2).seconds / roof.estimate(float(np.exp(edge)), 2).seconds, rel=1e-4
    )
    assert further.relative_error >= 1


def test_other_hardware_scales_with_its_range() -> None:
    factor, error = hardware_scale(named_device("a100-80gb"), named_device("h100-sxm"))
    low, high = factor / (1 + error), factor * (1 + error)
    assert low == pytest.approx(312 / 989, rel=0.01)
    assert high == pytest.approx(2.04 / 3.35, rel=0.01)


def test_unknown_hardware_is_named_with_the_known() -> None:
    with pytest.raises(InputError, match="h100-sxm"):
        named_device("h900")
    with pytest.raises(InputError, match="flops_per_s"):
        roofline(sched_pb2.StageModel(stage="g"), sched_pb2.DeviceSpec(kind="x"))


def test_a_stage_that_nothing_is_known_of_says_so() -> None:
    estimate = assumed_stage(0.001).estimate(100, 2)
    assert (estimate.origin, estimate.seconds) == ("assumed", pytest.approx(0.05))
    assert estimate.relative_error >= 9


def test_a_time_beside_others_bounds_the_time_alone() -> None:
    """Training does not divide over devices: known alone on two, beside the rollout on one, and no slower there."""
    workflow = flow_pb2.WorkflowGraph(name="g", source_items=16)
    workflow.stages.add(name="prompts", kind=flow_pb2.STAGE_KIND_SOURCE, expansion=1)
    workflow.stages.add(name="actor.train", kind=flow_pb2.STAGE_KIND_WORK, group="actor", method="train", expansion=1)
    workflow.streams.add(producer="prompts", consumer="actor.train")
    workflow.groups.add(name="actor", device_kind="cpu", devices_per_rank=1, min_devices=1)
    profile = sched_pb2.Profile(
        samples=[
            sched_pb2.Sample(stage="actor.train", devices=2, items=16, seconds=4),
            sched_pb2.Sample(stage="actor.train", devices=1, items=4, seconds=1, beside=["rollout.generate"]),
        ]
    )
    cluster = sched_pb2.ClusterSpec(nodes=[sched_pb2.NodeSpec(name="n", count=1, cores=1)])
    request = sched_pb2.PlanRequest(workflow=workflow, profile=profile, cluster=cluster)
    assert plan(request).plans[0].simulated_s == pytest.approx(4.0, rel=0.01)
    profile.samples[1].seconds = 3  # slower than half of what two devices do: that is the neighbour's doing
    request.profile.CopyFrom(profile)
    assert plan(request).plans[0].simulated_s == pytest.approx(8.0, rel=0.01)


def test_calls_beside_others_count_as_those_alone_do() -> None:
    """Half of the calls have little to do, and these are the ones beside the rollout, which slows nobody: the time of
    a call is the median of all, not of the long ones alone."""
    workflow = flow_pb2.WorkflowGraph(name="g", source_items=4)
    workflow.stages.add(name="prompts", kind=flow_pb2.STAGE_KIND_SOURCE, expansion=1)
    workflow.stages.add(name="actor.train", kind=flow_pb2.STAGE_KIND_WORK, group="actor", method="train", expansion=1)
    workflow.streams.add(producer="prompts", consumer="actor.train")
    workflow.groups.add(name="actor", device_kind="cpu", devices_per_rank=1, min_devices=1)
    profile = sched_pb2.Profile()
    for seconds, beside in [(1.2, []), (0.6, ["rollout.generate"]), (1.0, []), (0.8, ["rollout.generate"])]:
        profile.samples.add(stage="actor.train", devices=1, items=4, seconds=seconds, beside=beside)
    cluster = sched_pb2.ClusterSpec(nodes=[sched_pb2.NodeSpec(name="n", count=1, cores=1)])
    request = sched_pb2.PlanRequest(workflow=workflow, profile=profile, cluster=cluster)
    assert plan(request).plans[0].simulated_s == pytest.approx(0.9, rel=0.02)


def _in_layouts(cells: list[tuple[int, int, int, float]]) -> list[sched_pb2.Sample]:
    """Samples in layouts (data, tensor, pipeline) of x items, by a truth that the fit is not told.

    Each micro-batch of a rank's share is a forward over the pipeline's stages; every tensor rank beyond the first
    moves 4% of the work of one device, and one pass over the weights takes 6 s of one device.
    """
    samples = []
    for d, t, p, x in cells:
        share, micro = x / d, 8
        one = 2.0 * share / micro / (t * p) * (1 + 0.04 * (t - 1))
        sample = sched_pb2.Sample(stage="s", devices=d * t * p, items=x, seconds=(micro + p - 1) * one + 6 / (t * p))
        sample.layout.data, sample.layout.tensor, sample.layout.pipeline = d, t, p
        samples.append(sample)
    return samples


MEASURED_LAYOUTS = [
    (d, t, p, x) for d, t, p in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)) for x in (32, 128)
]


@pytest.mark.parametrize("layout", [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 4, 2), (8, 2, 2)])
def test_layouts_that_were_not_measured_follow_from_those_that_were(layout: tuple[int, int, int]) -> None:
    tensor, pipeline = layout[1:]
    model = fit_stage(_in_layouts(MEASURED_LAYOUTS), layout=(tensor, pipeline))
    for items in (64, 256):
        (truth,) = _in_layouts([(*layout, items)])
        estimate = model.estimate(items, truth.devices)
        assert estimate.seconds == pytest.approx(truth.seconds, rel=0.02)
        assert estimate.low_s <= truth.seconds <= estimate.high_s
        if (tensor, pipeline) not in {(1, 1), (2, 1), (1, 2)}:
            assert estimate.origin == "extrapolated"


def test_a_layout_that_nothing_is_known_of_is_believed_less() -> None:
    """Measured without tensor parallelism alone, its communication is unknown: the range must hold it."""
    plain = [cell for cell in MEASURED_LAYOUTS if cell[1:3] == (1, 1)]
    model = fit_stage(_in_layouts(plain), layout=(4, 1))
    (truth,) = _in_layouts([(2, 4, 1, 128)])
    estimate = model.estimate(128, 8)
    assert estimate.origin == "extrapolated"
    assert estimate.low_s <= truth.seconds <= estimate.high_s
    assert estimate.relative_error > 2 * fit_stage(_in_layouts(plain)).estimate(128, 8).relative_error


def test_a_plan_takes_the_layout_of_its_ranks(make_request: Callable[..., sched_pb2.PlanRequest]) -> None:
    """Eight devices: as two ranks of tensor 4 by one set of samples, as eight of one device by another."""
    request = make_request(8, mode="temporal")
    samples = [s for s in request.profile.samples if s.stage != "actor.train"]
    del request.profile.samples[:]
    request.profile.samples.extend(samples)
    for sample in _in_layouts([(8, 1, 1, 64), (2, 4, 1, 64)]):
        sample.stage = "actor.train"
        request.profile.samples.append(sample)
    seconds = {}
    for per_rank in (1, 4):
        request.workflow.groups[2].devices_per_rank = per_rank
        best = plan(request).plans[0].plan
        seconds[per_rank] = next(s.busy_s for s in best.prediction.stages if s.stage == "actor.train")
    measured = {s.layout.tensor: s.seconds for s in request.profile.samples if s.stage == "actor.train"}
    assert seconds[1] == pytest.approx(measured[1], rel=0.01)
    assert seconds[4] == pytest.approx(measured[4], rel=0.01)


def test_a_jump_moves_what_has_not_been_measured_since() -> None:
    """The host becomes twice as slow; three measurements on two devices say so, and four devices believe it too."""
    before = _samples([(n, 16, _truth(n, 16)) for n in (1, 2, 4) for _ in range(5)])
    after = _samples([(2, 16, 2 * _truth(2, 16)) for _ in range(3)])
    assert fit_stage(before + after[:2]).estimate(16, 4).seconds == pytest.approx(_truth(4, 16), rel=0.05)
    assert fit_stage(before + after).estimate(16, 4).seconds == pytest.approx(2 * _truth(4, 16), rel=0.05)
    back = _samples([(2, 16, _truth(2, 16)) for _ in range(3)])
    assert fit_stage(before + after + back).estimate(16, 4).seconds == pytest.approx(_truth(4, 16), rel=0.05)


def test_lengths_seen_beside_others_are_lengths() -> None:
    """Items grow fourfold while the stage runs beside another, which slows it by a fifth: the two are told apart."""
    alone = _samples([(n, x, _truth(n, x)) for n in (1, 2, 4) for x in (4, 16, 64, 256)], tokens_per_item=100)
    long = [
        sched_pb2.Sample(stage="s", devices=2, items=16, seconds=1.2 * _truth(2, 64), tokens=16 * 400, beside=["a"])
        for _ in range(8)
    ]
    model = fit_stage(alone, lengths=alone + long)
    assert model.estimate(16, 4).seconds == pytest.approx(_truth(4, 64), rel=0.02)
    assert slowdown(fit_corun(long, {"s": model}), "s", frozenset({"a"})) == pytest.approx(1.2, rel=0.02)


@pytest.mark.parametrize("known", [True, False])
def test_64_gpus_asked_on_a_laptop_are_an_estimate_with_its_range(
    make_request: Callable[..., sched_pb2.PlanRequest], known: bool
) -> None:
    """Measured on one to four cores, asked of 64 devices of 14,000 times the FLOP/s."""
    request = make_request(64)
    for sample in request.profile.samples:
        sample.devices = min(sample.devices, 4)
    if known:
        request.profile.measured_on.CopyFrom(named_device("cpu-core"))
        request.cluster.nodes[0].devices[0].MergeFrom(named_device("h100-sxm"))
        request.cluster.nodes[0].devices[0].count = 64
        for stage, phase in (("rollout.generate", sched_pb2.PHASE_GENERATE), ("actor.train", sched_pb2.PHASE_TRAIN)):
            request.profile.models.add(
                stage=stage, transformer=LLAMA_8B, phase=phase, prompt_tokens=512, new_tokens=512
            )
    notes = plan(request).notes
    for stage in ("rollout.generate", "actor.train"):
        (said,) = [note for note in notes if note.startswith(f"{stage}: ")]
        assert ("a roofline of cuda, right within a factor of two" if known else "its curve is extended, ") in said
