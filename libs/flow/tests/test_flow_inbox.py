"""A stage's inbox on real channels: what it takes as one batch, and how often it asks."""

import pytest

from m2flow.comm import Endpoint, LeaseLostError, TimeoutError_
from m2flow.flow import lower, spatial_plan
from m2flow.flow._inbox import Inbox
from m2flow.flow._mail import inbox_channel
from m2flow.flow._outlet import Outlet, Tally
from m2flow.worker import Cluster, Item


@pytest.fixture
def ends(tmp_path):
    """Endpoints of a driver, an environment and a policy."""
    made = {name: Endpoint(tmp_path, name, token="t") for name in ("driver", "env.0", "policy.0")}
    yield made
    for endpoint in reversed(made.values()):
        endpoint.close()


@pytest.fixture
def flow(loop_graph):
    """The loop of environment and policy, with chunks of 4 episodes in the policy."""
    return loop_of(loop_graph, in_flight=0)


def loop_of(graph, in_flight):
    plan = spatial_plan(graph, Cluster.virtual(2))
    next(stage for stage in plan.stages if stage.stage == "policy.act").granularity = 4
    plan.edges[0].capacity = in_flight
    return lower(graph, plan)


def inbox_of(flow, ends, name):
    stage = flow.stage(name)
    ends["driver"].host_channel(
        inbox_channel(0, name),
        producers=[f"{port.split('.')[0]}.0" for port in stage.inbox.ports],
        consumers=["policy.0"],
    )
    channel = ends["policy.0"].channel(inbox_channel(0, name), host="driver")
    asked = []
    get_batch = channel.get_batch
    channel.get_batch = lambda *args, **options: asked.append(args) or get_batch(*args, **options)
    return Inbox(flow, stage, channel, 0, rank=0, quota=None), asked


def test_a_stage_in_a_loop_takes_what_has_arrived_as_one_batch(flow, ends):
    inbox, asked = inbox_of(flow, ends, "policy.act")
    env = Outlet(flow, "env.reset", ends["env.0"], Tally())

    def arrive(*places):
        env.put([Item((place,), 0) for place in places], [0] * len(places), 0)

    arrive(0, 1, 2)
    assert [item.seq for item in inbox.next().items] == [(0,), (1,), (2,)]
    arrive(3)
    assert [item.seq for item in inbox.next().items] == [(3,)]
    arrive(4, 5, 6, 7, 8)
    assert [item.seq for item in inbox.next().items] == [(4,), (5,), (6,), (7,)]
    assert len(asked) == 3
    assert [item.seq for item in inbox.next(timeout_s=0.0).items] == [(8,)]
    with pytest.raises(TimeoutError_):
        inbox.next(timeout_s=0.0)


def test_a_lease_that_ended_with_its_connection_ends_no_stage(flow, ends):
    inbox_of(flow, ends, "policy.act")
    inbox, asked = inbox_of(flow, ends, "sink")
    env = Outlet(flow, "env.step", ends["env.0"], Tally())
    get_batch = inbox._channel.get_batch

    def lost(*args, **options):
        inbox._channel.get_batch = get_batch
        raise LeaseLostError("sink", "'a'")

    inbox._channel.get_batch = lost
    env.put([Item((0,), 0).as_tombstone("died")], [0], 0)
    assert [item.seq for item in inbox.next(timeout_s=1.0).dead] == [(0,)]
    assert len(asked) == 1


def test_an_episode_whose_process_died_between_two_puts_dies_once(flow, ends):
    inbox_of(flow, ends, "policy.act")
    inbox, _ = inbox_of(flow, ends, "sink")
    env = Outlet(flow, "env.step", ends["env.0"], Tally())
    # Round 3 had reached the policy, so that the episode came back in round 4; this consumer had heard of neither.
    for round_ in (3, 4):
        env.put([Item((0,), 0).as_tombstone("died")], [round_], 0)
    env.put([Item((1,), 0).as_tombstone("died")], [4], 0)
    dead = [item.seq for _ in range(2) for item in inbox.next(timeout_s=1.0).dead]
    assert dead == [(0,), (1,)]
    with pytest.raises(TimeoutError_):
        inbox.next(timeout_s=0.0)


def test_a_process_that_dies_after_the_end_of_an_iteration_ends_it_again(flow, ends):
    """It could not say a second time what had entered the loop, in any of its lives."""
    inbox, _ = inbox_of(flow, ends, "policy.act")
    inbox_of(flow, ends, "sink")
    for _ in range(2):
        tally = Tally()
        for name in ("env.reset", "env.step"):
            Outlet(flow, name, ends["env.0"], tally).end(0)
        assert inbox.next(timeout_s=10.0) is None


def test_only_so_many_episodes_are_in_a_loop_as_the_plan_says(loop_graph, ends):
    flow = loop_of(loop_graph, in_flight=4)
    inbox, _ = inbox_of(flow, ends, "policy.act")
    ends["driver"].host_channel(inbox_channel(0, "sink"), producers=["env.0"], consumers=["driver"])
    reset, step = (Outlet(flow, name, ends["env.0"], Tally()) for name in ("env.reset", "env.step"))
    reset.put([Item((place,), 0) for place in range(6)], [0] * 6, 0)
    assert [item.seq for item in inbox.next().items] == [(0,), (1,), (2,), (3,)]
    with pytest.raises(TimeoutError_):
        inbox.next(timeout_s=0.0)
    step.put([Item((place,), 0, {"done": place == 2}) for place in (2, 1, 0)], [0] * 3, 0)
    # Of the three, one has left: one enters.
    assert [item.seq for item in inbox.next().items] == [(0,), (1,), (4,)]
