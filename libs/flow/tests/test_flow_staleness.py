"""Iterations that overlap: how old samples may be, weights that change in the middle of one, and what is too old."""

import pytest

from m2flow.flow import Runtime, spatial_plan, trace
from m2flow.flow.testing import SyntheticActor, SyntheticDecoder, is_fresh, mean_reward
from m2flow.worker import Cluster, Item, launch_run

PROMPTS = 6
KIND = {"device_kind": "virtual"}
CLUSTER = Cluster.virtual(2)


def program(flow, decoder, actor):
    """Every sample is trained on."""
    groups = flow.gather(decoder.generate(flow.source("prompts")), by="prompt")
    metrics = actor.train(flow.ordered(flow.map(mean_reward, groups), window=PROMPTS))
    flow.publish(actor, to=decoder)
    return {"metrics": metrics, "samples": groups}


def fresh_only(flow, decoder, actor):
    """Samples that began with older weights are dropped."""
    groups = flow.gather(flow.filter(is_fresh, decoder.generate(flow.source("prompts"))), by="prompt")
    metrics = actor.train(flow.ordered(flow.map(mean_reward, groups), window=PROMPTS))
    flow.publish(actor, to=decoder)
    return {"metrics": metrics, "samples": groups}


def run(flow, staleness, *, iterations=5, launcher="inproc"):
    groups = {
        "decoder": SyntheticDecoder.group({"lanes": 2, "length": 8, "seconds": 0.004}, name="decoder", **KIND),
        "actor": SyntheticActor.group({"seconds": 0.01, "minibatch": PROMPTS}, name="actor", **KIND),
    }
    graph = trace(flow, groups, source_items=PROMPTS)
    plan = spatial_plan(graph, CLUSTER)
    plan.staleness = staleness
    next(stage for stage in plan.stages if stage.stage == "decoder.generate").granularity = PROMPTS
    with launch_run(CLUSTER, launcher=launcher) as session, Runtime(graph, plan, session) as runtime:
        runtime.start()
        under_way, results = [], []
        for number in range(iterations):
            under_way.append(runtime.submit(number, [Item((place,), number) for place in range(PROMPTS)]))
            if len(under_way) > staleness:
                results.append(under_way.pop(0).result())
        results += [pending.result() for pending in under_way]
    return results


def versions_of(result):
    """The versions of each sample's tokens."""
    samples = [item for item in result.outputs if item.members]
    return [list(item.members[0].fields["token_versions"]) for item in samples]


@pytest.mark.medium
def test_weights_change_in_the_middle_of_a_sample_and_the_boundary_is_written_down():
    results = run(program, 1)
    assert [len(versions_of(result)) for result in results] == [PROMPTS] * 5
    per_sample = [(result.iteration, versions) for result in results for versions in versions_of(result)]
    for iteration, versions in per_sample:
        assert versions == sorted(versions)
        assert iteration - 1 <= versions[0] <= versions[-1] <= iteration + 1
    assert any(len(set(versions)) > 1 for _, versions in per_sample)


@pytest.mark.medium
def test_without_staleness_every_token_is_of_its_own_iteration():
    results = run(program, 0)
    for result in results:
        assert {version for versions in versions_of(result) for version in versions} == {result.iteration}


@pytest.mark.medium
def test_samples_that_are_too_old_are_dropped_and_counted():
    results = run(fresh_only, 1)
    dropped = [result.tombstones.get("filter:is_fresh", 0) for result in results]
    for result, count in zip(results, dropped, strict=True):
        kept = versions_of(result)
        assert len(kept) + count == PROMPTS
        assert all(versions[0] >= result.iteration for versions in kept)
    assert sum(dropped) > 0
    assert dropped[0] == 0
