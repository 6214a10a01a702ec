"""Random programs, what is to come of them by plain counting, and random plans for them, good or bad."""

from collections import Counter
from dataclasses import dataclass

from m2flow.flow import Graph, trace
from m2flow.flow.testing import FakeSpec, as_it_is, goes_round, is_odd
from m2flow.proto.flow.v1 import flow_pb2 as pb


class Slow:
    """A worker whose stages take random time and pass items on.

    "expand*" makes three children of each, "pull*" takes its items from an inbox, "lossy*" drops some, "turn*" is where
    an item of a loop uses up one of its one to three rounds.
    """

    def __init__(self, world, chance, journal, context):
        self.world, self.chance, self.journal, self.context = world, chance, journal, context
        self.versions = []

    def onload(self):
        self.world.sleep(self.chance.choice([0.0, 0.2]))

    def offload(self):
        self.world.sleep(self.chance.choice([0.0, 0.2]))

    def resident_bytes(self):
        return 0

    def named_weights(self):
        self.world.sleep(self.chance.random())

    def load_weights(self, weights, version):
        self.world.sleep(self.chance.random())
        self.versions.append(version)

    def __getattr__(self, method):
        if method.startswith("pull"):
            return lambda inbox: self._pull(inbox, method)

        def run(items):
            self.journal.append((method, [item.seq for item in items]))
            self.world.sleep(self.chance.random())
            self.context.safe_point()
            self.world.sleep(self.chance.choice([0.0, 0.5]))
            if method.startswith("expand"):
                return self._expand(items, method)
            if method.startswith("lossy"):
                return [item.as_tombstone("lost") if is_lost(item.seq) else item for item in items]
            if method.startswith("turn"):
                return [item.with_fields(left=(item.fields.get("left") or rounds(item.seq)) - 1) for item in items]
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


def rounds(seq):
    """How often the item at a place goes round a loop."""
    return 1 + sum(seq) % 3


def is_lost(seq):
    """Whether a lossy stage drops what is at a place: all that comes of some source items, of others one child."""
    return seq[0] % 4 == 2 or seq[1:] == (0,)


def is_kept(item):
    """Whether an item passes a filter or a quota."""
    return sum(item.seq) % 4 != 2


def is_odd_place(item):
    """Whether an item goes the first way of two."""
    return item.seq[-1] % 2 == 1


def as_its_members(group):
    """A group with as many rounds left as its members, which know it from before they were made."""
    return group.with_fields(left=group.members[0].fields["left"])


@dataclass
class Step:
    """A part of a program: its stages, each a method of a group."""

    kind: str
    stages: list
    count: int = 0
    carries: bool = False

    def build(self, flow, stream, proxies):
        """The stream behind it."""
        calls = [getattr(proxies[group], method) for group, method in self.stages]
        return BUILD[self.kind](self, flow, stream, *calls)

    def visits(self, seq):
        """How many items of those that come of a place each stage is given."""
        children = [(*seq, index) for index in range(3)]
        again = range(1, rounds(seq))  # the rounds that are left whenever an item goes back
        ways_back = min(len(again), 1) if is_lost(seq) else len(again)
        turns = ways_back + (not is_lost(seq) or not again)
        return {
            "expand": [1, 3],
            "sift": [1, sum(sum(child) % 4 != 2 for child in children)],
            "ways": [seq[-1] % 2, 1 - seq[-1] % 2],
            "loop": [rounds(seq), rounds(seq)],
            "late": [rounds(seq), len(again)],
            "feeds": [rounds(seq), sum(left % 2 for left in again), sum(1 - left % 2 for left in again)],
            "inner": [rounds(seq), 1 + sum(1 - left % 2 for left in again)],
            "bury": [turns, ways_back],
            "brood": [turns, ways_back, 3 * ways_back],
            "fork": [rounds(seq), rounds(seq), 3 * rounds(seq)],
            "epochs": [2],
        }.get(self.kind, [1] * len(self.stages))


def expand(step, flow, stream, one, other):
    return flow.gather(other(one(stream)), by=step.stages[0][1])


def sift(step, flow, stream, one, other):
    return flow.gather(other(flow.filter(is_kept, one(stream))), by=step.stages[0][1])


def ways(step, flow, stream, one, other):
    odd, even = flow.split(is_odd_place, stream)
    return flow.merge(one(odd), other(even))


