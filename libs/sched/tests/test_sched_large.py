"""Graphs that are too large for the exact search: the bound holds, and what is found is near it."""

import random

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import explain, plan
from m2flow.sched._bound import lower_bound
from m2flow.sched._build import build
from m2flow.sched._coarse import contractions, is_large
from m2flow.sched._plans import best_plans
from m2flow.sched._problem import NO_PINS
from m2flow.sched._tree import leaves


def layered(seed: int, stages: int, devices: int, memory: float) -> sched_pb2.PlanRequest:
    """Stages in a random graph up to three wide, costs drawn at random."""
    rng = random.Random(seed)
    graph = flow_pb2.WorkflowGraph(name="layered", source_items=64)
    profile = sched_pb2.Profile()
    for i in range(stages):
        graph.stages.add(name=f"s{i}", kind=flow_pb2.STAGE_KIND_WORK, group=f"g{i}", expansion=1)
        graph.groups.add(name=f"g{i}", device_kind="cuda", can_offload=True)
        fixed, work = rng.uniform(0, 0.02), rng.uniform(0.5, 4)
        for count in (1, 4, 16):
            for items in (1, 8, 64):
                seconds = fixed + work * items / count + 0.01 * items
                profile.samples.add(stage=f"s{i}", devices=count, items=items, seconds=seconds)
        if memory:
            profile.switches.add(group=f"g{i}", onload_s=0.5, offload_s=0.5, resident_bytes=30, offloaded_bytes=1)
        for earlier in range(max(0, i - 3), i):
            if earlier == i - 1 or rng.random() < 0.3:
                graph.streams.add(producer=f"s{earlier}", consumer=f"s{i}")
    cluster = sched_pb2.ClusterSpec()
    cluster.nodes.add(name="n").devices.add(kind="cuda", count=devices, memory_bytes=memory)
    return sched_pb2.PlanRequest(workflow=graph, profile=profile, cluster=cluster)


def branched(stages: int, devices: int, memory: float = 0) -> sched_pb2.PlanRequest:
    """As `layered`, but each stage feeds the third after it: three branches side by side."""
    request = layered(1, stages, devices, memory)
    del request.workflow.streams[:]
    for i in range(3, stages):
        request.workflow.streams.add(producer=f"s{i - 3}", consumer=f"s{i}")
    return request


@pytest.mark.parametrize("seed", range(8))
def test_no_exact_plan_is_under_the_bound(seed: int) -> None:
    problem = build(layered(seed, 4, 8, 80 if seed % 2 else 0)).problem
    best = best_plans(problem, "", 1).plans[0].seconds
    assert 0.4 * best < lower_bound(problem) <= best * (1 + 1e-9)


@pytest.mark.parametrize("memory", [0, 80])
def test_a_large_graph_is_planned_near_its_bound_and_says_so(memory: float) -> None:
    request = branched(12, 64, memory)
    assert is_large(build(request).problem)
    answer = plan(request)
    assert not answer.exact
    best = answer.plans[0]
    assert answer.lower_bound_s <= best.searched_s < 1.25 * answer.lower_bound_s
    assert best.simulated_s == pytest.approx(best.searched_s, rel=0.05)
    assert best.peak_bytes <= 80 or not memory
    names = {s.stage for s in best.plan.stages}
    assert names == {f"s{i}" for i in range(12)}


@pytest.mark.parametrize("mode", ["temporal", "spatial", "hybrid"])
def test_a_large_graph_keeps_to_its_mode(mode: str) -> None:
    request = branched(9, 32)
    request.mode = mode
    answer = plan(request)
    assert {p.plan.mode for p in answer.plans} == {mode}


def test_the_certificate_is_in_the_explanation() -> None:
    request = branched(6, 8)
    request.max_chunks = 4
    assert "% of the best for device counts" in explain(request).text


@pytest.mark.parametrize(("first", "second"), [(0, 5), (1, 5), (3, 4), (0, 2)])
def test_a_group_with_several_stages_of_a_large_graph_has_one_set_of_devices(first: int, second: int) -> None:
    """Also inside a block: what was searched with so many devices runs on them, and takes as long, or a chunk more."""
    request = layered(3, 6, 8, 80)
    del request.workflow.streams[:]
    for a, b in ((0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (4, 5)):
        request.workflow.streams.add(producer=f"s{a}", consumer=f"s{b}")
    request.workflow.stages[second].group = f"g{first}"
    del request.workflow.groups[second]
    assert is_large(build(request).problem)
    answer = plan(request)
    assert not answer.exact
    for ranked in answer.plans:
        assert answer.lower_bound_s <= ranked.searched_s
        assert 0.7 * ranked.searched_s < ranked.simulated_s <= 1.15 * ranked.searched_s, ranked.shape
        assert ranked.peak_bytes <= 80


def test_a_loop_in_a_layer_of_a_long_pipeline_stays_spread_over_its_devices() -> None:
    """What was searched as batches in flight on disjoint devices is not read back as turns on the same ones."""
    request = branched(7, 12)
    for sample in request.profile.samples:
        if sample.stage in ("s5", "s6"):  # no faster on more devices
            sample.seconds = 5.0 * sample.items
    request.workflow.streams.add(producer="s5", consumer="s6")
    request.workflow.streams.add(producer="s6", consumer="s5", feedback=True, rounds=4)
    problem = build(request).problem
    assert is_large(problem)
    loops = [leaf for plan in best_plans(problem, "", 20).plans for leaf in leaves(plan.tree) if leaf.name == "s5+s6"]
    assert any(leaf.batches for leaf in loops)
    for leaf in loops:
        rows = problem.leaves(leaf.node, leaf.chunks > 1, 0, NO_PINS)
        same = (rows.seconds == leaf.chunk_s) & (rows.picks == leaf.devices).all(axis=1)
        assert leaf.batches in rows.batches[same]


def test_many_stages_that_nothing_joins_are_planned() -> None:
    """Thirty of them have 2^30 down-sets, which nobody lists."""
    request = layered(5, 30, 8, 0)
    del request.workflow.streams[:]
    best = plan(request).plans[0]
    assert len(best.plan.stages) == 30
    assert best.simulated_s == pytest.approx(best.searched_s, rel=0.2)


def test_a_graph_full_of_barriers_is_cut_into_few_blocks() -> None:
    """With every end of a barrier in a block of its own there would be twelve."""
    request = branched(12, 16)
    for stage in request.workflow.stages[3:]:
        stage.after.append(f"s{int(stage.name[1:]) - 3}")
    assert all(len(c.blocks) <= 6 for c in contractions(build(request).problem))
    answer = plan(request)
    assert answer.lower_bound_s <= answer.plans[0].searched_s < 1.25 * answer.lower_bound_s
