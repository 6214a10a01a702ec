"""Every plan that the search offers is one that the runtime takes: they share no rule, only messages."""

from collections.abc import Callable, Mapping

import pytest

from m2flow.flow import Flow, Graph, StageProxy, Stream, check_plan, trace
from m2flow.flow.testing import FakeSpec, as_it_is, dapo, episodes, goes_round, grpo, ppo
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import plan
from m2flow.worker import Cluster

DEVICES = 6
Program = Callable[..., Stream]


def chain(flow: Flow, a: StageProxy, b: StageProxy, c: StageProxy) -> Stream:
    """Three stages in a row, each of whose ranks takes what comes."""
    return c.go(b.go(a.go(flow.source("items"))))


def ordered(flow: Flow, a: StageProxy, b: StageProxy, c: StageProxy) -> Stream:
    """As `chain`; the second keeps source order."""
    return c.go(b.go(flow.ordered(a.go(flow.source("items")))))


def diamond(flow: Flow, a: StageProxy, b: StageProxy, c: StageProxy) -> Stream:
    """What the last takes meets there, directly and through glue."""
    made = a.go(flow.source("items"))
    return c.go(flow.map(as_it_is, b.go(made)), made)


def there_and_back(flow: Flow, a: StageProxy, b: StageProxy, c: StageProxy) -> Stream:
    """The first group works on what comes, and again on what has been through the others."""
    return a.back(c.go(b.go(a.go(flow.source("items")))))


def loop_in_a_row(flow: Flow, a: StageProxy, b: StageProxy, c: StageProxy) -> Stream:
    """A stage that items pass several times, between two others."""
    going = flow.loop(a.go(flow.source("items")))
    again, done = flow.split(goes_round, b.go(going))
    going.feed(again)
    return c.go(done)


ROW = dict.fromkeys("abc", ("go",))
RL = {"rollout": ("generate",), "reward": ("score",), "actor": ("train",)}
JUDGES = {"critic": ("values",), "reference": ("logprobs",)}
PROGRAMS: dict[str, tuple[Program, Mapping[str, tuple[str, ...]]]] = {
    "chain": (chain, ROW),
    "ordered": (ordered, ROW),
    "diamond": (diamond, ROW),
    "there_and_back": (there_and_back, ROW | {"a": ("go", "back")}),
    "loop_in_a_row": (loop_in_a_row, ROW),
    "episodes": (episodes, {"env": ("reset", "step"), "policy": ("act",)}),
    "grpo": (grpo, RL),
    "dapo": (dapo, RL),
    "ppo": (ppo, RL | JUDGES),
}


def traced(name: str) -> Graph:
    """The program over groups that only their facts are known of."""
    program, stages = PROGRAMS[name]
    groups = {g: FakeSpec(g, s, in_step=g == "actor") for g, s in stages.items()}
    samples = {"rollout.generate": 4} if "rollout" in groups else {}
    return trace(program, groups, source_items=16, expansions=samples)


def request(graph: Graph, staleness: int) -> sched_pb2.PlanRequest:
    """Each stage works longer than the one before; what is light takes turns with a neighbour."""
    asked = sched_pb2.PlanRequest(workflow=graph.to_proto(), max_staleness=staleness)
    asked.cluster.nodes.add(count=1).devices.add(kind="virtual", count=DEVICES)
    for place, stage in enumerate(graph.kinds(pb.STAGE_KIND_WORK), start=1):
        for devices in (1, 2, 4):
            for share in (1, 4, 16):
                items, seconds = graph.volume(stage.name) / share, 0.05 + 4.0 * place / devices / share
                asked.profile.samples.add(stage=stage.name, devices=devices, items=items, seconds=seconds)
    return asked


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_runtime_takes_every_plan_that_is_offered(name: str, staleness: int) -> None:
    graph = traced(name)
    offered = plan(request(graph, staleness)).plans
    assert offered
    for ranked in offered:
        check_plan(graph, ranked.plan, Cluster.virtual(DEVICES))
