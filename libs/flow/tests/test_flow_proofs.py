"""No plan that is accepted deadlocks, and every item arrives once: random programs and plans on a virtual clock.

The stage loops, the device lock and the channel index are the real ones; only what carries their messages is replaced,
by direct calls, and time passes only when nobody can run. Where no time is left to pass either, that is a deadlock.

M2FLOW_PROOF_CASES says how many random cases are tried; the first ones are the same every time.
"""

import heapq
import itertools
import os
import random
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from m2flow.comm import ChannelClosedError, IterationEnded, Request, TimeoutError_
from m2flow.comm._index import Caller, ChannelIndex, Entry
from m2flow.comm._views import Filter
from m2flow.flow import PlanError, check_plan, lower, trace
from m2flow.flow._inbox import Inbox
from m2flow.flow._loop import StageLoop
from m2flow.flow._mail import inbox_channel
from m2flow.flow._outlet import Outlet, Tally
from m2flow.flow._rendezvous import Rendezvous
from m2flow.flow._spans import Recorder
from m2flow.flow._unit import Unit
from m2flow.flow.testing import FakeSpec, as_it_is, goes_round
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Cluster, Item, LockServer

CASES = int(os.environ.get("M2FLOW_PROOF_CASES", "60"))


class Deadlock(Exception):
    """Nobody can run, and no time is left to pass."""


class World:
    """Threads of which one runs at a time, chosen by chance, and a clock that moves when none can."""

    def __init__(self, chance):
        self.mutex = threading.RLock()
        self.now_s = 0.0
        self.dead = False
        self.failures = []
        self._chance = chance
        self._timers = []
        self._blocked = set()
        self._ready = []
        self._threads = []
        self._numbers = itertools.count()

    def spawn(self, jobs):
        """Runs jobs to their end; raises the first failure."""
        for job in jobs:
            self.add(job)
        with self.mutex:
            self._go_on()
        for thread in self._threads:  # which grows while it is walked
            thread.join(20)
            assert not thread.is_alive(), "the harness itself hangs"
        if self.failures:
            raise self.failures[0]

    def add(self, job):
        """Adds a thread, ready to run."""
        start = threading.Event()
        self._ready.append(start)
        self._threads.append(threading.Thread(target=self._run, args=(job, start), daemon=True))
        self._threads[-1].start()

    def _run(self, job, start):
        start.wait()
        try:
            job()
        except BaseException as failure:
            self.failures.append(failure)
        with self.mutex:
            self._go_on()

    def wait(self, promise, timeout_s=None):
        """Waits for a promise, or for the time-out; says whether it is kept."""
        with self.mutex:
            if promise.kept:
                return True
            if self.dead:
                raise Deadlock(f"at {self.now_s:.3f} s")
            event = threading.Event()
            promise.events.append(event)
            self._blocked.add(event)
            if timeout_s is not None:
                heapq.heappush(self._timers, (self.now_s + timeout_s, next(self._numbers), event))
            self._go_on()
        event.wait()
        if self.dead and not promise.kept:
            raise Deadlock(f"at {self.now_s:.3f} s")
        return promise.kept

    def wake(self, event):
        """Lets a waiting thread run when its turn comes."""
        if event in self._blocked:
            self._blocked.remove(event)
            self._ready.append(event)

    def _go_on(self):
        """Called by the thread that runs when it stops running: chooses the next."""
        while not self._ready and self._timers:
            at, _, event = heapq.heappop(self._timers)
            if event in self._blocked:
                self.now_s = at
                self.wake(event)
        if not self._ready and self._blocked:
            self.dead = True
            for event in list(self._blocked):
                self.wake(event)
        if self._ready:
            self._ready.pop(self._chance.randrange(len(self._ready))).set()

    def sleep(self, seconds):
        """Lets time pass for this thread."""
        if seconds > 0:
            self.wait(Promise(self), seconds)


class Promise:
    """A future of the virtual world."""

    def __init__(self, world):
        self.world, self.kept, self.value, self.error, self.events = world, False, None, None, []
        self.callbacks = []

    def keep(self, value=None, error=None):
        with self.world.mutex:
            self.kept, self.value, self.error = True, value, error
            for event in self.events:
                self.world.wake(event)
        for callback in self.callbacks:
            callback(self)

    def add_done_callback(self, callback):
        if self.kept:
            callback(self)
        else:
            self.callbacks.append(callback)

    def exception(self):
        return self.error

    def done(self):
        return self.kept

    def result(self, timeout_s=None):
        if not self.world.wait(self, timeout_s):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self.value


