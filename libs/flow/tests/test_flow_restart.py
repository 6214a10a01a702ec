"""A rank that was started anew finds its place, whichever of the driver's calls is repeated to it first."""

import threading

import numpy as np
import pytest

from m2flow.comm import Endpoint
from m2flow.flow import lower, temporal_plan
from m2flow.flow._mail import inbox_channel
from m2flow.flow._outlet import Outlet, Tally
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
        runner.begin(ITERATION, pack(flow))
        runner.begin(ITERATION, pack(flow))  # the driver's own, after the one that was repeated
    answer = {}
    finish = threading.Thread(target=lambda: answer.update(runner.finish(ITERATION, pack(flow))), daemon=True)
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
