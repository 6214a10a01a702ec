"""Six workloads in small, after the paper's: synthetic workers that sleep by a cost model on virtual devices.

A second here stands for minutes there; what matters is what is long, what has a tail, what scales and what switches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from types import SimpleNamespace
from typing import Any

from m2flow.flow import Graph, trace
from m2flow.flow.testing import has_turns_left
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.worker import Cluster, GroupSpec, Item
from m2flow.worker.testing import SyntheticConfig, SyntheticReward, SyntheticRollout, SyntheticTrainer, SyntheticWorker

KIND = "virtual"
SAMPLES = 4
# Stretches every cost: the runtime's own work, some milliseconds of CPU for each item, shrinks beside it.
SCALE = 3.0


@dataclass(frozen=True)
class Workload:
    """A program over groups, on a cluster; `turns` is the number of turns of an episode, where it has any."""

    name: str
    program: Callable[..., Any]
    groups: dict[str, GroupSpec]
    num_items: int
    num_devices: int
    turns: int = 0

    def cluster(self) -> Cluster:
        """So many virtual devices."""
        return Cluster.virtual(self.num_devices)

    def graph(self) -> Graph:
        """The traced program."""
        expansions = {"rollout.generate": SAMPLES} if "rollout" in self.groups else {}
        return trace(self.program, self.groups, source_items=self.num_items, name=self.name, expansions=expansions)

    def items(self, iteration: int) -> list[Item]:
        """The source's items, as long in every iteration; every episode takes as many turns."""
        return [Item((n,), iteration, {"turns": self.turns}) for n in range(self.num_items)]


def group(
    cls: type[SyntheticWorker], name: str, *, wide: bool = False, scale: float = SCALE, **costs: Any
) -> GroupSpec:
    """A group of synthetic workers; a `wide` one has one rank over all its devices."""
    width = None if wide else 1
    scaled = {key: value * scale if key.endswith("_s") else value for key, value in costs.items()}
    return cls.group(SyntheticConfig(**scaled), name=name, device_kind=KIND, devices_per_rank=width)


def grpo(flow: Any, rollout: Any, reward: Any, actor: Any) -> Any:
    """Samples, rewards, groups, an update, new weights."""
    groups = flow.gather(reward.score(rollout.generate(flow.source("prompts"))), by="prompt")
    metrics = actor.train(flow.ordered(groups, window=1 << 20))
    flow.publish(actor, to=rollout)
    return metrics


def ppo(flow: Any, rollout: Any, reward: Any, critic: Any, reference: Any, actor: Any) -> Any:
    """As GRPO, with values and reference log-probabilities for each group."""
    groups = flow.gather(reward.score(rollout.generate(flow.source("prompts"))), by="prompt")
    judged = flow.join(critic.work(groups), reference.work(groups))
    metrics = actor.train(flow.ordered(judged, window=1 << 20))
    flow.publish(actor, to=rollout)
    return metrics


def embodied(rounds: int) -> Callable[..., Any]:
    """A policy and an environment in turns until every episode is over, then an update."""

    def program(flow: Any, policy: Any, env: Any, actor: Any) -> Any:
        seen = flow.loop(flow.source("seeds"), rounds=rounds)
        again, done = flow.split(has_turns_left, env.work(policy.work(seen)))
        seen.feed(again)
        metrics = actor.train(flow.ordered(done, window=1 << 20))
        flow.publish(actor, to=policy)
        return metrics

    return program


def workloads() -> list[Workload]:
    """The six."""
    return [
        Workload(
            "grpo_dense",
            grpo,
            {
                "rollout": group(SyntheticRollout, "rollout", item_s=0.12, lanes=4, samples=SAMPLES, onload_s=0.02),
                "reward": group(SyntheticReward, "reward", item_s=0.001),
                "actor": group(SyntheticTrainer, "actor", wide=True, item_s=0.12, onload_s=0.02, offload_s=0.02),
            },
            num_items=32,
            num_devices=8,
        ),
        Workload(
            "ppo_four_models",
            ppo,
            {
                "rollout": group(SyntheticRollout, "rollout", item_s=0.1, lanes=4, samples=SAMPLES, onload_s=0.15),
                "reward": group(SyntheticReward, "reward", item_s=0.002, lanes=2, onload_s=0.15, offload_s=0.1),
                "critic": group(SyntheticWorker, "critic", wide=True, item_s=0.03, onload_s=0.15, offload_s=0.1),
                "reference": group(SyntheticWorker, "reference", wide=True, item_s=0.03, onload_s=0.15, offload_s=0.1),
                "actor": group(SyntheticTrainer, "actor", wide=True, item_s=0.08, onload_s=0.15, offload_s=0.1),
            },
            num_items=32,
            num_devices=8,
        ),
        Workload(
            "moe_long_tail",
            grpo,
            {
                "rollout": group(
                    SyntheticRollout, "rollout", item_s=0.15, lanes=8, tail=0.9, samples=SAMPLES, onload_s=0.05
                ),
                "reward": group(SyntheticReward, "reward", item_s=0.001),
                "actor": group(
                    SyntheticTrainer, "actor", wide=True, item_s=0.12, scaling=0.9, onload_s=0.1, offload_s=0.1
                ),
            },
            num_items=32,
            num_devices=8,
        ),
        Workload(
            "maniskill",
            embodied(4),
            {
                "policy": group(SyntheticWorker, "policy", item_s=0.02, fixed_s=0.01, lanes=4, onload_s=0.02),
                "env": group(SyntheticWorker, "env", item_s=0.02, fixed_s=0.01, lanes=4, onload_s=0.02),
                "actor": group(SyntheticTrainer, "actor", wide=True, item_s=0.1, onload_s=0.05, offload_s=0.05),
            },
            num_items=48,
            num_devices=8,
            turns=4,
        ),
        Workload(
            "libero",
            embodied(4),
            {
                "policy": group(SyntheticWorker, "policy", item_s=0.01, fixed_s=0.01, lanes=8),
                "env": group(SyntheticWorker, "env", item_s=0.08, fixed_s=0.01, lanes=4, scaling=0.5),
                "actor": group(SyntheticTrainer, "actor", wide=True, item_s=0.06, onload_s=0.02, offload_s=0.02),
            },
            num_items=32,
            num_devices=8,
            turns=4,
        ),
        Workload(
            "agentic_slow_tools",
            embodied(3),
            {
                "policy": group(SyntheticWorker, "policy", item_s=0.05, fixed_s=0.01, lanes=4),
                "env": group(SyntheticWorker, "env", item_s=0.25, tail=0.5, lanes=32),
                "actor": group(SyntheticTrainer, "actor", wide=True, item_s=0.1, onload_s=0.05, offload_s=0.05),
            },
            num_items=32,
            num_devices=8,
            turns=3,
        ),
    ]


