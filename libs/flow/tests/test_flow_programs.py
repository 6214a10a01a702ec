"""The programs of `m2flow.flow.testing`, each under a hundred lines, give the same under every plan."""

import inspect

import pytest

from m2flow.flow import Runtime, hybrid_plan, spatial_plan, temporal_plan, testing, trace
from m2flow.worker import Cluster, Item, launch_run

KIND = {"device_kind": "virtual"}
WIDE = {"devices_per_rank": None, **KIND}
NUM_DEVICES = 5


def specs(**classes):
    """Specifications by name; learners and their like take all their devices with one rank."""
    wide = {"actor", "critic", "reference", "reward"}
    config = {"rollout": {"samples": 3}, "actor": {"minibatch": 2}, "env": {"length": 4}, "policy": {"lanes": 3}}
    return {
        name: cls.group(config.get(name, {}), name=name, **(WIDE if name in wide else KIND))
        for name, cls in classes.items()
    }


LEARNING = {
    "rollout": testing.SyntheticRollout,
    "reward": testing.SyntheticReward,
    "actor": testing.SyntheticActor,
}
JUDGED = {**LEARNING, "critic": testing.SyntheticCritic, "reference": testing.SyntheticReference}
EMBODIED = {"env": testing.SyntheticEnvironment, "policy": testing.SyntheticPolicy}
AGENTIC = {"env": testing.SyntheticEnvironment, "policy": testing.SyntheticEngine}


@pytest.fixture(scope="module", params=["inproc", "process"])
def session(request):
    preload = ["m2flow.flow.runner", "m2flow.flow.testing"]
    with launch_run(Cluster.virtual(NUM_DEVICES), launcher=request.param, preload=preload) as started:
        yield started


@pytest.mark.medium
@pytest.mark.parametrize(
    ("program", "classes"),
    [
        pytest.param(testing.grpo, LEARNING, id="grpo"),
        pytest.param(testing.ppo, JUDGED, id="ppo with critic and reference"),
        pytest.param(testing.dapo, LEARNING, id="dapo with dynamic sampling"),
        pytest.param(testing.episodes, EMBODIED, id="embodied loop"),
        pytest.param(testing.episodes, AGENTIC, id="agent loop, an engine that pulls"),
    ],
)
def test_a_program_is_short_and_gives_the_same_under_every_plan(session, program, classes):
    assert len(inspect.getsource(program).splitlines()) < 100
    expansions = {"rollout.generate": 3.0} if "rollout" in classes else {}
    graph = trace(program, specs(**classes), source_items=6, expansions=expansions)
    seen = []
    for make in (temporal_plan, spatial_plan, hybrid_plan):
        with Runtime(graph, make(graph, session.cluster), session) as runtime:
            runtime.start()
            results = [runtime.run(number, wave(number, 0), more=more(number)) for number in range(2)]
        seen.append([[(item.id, facts(item)) for item in result.outputs] for result in results])
    assert seen[0][0]
    assert seen[0] == seen[1] == seen[2]


def wave(iteration, start):
    return [Item((place,), iteration, {"seed": place}) for place in range(start, start + 6)]


def more(iteration):
    return lambda start: wave(iteration, start)


def facts(item):
    """What a result says, but for when it was made."""
    return {name: value for name, value in item.fields.items() if name != "order"}
