"""Torch's threads where stages run: as many as the worker has cores, on the thread that runs the stage."""

import pytest

from m2flow.flow import Flow, Runtime, StageProxy, Stream, temporal_plan, trace
from m2flow.worker import Cluster, Item, launch_run
from m2flow.worker.testing.torch_probe import TorchProbe


def ask(flow: Flow, probe: StageProxy) -> Stream:
    return probe.on_stage_thread(flow.source("questions"))


@pytest.mark.medium
@pytest.mark.parametrize("one_thread", [False, True])
def test_a_stage_shares_no_product_with_threads_that_have_no_core(
    monkeypatch: pytest.MonkeyPatch, one_thread: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # what a thread has that was told nothing
    cluster = Cluster.local(1)
    graph = trace(ask, {"probe": TorchProbe.group({"one_thread": one_thread}, name="probe")}, source_items=1)
    with (
        launch_run(cluster, launcher="process") as session,
        Runtime(graph, temporal_plan(graph, cluster), session) as runtime,
    ):
        runtime.start()
        (answer,) = runtime.run(0, [Item((0,), 0)]).outputs
    assert answer.fields["omp_threads"] == (1 if one_thread else len(cluster.devices[0].cores))