def large() -> Workload:
    """GRPO on 64 devices, in iterations of 20 s: short ones, where so many devices are for minutes of work."""
    return Workload(
        "grpo_64_devices",
        grpo,
        {
            "rollout": group(SyntheticRollout, "rollout", scale=20, item_s=0.12, lanes=4, samples=SAMPLES),
            "reward": group(SyntheticReward, "reward", scale=20, item_s=0.001),
            "actor": group(SyntheticTrainer, "actor", scale=20, wide=True, item_s=0.12),
        },
        num_items=256,
        num_devices=64,
    )


def profile(workload: Workload) -> sched_pb2.Profile:
    """What a profiler would have measured of the stages alone: the cost models, asked for all sizes that plans choose
    from. What passes between them is no part of it.

    One item on many devices takes as long as on one: without the small sizes, a planner would think that it scales.
    """
    found = sched_pb2.Profile(model=workload.name, hardware=KIND, version="1")
    graph = workload.graph()
    sizes = sorted({min(workload.num_devices, n) for n in (*range(1, 9), 12, 16, 24, 32, 40, 48, 56, 64)})
    for stage in (s for s in graph.stages.values() if s.group and s.method):
        spec, looped = workload.groups[stage.group], stage.name in graph.in_cycles
        volume = graph.volume(stage.name)
        for devices in sizes:
            for items in _calls(volume, devices, looped=looped):
                ranks = _ranks(spec, stage.method, volume, items, devices, looped=looped)
                each = [mean(call[-1][0] if call else 0.0 for call in calls) for calls in ranks]
                # In a loop each rank goes on by itself, with the items that it has.
                seconds = (mean(each) if looped else max(each)) + spec.config.fixed_s
                found.samples.add(stage=stage.name, devices=devices, items=items, seconds=seconds)
            if stage.method == "generate":
                ranks = _ranks(spec, stage.method, volume, volume, devices, looped=looped)
                out = sorted((done for calls in ranks for call in calls for done in call), key=lambda done: done[0])
                whole = [sum(at >= other for other in _whole(out)) / volume for at, _ in out]
                found.curves.add(
                    stage=stage.name,
                    devices=devices,
                    time_fraction=[(at + spec.config.fixed_s) / (out[-1][0] + spec.config.fixed_s) for at, _ in out],
                    item_fraction=[number / len(out) for number in range(1, len(out) + 1)],
                    group_fraction=whole,
                )
    for name, spec in workload.groups.items():
        found.switches.add(group=name, onload_s=spec.config.onload_s, offload_s=spec.config.offload_s)
    return found


def _whole(out: list[tuple[float, Item]]) -> list[float]:
    """When each group's last sample is out."""
    return list({sample.seq[0]: at for at, sample in out}.values())


def _calls(volume: int, devices: int, *, looped: bool) -> list[int]:
    """Items of a call of the whole group that are asked for; ranks in a loop take what has come, a few or many."""
    few = {count * devices for count in range(1, 9) if looped and count * devices < volume}
    return sorted({volume, *(1 << power for power in range(volume.bit_length())), *few})


def _ranks(
    spec: GroupSpec, method: str, volume: int, items: int, devices: int, *, looped: bool
) -> list[list[list[tuple[float, Item]]]]:
    """By rank and by call, when its items finish, where the group takes an iteration in calls of so many items.

    Of one call each rank takes the next even share; what goes round a loop goes to the rank of its place.
    """
    wide = spec.devices_per_rank is None
    num_ranks = 1 if wide else devices
    worker = SyntheticWorker(spec.config)
    worker.context = SimpleNamespace(devices=range(devices if wide else 1))
    found: list[list[list[tuple[float, Item]]]] = [[] for _ in range(min(num_ranks, items))]
    share = -(-items // num_ranks)
    for start in range(0, volume, items):
        call = [Item((n,), 0) for n in range(start, min(start + items, volume))]
        for rank, calls in enumerate(found):
            own = call[rank::num_ranks] if looped else call[rank * share : (rank + 1) * share]
            if method == "generate":
                own = [item.child(index, SAMPLES, "prompt") for item in own for index in range(SAMPLES)]
            calls.append(worker.schedule(own))
    return found