class Mutex:
    """A re-entrant lock whose waiters the world knows."""

    def __init__(self, world):
        self.world, self.owner, self.depth, self.line = world, None, 0, []

    def acquire(self, blocking=True):
        me = threading.get_ident()
        while True:
            with self.world.mutex:
                if self.owner in (None, me):
                    self.owner, self.depth = me, self.depth + 1
                    return True
                if not blocking:
                    return False
                promise = Promise(self.world)
                self.line.append(promise)
            self.world.wait(promise)

    def release(self):
        with self.world.mutex:
            self.depth -= 1
            if not self.depth:
                self.owner = None
                if self.line:
                    self.line.pop(0).keep()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class Line:
    """A channel's client that calls the real index directly."""

    def __init__(self, endpoint, name):
        self.name, self._endpoint, self._world = name, endpoint, endpoint.world
        self._index = endpoint.fabric.indexes[name]

    def put_many(self, puts, *, timeout_s=None):
        entries = [
            Entry(p.id, p.key, p.weight, p.iteration, self._endpoint.name, "", SimpleNamespace(item=p.item, drop=int))
            for p in puts
        ]
        self._ask(lambda caller: self._index.put(caller, entries, wait=True), timeout_s)

    def get_batch(self, weight, *, at_least=None, key=None, iteration=None, ack=(), timeout_s=None):
        self.ack(list(ack))
        found = self._ask(lambda caller: self._index.get(caller, Filter(key, iteration), weight, at_least), timeout_s)
        return [SimpleNamespace(id=e.id, number=e.lease, item=e.payload.item) for e in found]

    def get(self, *, iteration):
        return self.get_batch(0.0, iteration=iteration)[0]

    def ack(self, leases):
        many = leases if isinstance(leases, list) else [leases]
        with self._world.mutex:
            self._index.ack(self._endpoint.name, [lease.number for lease in many], give_back=False)

    def end(self, iteration):
        self._ask(lambda caller: self._index.end(caller, iteration))

    def _ask(self, act, timeout_s=None):
        promise = Promise(self._world)
        number = next(self._endpoint.numbers)
        caller = Caller(self._endpoint.name, self._endpoint.name, number, lambda *answer: promise.keep(answer))
        with self._world.mutex:
            act(caller)
        if not self._world.wait(promise, timeout_s):
            with self._world.mutex:
                self._index.cancel(self._endpoint.name, number)
        entries, refusal = promise.result()
        if refusal is None:
            return entries
        if refusal.type == "IterationEnded":
            raise IterationEnded(self.name, 0)
        if refusal.type == "TimeoutError_":
            raise TimeoutError_(channel=self.name, key=None, peer="", elapsed_s=timeout_s)
        raise ChannelClosedError(self.name, str(refusal))


class Fabric:
    """The endpoints of one case, who call each other directly."""

    def __init__(self, world):
        self.world, self.indexes, self.handlers = world, {}, {}

    def endpoint(self, name):
        return VirtualEndpoint(self, name)


class VirtualEndpoint:
    """As much of an endpoint as stage loops and the lock use."""

    def __init__(self, fabric, name):
        self.fabric, self.world, self.name, self.numbers = fabric, fabric.world, name, itertools.count(1)

    def channel(self, name, *, host):
        return Line(self, name)

    def handle(self, service, handler, *, prompt=False):
        self.fabric.handlers[self.name, service] = handler

    def on_peer_lost(self, callback):
        pass

    def request_async(self, peer, service, method, args=None):
        promise = Promise(self.world)
        answer = self.fabric.handlers[peer, service](Request(self.name, service, method, args))
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: promise.keep(done.result()))
        else:
            promise.keep(answer)
        return promise

    def request(self, peer, service, method, args=None, *, timeout_s=None):
        return self.request_async(peer, service, method, args).result(timeout_s)


class Pool:
    """An executor of the virtual world: a thread for each job."""

    def __init__(self, world):
        self._world = world

    def submit(self, function):
        promise = Promise(self._world)

        def job():
            try:
                promise.keep(function())
            except BaseException as failure:
                promise.keep(error=failure)

        with self._world.mutex:
            self._world.add(job)
        return promise


