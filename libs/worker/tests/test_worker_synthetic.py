import statistics
from collections.abc import Iterator

import pytest

from m2flow.worker import Cluster, Item, Session, launch_run
from m2flow.worker.testing import SyntheticConfig, SyntheticReward, SyntheticRollout, SyntheticTrainer, SyntheticWorker


@pytest.fixture
def session() -> Iterator[Session]:
    with launch_run(Cluster.virtual(4), launcher="inproc") as started:
        yield started


def items(count: int, iteration: int = 0) -> list[Item]:
    return [Item(seq=(number,), iteration=iteration) for number in range(count)]


def unplaced(config: SyntheticConfig, num_devices: int = 1) -> SyntheticWorker:
    worker = SyntheticWorker(config)
    worker.context = type("Context", (), {"devices": (None,) * num_devices})()  # type: ignore[assignment]
    return worker


def test_the_cost_model_by_hand() -> None:
    one = unplaced(SyntheticConfig(item_s=2.0))
    assert [finish for finish, _ in one.schedule(items(3))] == [2.0, 4.0, 6.0]
    two = unplaced(SyntheticConfig(item_s=2.0), num_devices=2)
    assert [finish for finish, _ in two.schedule(items(3))] == [2.0, 2.0, 4.0]
    poor = unplaced(SyntheticConfig(item_s=2.0, lanes=2, scaling=0.5), num_devices=4)
    assert [finish for finish, _ in poor.schedule(items(5))] == [2.0] * 4 + [4.0]


def test_long_tails_have_a_mean_of_one_and_depend_on_the_item_alone() -> None:
    worker = unplaced(SyntheticConfig(tail=1.0, seed=3))
    factors = [worker.factor(item) for item in items(4000)]
    assert statistics.fmean(factors) == pytest.approx(1.0, abs=0.1)
    assert max(factors) > 8 * statistics.median(factors)
    assert factors[7] == unplaced(SyntheticConfig(tail=1.0, seed=3, item_s=9.0)).factor(items(8)[7])
    assert factors[7] != unplaced(SyntheticConfig(tail=1.0, seed=4)).factor(items(8)[7])


def test_a_call_takes_its_time_and_emits_as_items_finish(session: Session) -> None:
    config = SyntheticConfig(item_s=0.02, fixed_s=0.05)
    group = session.start(SyntheticWorker.group(config, device_kind="virtual", devices_per_rank=2), "0-1")
    handle = group.work_through(items(4))
    (finished,) = handle.result(10)
    assert 0.09 <= handle.seconds() < 1.0
    assert [item.seq for item in finished] == [(0,), (1,), (2,), (3,)]
    assert [item.fields["worked"] for item in finished] == [1] * 4


def test_what_is_offloaded_does_not_work(session: Session) -> None:
    group = session.start(SyntheticWorker.group(SyntheticConfig(item_s=0.0), device_kind="virtual"), "0")
    group.offload().wait(5)
    with pytest.raises(Exception, match="offloaded: onload it first"):
        group.work_through(items(1)).wait(5)


def test_an_iteration_gives_the_same_whatever_the_batches(session: Session) -> None:
    config = SyntheticConfig(item_s=0.0, tail=0.5, samples=2, length=6)
    spec = [cls.group(config, device_kind="virtual") for cls in (SyntheticRollout, SyntheticReward)]
    rollout, reward = session.start_all([(own, str(place)) for place, own in enumerate(spec)])
    states = []
    for batches in ([items(4)], [items(4)[:1], items(4)[1:]]):
        trainer = session.start(SyntheticTrainer.group(config, device_kind="virtual"), "2")
        scored = []
        for batch in batches:
            (samples,) = rollout.work_through(batch).result(5)
            scored += reward.work_through(samples).result(5)[0]
        trainer.work_through(scored[::-1]).wait(5)
        states += trainer.totals().result(5)
        session.stop(trainer)
        assert all(sample.groups["prompt"].size == 2 for sample in scored)
    assert states[0] == states[1]
    assert states[0]["seen"] == 8
    assert states[0]["moved"] > 0


def test_a_drill_says_what_an_item_cost_beyond_its_time(session: Session) -> None:
    group = session.start(SyntheticWorker.group(SyntheticConfig(item_s=0.001), device_kind="virtual"), "0")
    (overhead_s,) = group.drill(20).result(10)
    assert 0 <= overhead_s < 0.5
