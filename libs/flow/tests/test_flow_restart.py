"""A rank that was started anew finds its place, whichever of the driver's calls is repeated to it first."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from m2flow.comm import Endpoint, IterationEnded, PeerLostError
from m2flow.flow import lower, spatial_plan, temporal_plan
from m2flow.flow._loop import await_gate
from m2flow.flow._mail import inbox_channel
from m2flow.flow._orphans import Orphans
from m2flow.flow._outlet import Outlet, Tally
from m2flow.flow._residence import Residence
from m2flow.flow._spans import Recorder
from m2flow.flow.microflow import pack
from m2flow.flow.runner import RankRunner
from m2flow.flow.testing import SyntheticRollout, grpo_graph
from m2flow.worker import Cluster, Item, LockServer, WorkerContext

ITERATION = 3


@pytest.fixture
def ends(tmp_path):
    made = {name: Endpoint(tmp_path, name, token="t") for name in ("driver", "rollout.0", "actor.0", "reward.0")}
    yield made
    for endpoint in reversed(made.values()):
        endpoint.close()


class Journal(SyntheticRollout):
    """Writes down what is done to it."""

    def setup(self):
        super().setup()
        self.log = []

    def generate(self, items):
        self.log.append("generate")
        yield from super().generate(items)

    def load_weights(self, weights, version):
        self.log.append(f"weights {version}")
        super().load_weights(weights, version)

    def onload(self):
        self.log.append("onload")
        super().onload()

    def offload(self):
        self.log.append("offload")
        super().offload()


@pytest.mark.medium
@pytest.mark.parametrize("first", ["begin", "finish"])
def test_a_restarted_rank_catches_up_before_the_first_call_that_reaches_it(ends, tmp_path, first):
    """It was the second life's `begin` that came first, and ran without weights for ever."""
    cluster = Cluster.virtual(1)
    graph = grpo_graph(source_items=2, samples=2)
    flow = lower(graph, temporal_plan(graph, cluster))
    LockServer(ends["driver"])
    for name in ("rollout.generate", "reward.score"):
        producers = [end for port in flow.stage(name).inbox.ports for end in flow.endpoints(port)]
        ends["driver"].host_channel(inbox_channel(0, name), producers=producers, consumers=flow.endpoints(name))
    # The iteration is under way: its weights are staged, its items are in.
    ends["actor.0"].stage_weights("publish:actor->rollout", ITERATION, {"w": np.ones(8)})
    prompts = Outlet(flow, "prompts", ends["driver"], Tally())
    prompts.put([Item((n,), ITERATION, {"seed": n}) for n in range(2)], [0, 0], ITERATION)
    prompts.end(ITERATION)

    worker = Journal({"samples": 2})
    worker.setup()
    worker.context = WorkerContext(
        "rollout", 0, 1, tuple(cluster.devices), ends["rollout.0"], tmp_path, ends.get, attempt=1
    )
    runner = RankRunner(worker, worker.context, 0)
    if first == "begin":
        runner.begin(ITERATION, [ITERATION], pack(flow))
        runner.begin(ITERATION, [ITERATION], pack(flow))  # the driver's own, after the one that was repeated
    answer = {}
    finish = threading.Thread(
        target=lambda: answer.update(runner.finish(ITERATION, [ITERATION], pack(flow))), daemon=True
    )
    finish.start()
    scored = ends["reward.0"].channel(inbox_channel(0, "reward.score"), host="driver")
    assert len(scored.get_batch(4, iteration=ITERATION, timeout_s=20)) == 4
    # The next weights end the iteration here: the publication is one of its stages.
    ends["actor.0"].stage_weights("publish:actor->rollout", ITERATION + 1, {"w": np.ones(8)})
    finish.join(20)
    assert not finish.is_alive(), worker.log
    runner.stop()
    assert worker.log[0] == "offload"
    assert worker.log.index(f"weights {ITERATION}") < worker.log.index("generate")
    assert worker.log.count("generate") == 1
    assert "spans" in answer