class Slow:
    """A worker whose stages take random time; "expand*" makes children, everything else passes items on.

    "pull*" takes its items from an inbox; "enter*" and "back*", or "turn*" and "rest*", are the ends of a loop that an
    item goes round one to three times.
    """

    def __init__(self, world, chance, journal):
        self.world, self.chance, self.journal = world, chance, journal

    def onload(self):
        self.world.sleep(self.chance.choice([0.0, 0.2]))

    def offload(self):
        self.world.sleep(self.chance.choice([0.0, 0.2]))

    def resident_bytes(self):
        return 0

    def __getattr__(self, method):
        if method.startswith("pull"):
            return lambda inbox: self._pull(inbox, method)

        def run(items):
            self.journal.append((method, [item.seq for item in items]))
            self.world.sleep(self.chance.random())
            if method.startswith("expand"):
                return self._expand(items, method)
            if method.startswith(("enter", "turn")):
                left = [item.fields.get("left") or 1 + sum(item.seq) % 3 for item in items]
                spent = 0 if method.startswith("enter") else 1
                return [item.with_fields(left=count - spent) for item, count in zip(items, left, strict=True)]
            if method.startswith("back"):
                return [item.with_fields(left=item.fields["left"] - 1) for item in items]
            return list(items)

        return run

    def _pull(self, inbox, method):
        most, in_hand = self.chance.randint(1, 4), []
        while in_hand := [*in_hand, *inbox.take(most - len(in_hand))]:
            self.world.sleep(self.chance.random())
            done = in_hand.pop(self.chance.randrange(len(in_hand)))
            self.journal.append((method, [done.seq]))
            yield done

    def _expand(self, items, by):
        for item in items:
            for index in range(3):
                self.world.sleep(self.chance.choice([0.0, 0.5]))
                yield item.child(index, 3, by)


# The stages of each part of a random program.
NAMES = {
    "work": ["first"],
    "pull": ["pull"],
    "expand": ["expand", "second"],
    "branch": ["first", "second"],
    "loop": ["enter", "back"],
    "late": ["turn", "rest"],
}


def random_program(chance, num_stages):
    """A program of so many stages over a few groups: chains, expansions that are gathered, joins, loops."""
    groups = [f"g{number}" for number in range(chance.randint(1, min(4, num_stages)))]
    steps = []
    left = num_stages
    while left:
        kind = chance.choice(["work", "pull", *(["expand", "branch", "loop", "late"] if left >= 2 else [])])
        steps.append((kind, chance.choice(groups), chance.choice(groups)))
        left -= len(NAMES[kind])
    stages = {name: [] for name in groups}
    plan = []
    for number, (kind, one, other) in enumerate(steps):
        first, *second = (f"{word}{number}" for word in NAMES[kind])
        stages[one].append(first)
        stages[other] += second
        plan.append((kind, one, first, other, "".join(second)))

    def program(flow, **proxies):
        stream = flow.source("items")
        for kind, one, first, other, second in plan:
            if kind == "branch":
                stream = flow.join(getattr(proxies[one], first)(stream), getattr(proxies[other], second)(stream))
            elif kind == "loop":
                head = flow.loop(stream)
                turn = getattr(proxies[other], second)(getattr(proxies[one], first)(head))
                again, stream = flow.split(goes_round, turn)
                head.feed(again)
            elif kind == "late":  # who has left is known before the way back is over
                head = flow.loop(stream)
                turn = getattr(proxies[one], first)(flow.map(as_it_is, head))
                again, stream = flow.split(goes_round, turn)
                head.feed(getattr(proxies[other], second)(again))
            else:
                stream = getattr(proxies[one], first)(stream)
            if kind == "expand":
                stream = flow.gather(getattr(proxies[other], second)(stream), by=first)
        return stream

    used = {}
    for name in filter(stages.get, groups):
        in_step = chance.random() < 0.3 and not any(stage.startswith("pull") for stage in stages[name])
        used[name] = FakeSpec(name, tuple(stages[name]), in_step=in_step)
    expansions = {f"{one}.{first}": 3 for kind, one, first, _, _ in plan if kind == "expand"}
    return trace(program, used, source_items=chance.randint(1, 6), expansions=expansions)


