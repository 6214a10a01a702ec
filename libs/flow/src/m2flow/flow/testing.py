"""What tests of flows need: specifications that start nothing, functions for glue, and macro flows to trace."""

from dataclasses import dataclass

from m2flow.flow.graph import Graph
from m2flow.flow.stream import Stream
from m2flow.flow.synthetic import (
    SyntheticActor,
    SyntheticCritic,
    SyntheticDecoder,
    SyntheticEngine,
    SyntheticEnvironment,
    SyntheticHand,
    SyntheticPolicy,
    SyntheticReference,
    SyntheticReward,
    SyntheticRollout,
)
from m2flow.flow.tracing import Flow, StageProxy, trace
from m2flow.worker import Item

__all__ = [
    "FakeSpec",
    "SyntheticActor",
    "SyntheticCritic",
    "SyntheticDecoder",
    "SyntheticEngine",
    "SyntheticEnvironment",
    "SyntheticHand",
    "SyntheticPolicy",
    "SyntheticReference",
    "SyntheticReward",
    "SyntheticRollout",
    "as_it_is",
    "dapo",
    "episodes",
    "goes_round",
    "grpo",
    "grpo_graph",
    "has_turns_left",
    "is_first_odd",
    "is_fresh",
    "is_live",
    "is_mixed",
    "is_odd",
    "mean_reward",
    "ppo",
    "whiten",
]


@dataclass(frozen=True)
class FakeSpec:
    """A worker group by its facts alone: it can be traced and planned, not run."""

    name: str
    stages: tuple[str, ...]
    in_step: bool = False
    device_kind: str = "virtual"
    devices_per_rank: int | None = 1
    can_offload: bool = True
    on_death: str = "stop"


def has_turns_left(item: Item) -> bool:
    """Whether an episode that takes `turns` turns goes on; two workers count one turn as two pieces of work."""
    return int(item.fields["worked"]) < 2 * int(item.fields["turns"])


def as_it_is(item: Item) -> Item:
    """The item."""
    return item


def goes_round(item: Item) -> bool:
    """Whether an item has rounds `left` in its loop."""
    return int(item.fields["left"]) > 0


def is_odd(item: Item) -> bool:
    """Whether an item has an odd number of rounds `left`."""
    return int(item.fields["left"]) % 2 == 1


def mean_reward(group: Item) -> Item:
    """Grades a group: each member's advantage is its reward less the group's mean."""
    rewards = [float(member.fields["reward"]) for member in group.members]
    mean = sum(rewards) / len(rewards)
    return group.with_fields(advantages=[reward - mean for reward in rewards])


def is_fresh(item: Item) -> bool:
    """Whether a sample was made with the newest weights that its iteration could have."""
    return int(item.fields["policy_version"]) >= item.iteration


def is_mixed(group: Item) -> bool:
    """Whether the members of a group differ in reward."""
    return len({float(member.fields["reward"]) for member in group.members}) > 1


def is_first_odd(group: Item) -> bool:
    """Whether a group's source place is odd; its members know it."""
    return group.members[0].seq[0] % 2 == 1


def is_live(item: Item) -> bool:
    """Whether an episode goes on."""
    return not item.fields["done"]


def whiten(items: list[Item]) -> list[Item]:
    """Subtracts the mean reward of the whole iteration."""
    mean = sum(float(item.fields["reward"]) for item in items) / len(items)
    return [item.with_fields(reward=float(item.fields["reward"]) - mean) for item in items]


def grpo(flow: Flow, rollout: StageProxy, reward: StageProxy, actor: StageProxy) -> Stream:
    """Groups of samples, graded within each group."""
    samples = rollout.generate(flow.source("prompts"))
    groups = flow.gather(reward.score(samples), by="prompt")
    metrics = actor.train(flow.map(mean_reward, groups))
    flow.publish(actor, to=rollout)
    return metrics


def ppo(
    flow: Flow,
    rollout: StageProxy,
    reward: StageProxy,
    critic: StageProxy,
    reference: StageProxy,
    actor: StageProxy,
) -> Stream:
    """Values, reference and rewards meet again by sample; rewards are whitened over the batch; two epochs."""
    samples = flow.barrier(reward.score(rollout.generate(flow.source("prompts"))), whiten)
    groups = flow.gather(samples, by="prompt")
    judged = flow.join(critic.values(groups), reference.logprobs(groups))
    metrics = actor.train(flow.epochs(flow.map(mean_reward, judged), 2))
    flow.publish(actor, to=rollout)
    return metrics


def dapo(flow: Flow, rollout: StageProxy, reward: StageProxy, actor: StageProxy) -> Stream:
    """Trains on the first groups, by source order, whose members differ; the source feeds on until they are there."""
    groups = flow.gather(reward.score(rollout.generate(flow.source("prompts"))), by="prompt")
    metrics = actor.train(flow.map(mean_reward, flow.first(4, groups, where=is_mixed)))
    flow.publish(actor, to=rollout)
    return metrics


def episodes(flow: Flow, env: StageProxy, policy: StageProxy) -> Stream:
    """An environment and a policy in a loop until every episode is done."""
    seen = flow.loop(env.reset(flow.source("seeds")))
    again, done = flow.split(is_live, env.step(policy.act(seen)))
    seen.feed(again)
    return done


def grpo_graph(source_items: int = 4, samples: int = 8) -> Graph:
    """The graph of `grpo` over fake specifications."""
    specs = {
        "rollout": FakeSpec("rollout", ("generate",)),
        "reward": FakeSpec("reward", ("score",)),
        "actor": FakeSpec("actor", ("train",), in_step=True),
    }
    return trace(grpo, specs, source_items=source_items, expansions={"rollout.generate": samples})