@pytest.mark.medium
def test_who_comes_too_late_for_a_version_of_weights_takes_the_newest(ends, tmp_path):
    """A rank in a long call, or one that was restarted, asked for a version that was withdrawn: the run ended."""
    cluster = Cluster.virtual(3)
    graph = grpo_graph(source_items=2, samples=2)
    flow = lower(graph, spatial_plan(graph, cluster))
    LockServer(ends["driver"])
    for version in (1, 2, 3):
        ends["actor.0"].stage_weights("publish:actor->rollout", version, {"w": np.ones(8)})
    worker = Journal({"samples": 2})
    worker.setup()
    worker.context = WorkerContext(
        "rollout", 0, 1, tuple(cluster.devices[:1]), ends["rollout.0"], tmp_path, ends.get, attempt=0
    )
    runner = RankRunner(worker, worker.context, 0)
    runner.receive_weights(1, flow)
    runner.receive_weights(2, flow)
    assert worker.log == ["weights 3"]
    runner.stop()


def test_weights_of_several_groups_wait_for_a_worker_that_is_off_its_devices(tmp_path):
    """Only those of the last group that had sent some arrived, but all where the worker stayed on its devices."""
    worker = Journal({"samples": 2})
    worker.setup()
    worker.context = WorkerContext("rollout", 0, 1, (), None, tmp_path, lambda name: None)
    residence = Residence(worker, worker.context, Recorder("rollout", 0, (), 0))
    residence.rest(offload=True)
    worker.log.clear()
    for stage, version in (("one", 1), ("other", 1), ("one", 2)):
        residence.take_weights(stage, version, partial(worker.log.append, f"{stage} {version}"))
    with residence.within("rollout.generate", 2, offload=True):
        assert worker.log == ["onload", "one 2", "other 1"]


def test_a_gate_waits_for_who_comes_back():
    """The death of any rank that a publication comes after ended the run, though the rank was restarted."""
    answers = [PeerLostError("env.0", "it died"), IterationEnded("line", 0)]

    class Gate:
        def get(self, *, iteration):
            raise answers.pop(0)

    endpoint = SimpleNamespace(channel=lambda name, host: Gate())
    unit = SimpleNamespace(context=SimpleNamespace(endpoint=endpoint), recorder=Recorder("actor", 0, (0,), 0))
    flow = SimpleNamespace(generation=0, comes_back=lambda peer: peer == "env.0")
    stage = SimpleNamespace(name="publish:actor->policy", after=("env.step",))
    await_gate(flow, stage, unit, 0)
    assert not answers
    answers.append(PeerLostError("actor.1", "it died"))
    with pytest.raises(PeerLostError):
        await_gate(flow, stage, unit, 0)


def test_the_episodes_of_every_iteration_under_way_die_with_their_process():
    orphans = Orphans()
    item = [Item((0,), 1)]
    reset, step = {"enters": True, "in_loop": False}, {"enters": False, "in_loop": True}
    assert orphans.among(1, item, [1], **step) == []
    orphans.bury([0, 1])
    assert orphans.among(1, item, [0], **step) == item
    assert orphans.among(1, item, [0], **reset) == []
    assert orphans.among(1, item, [0], **step) == []
    assert orphans.among(1, item, [1], **step) == []
    assert orphans.among(1, item, [1], enters=False, in_loop=False) == []
    assert orphans.among(0, item, [1], **step) == item
    assert orphans.among(2, item, [1], **step) == []


def test_an_episode_that_begins_anew_does_not_go_on_in_its_middle():
    orphans = Orphans()
    item = [Item((0,), 1)]
    orphans.bury([1])
    # What comes before the loop was not committed when the process died; the first step was.
    assert orphans.among(1, item, [0], enters=True, in_loop=False) == []
    assert orphans.among(1, item, [0], enters=False, in_loop=False) == []
    assert orphans.among(1, item, [1], enters=False, in_loop=True) == item
    assert orphans.among(1, item, [2], enters=False, in_loop=False) == item