def loop(step, flow, stream, turn, other):
    head = flow.loop(stream)
    again, done = flow.split(goes_round, other(turn(head)))
    head.feed(again)
    return done


def late(step, flow, stream, turn, back):
    """Who has left is known before the way back is over."""
    head = flow.loop(stream)
    again, done = flow.split(goes_round, turn(flow.map(as_it_is, head)))
    head.feed(back(again))
    return done


def feeds(step, flow, stream, turn, odd, even):
    head = flow.loop(stream)
    to_odd, rest = flow.split(is_odd, turn(head))
    to_even, done = flow.split(goes_round, rest)
    head.feed(odd(to_odd))
    head.feed(even(to_even))
    return done


def inner(step, flow, stream, turn, outside):
    """A loop in a loop."""
    outer = flow.loop(stream)
    head = flow.loop(outside(outer))
    again, out = flow.split(is_odd, turn(head))
    head.feed(again)
    around, done = flow.split(goes_round, out)
    outer.feed(around)
    return done


def fork(step, flow, stream, turn, one, other):
    """What an item becomes in a loop is gathered there."""
    head = flow.loop(stream)
    whole = flow.gather(other(one(turn(head))), by=step.stages[1][1])
    again, done = flow.split(goes_round, flow.map(as_its_members, whole))
    head.feed(again)
    return done


def brood(step, flow, stream, turn, one, lossy):
    """What an item becomes on its way back is gathered at the head, if it lives."""
    head = flow.loop(stream)
    again, done = flow.split(goes_round, turn(head))
    head.feed(flow.map(as_its_members, flow.gather(lossy(one(again)), by=step.stages[1][1])))
    return done


def quota(step, flow, stream, one):
    return one(flow.first(step.count, stream, where=is_kept, carry_surplus=step.carries))


BUILD = {
    "work": lambda step, flow, stream, one: one(stream),
    "pull": lambda step, flow, stream, one: one(stream),
    "filter": lambda step, flow, stream, one: one(flow.filter(is_kept, stream)),
    "barrier": lambda step, flow, stream, one: one(flow.barrier(stream)),
    "branch": lambda step, flow, stream, one, other: flow.join(one(stream), other(stream)),
    "epochs": lambda step, flow, stream, one: one(flow.epochs(stream, 2)),
    "expand": expand,
    "sift": sift,
    "ways": ways,
    "loop": loop,
    "late": late,
    "feeds": feeds,
    "inner": inner,
    "fork": fork,
    "bury": late,
    "brood": brood,
    "lossy": lambda step, flow, stream, one: one(stream),
    "quota": quota,
}

# The methods of each kind's stages.
METHODS = {
    "work": ["first"],
    "pull": ["pull"],
    "filter": ["first"],
    "barrier": ["first"],
    "quota": ["first"],
    "epochs": ["first"],
    "branch": ["first", "second"],
    "ways": ["first", "second"],
    "expand": ["expand", "second"],
    "sift": ["expand", "second"],
    "loop": ["turn", "rest"],
    "late": ["turn", "rest"],
    "inner": ["turn", "rest"],
    "feeds": ["turn", "rest", "third"],
    "fork": ["turn", "expand", "rest"],
    "bury": ["turn", "lossy"],
    "brood": ["turn", "expand", "lossy"],
    "lossy": ["lossy"],
}


@dataclass
class Case:
    """A program, and how much its source has beyond the first wave of an iteration."""

    graph: Graph
    steps: list
    wave: int
    most: int

    def expected(self, iterations):
        """The places that reach the sink in each iteration, and how many items each method is given in all."""
        carried, places, given = 0, [], Counter()
        for _ in range(iterations):
            num_fed = self.graph.source_items
            while (found := self._iteration(num_fed, carried)) is None:
                num_fed += self.wave
            arrived, counts, carried = found
            places.append(arrived)
            given += counts
        return places, given

    def _iteration(self, num_fed, carried):
        """Of so many source items; None where a quota wants more than those, and the source has more."""
        places, given, surplus = [(place,) for place in range(num_fed)], Counter(), 0
        for step in self.steps:
            if step.kind in ("filter", "quota"):
                places = [seq for seq in places if sum(seq) % 4 != 2]
            if step.kind == "quota":
                passed = carried + len(places)
                if passed < step.count and num_fed < self.most:
                    return None
                surplus = max(0, passed - step.count) if step.carries else 0
                places = [(place,) for place in range(min(passed, step.count))]
            for seq in places:
                for (_, method), visits in zip(step.stages, step.visits(seq), strict=True):
                    given[method] += visits
            if step.kind == "epochs":
                places = sorted(2 * places)
            if step.kind == "lossy":
                places = [seq for seq in places if not is_lost(seq)]
            if step.kind in ("bury", "brood"):
                places = [seq for seq in places if not is_lost(seq) or rounds(seq) == 1]
        return places, given, surplus


