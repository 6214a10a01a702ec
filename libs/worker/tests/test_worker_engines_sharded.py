"""The torch trainer cut over two ranks: the same run as on one, and to the bit the same state when it is re-placed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.worker import AgentAddress, Cluster, Session, WorkerFailed, WorkerGroup, launch_run
from m2flow.worker.engines.testing import reference_logprobs, save_tiny_model
from m2flow.worker.engines.trainer.testing import TrainerProbe
from m2flow.worker.testing.listening import addresses_that_others_reach, listening_sockets
from m2flow.worker.testing.served import served

pytestmark = [pytest.mark.medium, pytest.mark.timeout(120)]

SAMPLES = [[[5, 6, 7], [10, 11, 12]], [[5, 6, 7], [10, 13]], [[5, 6, 9], [20]]]
WEIGHT = 6.0


@pytest.fixture(scope="module")
def run() -> Iterator[Session]:
    """One run for all that need no other: torch is imported once."""
    cluster = Cluster.virtual(2)
    with launch_run(cluster, preload=["m2flow.worker.engines.trainer.testing"], on_log=lambda *_: None) as started:
        yield started


@pytest.fixture
def session(run: Session) -> Iterator[Session]:
    yield run
    for group in list(run.groups.values()):
        run.stop(group)


def started(session: Session, path: Path, placement: str, name: str = "trainer") -> WorkerGroup:
    config = {"path": str(path), "microbatch_tokens": 6}
    return session.start(TrainerProbe.group(config, name=name, device_kind="virtual"), placement)


def test_two_ranks_train_as_one_does_and_hand_over_to_the_bit(session: Session, tmp_path: Path) -> None:
    one = started(session, save_tiny_model(tmp_path / "start"), "0", "one")
    two = started(session, tmp_path / "start", "0-1", "two")
    for _ in range(2):
        alone, shared = one.train(SAMPLES, WEIGHT).result(60)[0], two.train(SAMPLES, WEIGHT).result(60)
        assert shared[0]["grad_norm"] == shared[1]["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert shared[0]["loss"] + shared[1]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    compare(one.state().result(60)[0], two.state().result(60)[0])
    # gloo listens for its peers, and on one machine nobody else can reach it.
    assert listening_sockets(two.pids[0])
    assert not addresses_that_others_reach([os.getpid(), *two.pids])
    half = one.resident_bytes().result(60)[0] / 2
    assert two.resident_bytes().result(60) == pytest.approx([half, half], rel=0.01)

    before = two.digests().result(60)
    assert before[0] == before[1]
    back = session.replace(two, "1")
    assert back.digests().result(60) == before[:1]
    again = session.replace(back, "0-1")
    assert again.digests().result(60) == before
    # It goes on as the one that was never moved.
    one.train(SAMPLES, WEIGHT).wait(60)
    again.train(SAMPLES, WEIGHT).wait(60)
    compare(one.state().result(60)[0], again.state().result(60)[0])


def compare(want: dict[str, Any], got: dict[str, Any]) -> None:
    """Two states that differ by rounding alone."""
    assert want.keys() == got.keys()
    assert int(want["steps"]) == int(got["steps"])
    for name, tensor in want.items():
        if name.startswith("first."):
            assert float((tensor - got[name]).abs().max()) < 1e-5, name
        elif name.startswith("param."):
            # A gradient of rounding size may take AdamW's first step in either direction: compare the bulk.
            assert float((tensor - got[name]).abs().median()) < 1e-6, name


def test_ranks_without_samples_keep_step_and_the_model_is_saved_whole(session: Session, tmp_path: Path) -> None:
    two = started(session, save_tiny_model(tmp_path / "start"), "0-1")
    want = [reference_logprobs(tmp_path / "start", *sample) for sample in SAMPLES]
    for values in two.logprobs(SAMPLES).result(60):
        for value, own in zip(values, want, strict=True):
            np.testing.assert_allclose(value, own, atol=2e-5)
    first, second = two.train(SAMPLES[:1], WEIGHT).result(60)
    assert first["grad_norm"] == second["grad_norm"] > 0
    assert "loss" not in second
    two.save(str(tmp_path / "end")).wait(60)
    values = two.logprobs(SAMPLES).result(60)[1]  # The step has reached what forward passes see.
    np.testing.assert_allclose(values[0], reference_logprobs(tmp_path / "end", *SAMPLES[0]), atol=2e-5)
    assert not np.allclose(values[0], want[0], atol=1e-3)


def test_a_whole_state_is_loaded_by_each_rank_in_part(session: Session, tmp_path: Path) -> None:
    one = started(session, save_tiny_model(tmp_path), "0", "one")
    two = started(session, tmp_path, "0-1", "two")
    one.train(SAMPLES, WEIGHT).wait(60)
    (state,) = one.state().result(60)
    two.restore({name: torch.as_tensor(tensor) for name, tensor in state.items()}).wait(60)
    assert two.digests().result(60) == one.digests().result(60) * 2


def test_ranks_of_two_machines_train_together(tmp_path: Path) -> None:
    """The other machine is this one, joined by address."""
    cluster = Cluster.virtual(1).with_resource("slot").with_resource("slot", node="far")
    target = "m2flow.worker.engines.trainer.testing:TrainerProbe"
    config = {"path": str(save_tiny_model(tmp_path)), "microbatch_tokens": 6}
    with served(target, "127.0.0.1:0", "t") as (_, address):
        agents = {"far": AgentAddress(address, "t")}
        with launch_run(cluster, agents=agents, on_log=lambda *_: None) as session:
            two = session.start(TrainerProbe.group(config, device_kind="slot"), "label=slot")
            first, second = two.train(SAMPLES, WEIGHT).result(60)
            assert first["grad_norm"] == second["grad_norm"] > 0
            digests = two.digests().result(60)
            assert digests[0] == digests[1]


def test_threads_are_no_ranks_of_a_mesh(tmp_path: Path) -> None:
    with launch_run(Cluster.virtual(2), on_log=lambda *_: None) as session:
        config = {"path": str(save_tiny_model(tmp_path)), "microbatch_tokens": 6}
        spec = TrainerProbe.group(config, device_kind="virtual", ranks_per_process=2)
        with pytest.raises(WorkerFailed, match="a sharded group needs a process per rank"):
            session.start(spec, "0-1")