def random_plan(chance, graph, num_devices):
    """Any plan, good or bad, on so many devices."""
    plan = pb.ExecutionPlan(staleness=chance.choice([0, 0, 1]))
    for name in graph.groups:
        ids = sorted(chance.sample(range(num_devices), chance.randint(1, num_devices)))
        plan.groups.add(
            group=name,
            device_ids=ids,
            num_ranks=len(ids),
            residency=chance.choice([pb.RESIDENCY_RESIDENT, pb.RESIDENCY_OFFLOADED]),
        )
    whole = [group.group for group in plan.groups]
    if len({number for group in plan.groups for number in group.device_ids}) < sum(
        len(group.device_ids) for group in plan.groups
    ):
        plan.share_groups.add(groups=whole, device_ids=sorted({n for g in plan.groups for n in g.device_ids}))
    for position, stage in enumerate(graph.kinds(pb.STAGE_KIND_WORK)):
        volume = graph.volume(stage.name)
        plan.stages.add(
            stage=stage.name,
            granularity=chance.choice([1, volume, chance.randint(1, volume)]),
            position=position,
            hold=chance.random() < 0.5,
        )
    for stream in graph.streams:
        if chance.random() < 0.15:
            capacity = chance.randint(1, 2 * graph.volume_out(stream.producer))
            plan.edges.add(producer=stream.producer, consumer=stream.consumer, capacity=capacity)
    return plan


def run_case(graph, plan, chance, iterations=2):
    """Runs a plan in a virtual world; returns what reached the sink by iteration, and what each stage was given."""
    world = World(random.Random(chance.random()))
    fabric = Fabric(world)
    driver = fabric.endpoint("driver")
    LockServer(driver)
    flow = lower(graph, plan)
    for stage in flow.stages:
        if stage.inbox.ports:
            producers = {name for port in stage.inbox.ports for name in flow.endpoints(port)}
            name = inbox_channel(0, stage.name)
            consumers = flow.endpoints(stage.name)
            fabric.indexes[name] = ChannelIndex(
                name, capacity=stage.inbox.capacity, producers=sorted(producers), consumers=consumers
            )
    journal, arrived = [], {}
    over = [Promise(world) for _ in range(iterations)]
    jobs = [lambda: feed(flow, driver, over), lambda: drain(flow, driver, over, arrived)]
    for group in flow.groups:
        for rank, devices in enumerate(group.ranks):
            jobs += rank_jobs(flow, group, rank, devices, fabric, chance, journal, iterations)
    world.spawn(jobs)
    return arrived, journal


def feed(flow, driver, over):
    """The driver's side of the source: an iteration begins when those before it allow."""
    source = next(stage.name for stage in flow.stages if stage.kind == "source")
    for iteration in range(len(over)):
        if iteration > flow.staleness:
            over[iteration - flow.staleness - 1].result()
        outlet = Outlet(flow, source, driver, Tally())
        outlet.put([Item((n,), iteration) for n in range(flow.source_items)], [0] * flow.source_items, iteration)
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
    worker = Slow(world, random.Random(chance.random()), journal)
    unit = Unit(worker, context, Recorder(group.name, rank, devices, 0))
    unit.sender.shutdown()
    unit.sender, unit.residence._mutex = Pool(world), Mutex(world)
    meeting = (
        Rendezvous(endpoint, group.name, rank, len(group.ranks)) if group.in_step and len(group.ranks) > 1 else None
    )

    def loop(stage):
        for iteration in range(iterations):
            StageLoop(flow, stage, unit, iteration, meeting).run()

    return [lambda stage=stage: loop(stage) for stage in flow.stages_of(group.name)]


def random_case(seed):
    """The first plan for a seed's program that is accepted, and the chance that goes on from there."""
    chance = random.Random(seed)
    graph = random_program(chance, chance.randint(1, 8))
    num_devices = chance.randint(1, 4)
    cluster = Cluster.virtual(num_devices)
    while True:
        plan = random_plan(chance, graph, num_devices)
        try:
            check_plan(graph, plan, cluster)
        except PlanError:
            continue
        return graph, plan, chance


@pytest.mark.timeout(3600)
def test_no_accepted_plan_deadlocks_and_every_item_arrives_once():
    for seed in range(CASES):
        graph, plan, chance = random_case(seed)
        try:
            arrived, journal = run_case(graph, plan, chance)
        except Exception as failure:
            raise AssertionError(f"seed {seed}: {failure!r}\n{graph.to_text()}\n{plan}") from failure
        wanted = [(place,) for place in range(graph.source_items)]
        assert {k: sorted(v) for k, v in arrived.items()} == {0: wanted, 1: wanted}, f"seed {seed}"
        for stage in graph.kinds(pb.STAGE_KIND_WORK):
            given = [seq for method, chunk in journal if method == stage.method for seq in chunk]
            rounds = 0 if stage.method.startswith("rest") else 1
            looped = stage.name in graph.in_cycles
            turns = sum(rounds + sum(seq) % 3 for seq in set(given)) if looped else graph.volume(stage.name)
            assert len(given) == 2 * turns, f"seed {seed}: {stage.name}"


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
    arrived, _ = run_case(graph, plan, random.Random(0))
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
