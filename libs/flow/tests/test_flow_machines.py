"""A run of several machines: weights reach a group elsewhere, the group moves, and what comes out is the same."""

from collections.abc import Mapping, Sequence

import pytest

from m2flow.flow import Flow, Graph, Runtime, StageProxy, Stream, spatial_plan, trace
from m2flow.flow.testing import SyntheticActor, SyntheticReward, SyntheticRollout, mean_reward
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import AgentAddress, Cluster, Item, launch_run
from m2flow.worker.testing.served import served

pytestmark = pytest.mark.medium

CLUSTER = Cluster.virtual(4, num_nodes=4)


def grpo(flow: Flow, rollout: StageProxy, reward: StageProxy, actor: StageProxy) -> Stream:
    groups = flow.gather(reward.score(rollout.generate(flow.source("prompts"))), by="prompt")
    metrics = actor.train(flow.map(mean_reward, groups))
    flow.publish(actor, to=rollout)
    return metrics


def make_graph() -> Graph:
    classes = {"rollout": SyntheticRollout, "reward": SyntheticReward, "actor": SyntheticActor}
    groups = {name: cls.group({"samples": 4}, name=name, device_kind="virtual") for name, cls in classes.items()}
    return trace(grpo, groups, source_items=4, expansions={"rollout.generate": 4})


def placed(graph: Graph, rollout: int) -> pb.ExecutionPlan:
    """Everybody on one device, the rollout on that one."""
    plan = spatial_plan(graph, Cluster.virtual(3))
    where = {"rollout": rollout, "reward": 1, "actor": 2}
    for group in plan.groups:
        group.device_ids[:] = [where[group.group]]
    return plan


def results(rollouts: Sequence[int], agents: Mapping[str, AgentAddress]) -> list[list[str]]:
    """What each of two iterations under each placement of the rollout gives."""
    graph, found = make_graph(), []
    with (
        launch_run(CLUSTER, agents=agents, on_log=lambda *_: None) as session,
        Runtime(graph, placed(graph, rollouts[0]), session) as runtime,
    ):
        runtime.start()
        for number, rollout in enumerate(rollouts):
            if number:
                runtime.apply(placed(graph, rollout))
            for iteration in (2 * number, 2 * number + 1):
                items = [Item((place,), iteration, {"seed": place}) for place in range(4)]
                outputs = runtime.run(iteration, items).outputs
                found.append(sorted(f"{item.id} {item.fields['advantages']}" for item in outputs))
    return found


def test_a_rollout_on_another_machine_gives_the_same_and_comes_back() -> None:
    with served("m2flow.flow.synthetic:SyntheticRollout", "127.0.0.1:0", "t") as (_, address):
        moved = results([3, 0, 3], {"node3": AgentAddress(address, "t")})
    assert moved == results([0, 0, 0], {})
