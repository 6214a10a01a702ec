"""Spans of workers on other machines are told by the driver's clock."""

import subprocess

import pytest

from m2flow.flow import Runtime, account, spatial_plan, trace
from m2flow.flow.testing import SyntheticActor, SyntheticReward, SyntheticRollout, grpo
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import AgentAddress, Cluster, Item, launch_run
from m2flow.worker.testing.served import served

AHEAD_S = 5000
# A process of its own time namespace, whose monotonic clock is ahead.
ELSEWHERE = ["unshare", "--time", "--monotonic", str(AHEAD_S)]


def shifts_clocks() -> bool:
    """Whether this kernel gives a process another clock at its start (Linux 6.1), and lets us."""
    clock = "import time; print(time.monotonic())"
    try:
        asked = subprocess.run([*ELSEWHERE, "python3", "-c", clock], capture_output=True, text=True, check=False)
        here = subprocess.run(["python3", "-c", clock], capture_output=True, text=True, check=True)
    except OSError:
        return False
    return asked.returncode == 0 and float(asked.stdout) > float(here.stdout) + AHEAD_S / 2


@pytest.mark.medium
@pytest.mark.skipif(not shifts_clocks(), reason="kernel feature: time namespaces that exec enters")
def test_spans_of_a_machine_whose_clock_is_ahead_fall_where_they_belong():
    groups = {
        "rollout": SyntheticRollout.group({"samples": 2, "seconds": 0.02}, name="rollout", device_kind="virtual"),
        "reward": SyntheticReward.group({"seconds": 0.01}, name="reward", device_kind="robot"),
        "actor": SyntheticActor.group({}, name="actor", device_kind="virtual"),
    }
    graph = trace(grpo, groups, source_items=4, expansions={"rollout.generate": 2})
    cluster = Cluster.virtual(2).with_resource("robot", node="far")
    target = groups["reward"].target
    with served(target, "127.0.0.1:0", "t", prefix=ELSEWHERE) as (_, address):
        agents = {"far": AgentAddress(address, "t")}
        with (
            launch_run(cluster, launcher="inproc", agents=agents, on_log=lambda *_: None) as session,
            Runtime(graph, spatial_plan(graph, cluster), session) as runtime,
        ):
            runtime.start()
            result = runtime.run(0, [Item((n,), 0, {"seed": n}) for n in range(4)])
    busy = [span for span in result.timeline.spans if span.kind == pb.SPAN_KIND_BUSY]
    spans = {name: [span for span in busy if span.stage == name] for name in graph.stages}
    # To within what a message takes: an item is scored after it was made, and before it is trained on.
    made = min(span.start_ns + span.output_after_ns[0] for span in spans["rollout.generate"])
    slack_ns = 5_000_000
    assert made - slack_ns <= min(span.start_ns for span in spans["reward.score"])
    assert max(span.end_ns for span in spans["reward.score"]) <= max(s.end_ns for s in spans["actor.train"]) + slack_ns
    assert {line.device_id for line in account(result.timeline, result.start_ns, result.end_ns)} == {0, 1, 2}
