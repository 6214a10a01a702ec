"""No plan that is accepted deadlocks, and every item arrives once: random programs and plans on a virtual clock.

The stage loops, the device lock, the board of quotas and the channel index are the real ones (`virtual_world.py`); the
programs and what is to come of them are in `random_programs.py`.

M2FLOW_PROOF_CASES says how many random cases are tried; the first ones are the same every time.
"""

import os
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from m2flow.comm._index import ChannelIndex
from m2flow.flow import PlanError, _safe_points, check_plan, lower, trace
from m2flow.flow._inbox import Inbox
from m2flow.flow._loop import StageLoop
from m2flow.flow._mail import gate_channel, inbox_channel
from m2flow.flow._outlet import Outlet, Tally
from m2flow.flow._quota import QuotaBoard
from m2flow.flow._rendezvous import Rendezvous
from m2flow.flow._spans import Recorder
from m2flow.flow._unit import Unit
from m2flow.flow._weights import Publication, Reception
from m2flow.flow.testing import FakeSpec
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Cluster, Item, LockServer

sys.path.insert(0, str(Path(__file__).parent))

from random_programs import Case, Slow, random_case, random_plan
from virtual_world import Condition, Deadlock, Fabric, Mutex, Pool, Promise, World

CASES = int(os.environ.get("M2FLOW_PROOF_CASES", "60"))


def run_case(case, plan, chance, iterations=2):
    """Runs a plan in a virtual world; returns what reached the sink by iteration, and what each stage was given."""
    world = World(random.Random(chance.random()))
    with patch.object(_safe_points, "Future", partial(Promise, world)):
        return run_in(world, case, plan, chance, iterations)


def run_in(world, case, plan, chance, iterations):
    fabric = Fabric(world)
    driver = fabric.endpoint("driver")
    LockServer(driver)
    board = QuotaBoard(driver)
    board._changed = Condition(world)
    flow = lower(case.graph, plan)
    for stage in flow.stages:
        for name, ports in (
            (inbox_channel(0, stage.name), stage.inbox.ports),
            (gate_channel(0, stage.name), stage.after),
        ):
            producers = sorted({endpoint for port in ports for endpoint in flow.endpoints(port)})
            fabric.indexes[name] = ChannelIndex(
                name, capacity=stage.inbox.capacity, producers=producers, consumers=flow.endpoints(stage.name)
            )
    journal, arrived = [], {}
    over = [Promise(world) for _ in range(iterations)]
    jobs = [lambda: feed(case, flow, driver, board, over), lambda: drain(flow, driver, over, arrived)]
    for group in flow.groups:
        for rank, devices in enumerate(group.ranks):
            jobs += rank_jobs(flow, group, rank, devices, fabric, chance, journal, iterations)
    world.spawn(jobs)
    return arrived, journal


def feed(case, flow, driver, board, over):
    """The driver's side of the source: an iteration begins when those before it allow, and goes on as quotas want."""
    source = next(stage.name for stage in flow.stages if stage.kind == "source")
    quotas = [op for stage in flow.stages for op in stage.inbox.ops if op.kind == "first"]
    for iteration in range(len(over)):
        if iteration > flow.staleness:
            over[iteration - flow.staleness - 1].result()
        outlet = Outlet(flow, source, driver, Tally())
        num_fed, size = 0, flow.source_items
        while size:
            outlet.put([Item((n,), iteration) for n in range(num_fed, num_fed + size)], [0] * size, iteration)
            num_fed += size
            wanting = any(not board.decided(iteration, op, num_fed, None) for op in quotas)
            size = case.wave if wanting and num_fed < case.most else 0
        outlet.end(iteration)


def drain(flow, driver, over, arrived):
    """The driver's side of the sink."""
    sink = next(stage for stage in flow.stages if stage.kind == "sink")
    for iteration, end in enumerate(over):
        line = driver.channel(inbox_channel(0, sink.name), host="driver")
        inbox = Inbox(flow, sink, line, iteration, rank=0, quota=None)
        arrived[iteration] = []
        while (chunk := inbox.next()) is not None:
            arrived[iteration] += [item.seq for item in chunk.items]
            inbox.ack(chunk)
        end.keep()


