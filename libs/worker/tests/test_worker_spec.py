import subprocess
import sys

import pytest

from m2flow.worker import Inbox, Item, Worker, pulls, resolve_target, stage, target_of
from m2flow.worker.testing import Probe, RetryProbe


def test_a_specification_says_what_the_class_is() -> None:
    spec = RetryProbe.group({"size": 3}, devices_per_rank=None)
    assert spec.name == "retry_probe"
    assert spec.target == "m2flow.worker.testing.probe:RetryProbe"
    assert (spec.on_death, spec.in_step, spec.can_offload, spec.devices_per_rank) == ("retry", False, False, None)
    assert "echo" in spec.methods
    assert "setup" not in spec.methods


def test_ranks_in_step_do_not_pull_each_for_itself() -> None:
    @stage
    def train(self: Worker, inbox: Inbox) -> list[Item]:
        return inbox.take(1)

    trainer = type("Trainer", (Worker,), {"train": train, "in_step": True})
    with pytest.raises(ValueError, match=r"Trainer\.train takes an inbox, and its ranks move in step"):
        trainer.group()  # type: ignore[attr-defined]
    assert pulls(trainer.train)  # type: ignore[attr-defined]
    assert not pulls(Probe.echo)


def test_a_name_in_snake_case_without_worker() -> None:
    spec = type("RolloutWorker", (Probe,), {"__module__": Probe.__module__, "__qualname__": "RolloutWorker"})
    assert spec.group().name == "rollout"  # type: ignore[attr-defined]


def test_what_cannot_be_shipped_by_name_is_refused() -> None:
    class Local(Worker):
        pass

    with pytest.raises(ValueError, match="want a name at the top of an importable module"):
        Local.group()
    assert resolve_target(target_of(Probe)) is Probe
    with pytest.raises(ValueError, match="module:qualname"):
        resolve_target("m2flow.worker")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "Actor 1"}, "small letters"),
        ({"devices_per_rank": 0}, "want at least 1"),
        ({"min_devices": 3, "max_devices": 2}, "1 <= min <= max"),
    ],
)
def test_numbers_and_names_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Probe.group(**arguments)  # type: ignore[arg-type]


@pytest.mark.medium
def test_the_facade_imports_nothing_heavy() -> None:
    code = (
        "import sys, m2flow.worker, m2flow.worker.testing;"
        "print([m for m in ('torch', 'ray', 'grpc', 'transformers') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