def random_case(chance, num_stages):
    """A program of so many stages over a few groups, or one more where the last part needs it."""
    groups = [f"g{number}" for number in range(min(chance.choice([1, 2, 3, 4]), num_stages))]
    steps, left, kinds = [], num_stages, list(METHODS)
    while left > 0:
        kind = chance.choice([kind for kind in kinds if len(METHODS[kind]) <= max(left, 1)])
        if kind == "quota":  # one a program, and nothing in front of it that waits for the end
            kinds = [other for other in kinds if other != "quota"]
        if kind == "barrier":
            kinds = [other for other in kinds if other != "quota"]
        if kind == "epochs":  # only the program's result may follow
            left = len(METHODS[kind])
        stages = [(chance.choice(groups), f"{word}{len(steps)}") for word in METHODS[kind]]
        steps.append(Step(kind, stages, count=chance.randint(1, 6), carries=chance.random() < 0.5))
        left -= len(stages)
    methods = {name: [m for step in steps for group, m in step.stages if group == name] for name in groups}

    busy = [name for name in groups if methods[name]]
    publisher, *others = chance.sample(busy, len(busy))
    receivers = others[: chance.choice([0, 0, 0, 1, 2])]

    def program(flow, **proxies):
        stream = flow.source("items")
        for step in steps:
            stream = step.build(flow, stream, proxies)
        for to in receivers:
            flow.publish(proxies[publisher], to=proxies[to])
        return stream

    used = {}
    for name in busy:
        in_step = chance.random() < 0.3 and not any(method.startswith("pull") for method in methods[name])
        used[name] = FakeSpec(name, tuple(methods[name]), in_step=in_step)
    expansions = {f"{group}.{m}": 3 for step in steps for group, m in step.stages if m.startswith("expand")}
    source_items = chance.randint(1, 6)
    graph = trace(program, used, source_items=source_items, expansions=expansions)
    return Case(graph, steps, wave=chance.randint(1, 3), most=chance.choice([source_items, 2 * source_items, 12]))


def random_plan(chance, graph, num_devices):
    """Any plan, good or bad, on so many devices; some have groups of their own devices alone."""
    plan = pb.ExecutionPlan(staleness=chance.choice([0, 0, 1]))
    free = list(range(num_devices))
    chance.shuffle(free)
    apart = chance.random() < 0.3
    for number, name in enumerate(graph.groups):
        choice = free[number :: len(graph.groups)] if apart and len(graph.groups) <= num_devices else free
        ids = sorted(chance.sample(choice, chance.choice([1, chance.randint(1, len(choice))])))
        plan.groups.add(
            group=name,
            device_ids=ids,
            num_ranks=len(ids),
            residency=chance.choice([pb.RESIDENCY_RESIDENT, pb.RESIDENCY_OFFLOADED]),
        )
    for names, ids in sharing(plan, whole=chance.random() < 0.3):
        plan.share_groups.add(groups=names, device_ids=sorted(ids))
    for position, stage in enumerate(graph.kinds(pb.STAGE_KIND_WORK, pb.STAGE_KIND_PUBLISH)):
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


def sharing(plan, *, whole):
    """The groups that have devices in common, directly or through others; `whole`: all in one, where any have."""
    parts = []
    for group in plan.groups:
        names, ids = [group.group], set(group.device_ids)
        for part in [part for part in parts if part[1] & ids]:
            parts.remove(part)
            names, ids = part[0] + names, part[1] | ids
        parts.append((names, ids))
    if whole and len(parts) < len(plan.groups):
        return [([group.group for group in plan.groups], {n for group in plan.groups for n in group.device_ids})]
    return [part for part in parts if len(part[0]) > 1]