def rank_jobs(flow, group, rank, devices, fabric, chance, journal, iterations):
    world = fabric.world
    endpoint = fabric.endpoint(f"{group.name}.{rank}")
    context = SimpleNamespace(rank=rank, group=group.name, endpoint=endpoint, turn=Mutex(world))
    worker = Slow(world, random.Random(chance.random()), journal, context)
    unit = Unit(worker, context, Recorder(group.name, rank, devices, 0))
    unit.sender.shutdown()
    unit.sender, unit._weights = Pool(world), Condition(world)
    unit.residence._mutex, unit.residence._entry = Mutex(world), Condition(world)
    for stage in flow.stages:
        if stage.to == group.name:
            unit.have_weights(stage.name, 0)
    published = {stage.name: [Promise(world) for _ in range(iterations)] for stage in flow.stages_of(group.name)}
    meeting = (
        Rendezvous(endpoint, group.name, rank, len(group.ranks)) if group.in_step and len(group.ranks) > 1 else None
    )

    def loop(stage):
        for iteration in range(iterations):
            if stage.kind == "publish":
                Publication(flow, stage, unit).run(iteration)
                published[stage.name][iteration].keep()
                continue
            for other in flow.stages_of(group.name):  # no iteration changes the weights that the last one leaves behind
                if other.kind == "publish" and iteration:
                    published[other.name][iteration - 1].result()
            StageLoop(flow, stage, unit, iteration, meeting).run()

    def receive(stage):
        for iteration in range(iterations):
            Reception(flow, stage, unit).run(iteration)
        # One that is off its devices loads the newest when it comes back to them.
        assert unit.version == iterations
        assert worker.versions == sorted(set(worker.versions))

    jobs = [partial(loop, stage) for stage in flow.stages_of(group.name)]
    return jobs + [partial(receive, stage) for stage in flow.stages if stage.to == group.name]


def accepted_case(seed):
    """The first plan for a seed's program that is accepted, and the chance that goes on from there."""
    chance = random.Random(seed)
    case = random_case(chance, chance.randint(1, 8))
    num_devices = chance.choice([1, 1, 2, 3, 4])
    cluster = Cluster.virtual(num_devices)
    for _ in range(2000):
        plan = random_plan(chance, case.graph, num_devices)
        try:
            check_plan(case.graph, plan, cluster)
        except PlanError as refused:
            reason = refused
        else:
            return case, plan, chance
    raise AssertionError(f"seed {seed}: no plan is accepted, the last because of {reason}\n{case.graph.to_text()}")


@pytest.mark.timeout(3600)
def test_no_accepted_plan_deadlocks_and_every_item_arrives_once():
    for seed in range(CASES):
        case, plan, chance = accepted_case(seed)
        try:
            arrived, journal = run_case(case, plan, chance)
        except Exception as failure:
            raise AssertionError(f"seed {seed}: {failure!r}\n{case.graph.to_text()}\n{plan}") from failure
        places, counts = case.expected(2)
        given = Counter(dict.fromkeys(counts, 0))
        for method, chunk in journal:
            given[method] += len(chunk)
        assert [sorted(arrived[iteration]) for iteration in range(2)] == places, f"seed {seed}"
        assert given == counts, f"seed {seed}"


def test_a_holder_gives_its_turn_up_where_its_outputs_find_no_room():
    """Such a plan is refused, because it would switch all the time; run all the same, it comes to its end."""

    def program(flow, one, two):
        return two.second(one.expand(flow.source("items")))

    specs = {"one": FakeSpec("one", ("expand",)), "two": FakeSpec("two", ("second",))}
    graph = trace(program, specs, source_items=4, expansions={"one.expand": 3})
    plan = pb.ExecutionPlan(share_groups=[pb.ShareGroup(groups=["one", "two"], device_ids=[0])])
    for position, (group, stage, volume) in enumerate([("one", "one.expand", 4), ("two", "two.second", 12)]):
        plan.groups.add(group=group, device_ids=[0], num_ranks=1)
        plan.stages.add(stage=stage, granularity=volume if position == 0 else 1, position=position, hold=True)
    plan.edges.add(producer="one.expand", consumer="two.second", capacity=3)
    with pytest.raises(PlanError, match=r"only two\.second can make"):
        check_plan(graph, plan, Cluster.virtual(1))
    arrived, _ = run_case(Case(graph, [], wave=0, most=0), plan, random.Random(0))
    assert all(len(places) == 12 for places in arrived.values())


def test_the_harness_knows_a_deadlock():
    world = World(random.Random(0))
    one, other = Mutex(world), Mutex(world)

    def take(first, second):
        with first:
            world.sleep(1.0)
            with second:
                pass

    with pytest.raises(Deadlock, match=r"at 1\.000 s"):
        world.spawn([lambda: take(one, other), lambda: take(other, one)])
