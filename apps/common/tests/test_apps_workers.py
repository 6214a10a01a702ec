"""The workers that join engines and algorithms, in a plain loop: no flow, no process, a model of two layers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.apps.actor import ActorWorker
from m2flow.apps.evaluation import Evaluation
from m2flow.apps.grading import grade, grade_dr_grpo
from m2flow.apps.imitation import worked_example
from m2flow.apps.outcome import measure
from m2flow.apps.reward import RewardWorker
from m2flow.apps.rollout import RolloutWorker
from m2flow.apps.tasks import Task, make_task
from m2flow.apps.testing.tiny import save_tiny_language_model
from m2flow.worker import Item
from m2flow.worker.testing.reward_conformance import OBEDIENT

SAMPLES = 6
PROMPTS = ("1+2=", "1+3=", "4+4=", "7+1=")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_language_model(tmp_path_factory.mktemp("model"))


def started(worker: Any, *, rank: int = 0, world_size: int = 1) -> Any:
    nothing = {name: lambda: None for name in ("safe_point", "compute_in_one_thread")}
    worker.context = SimpleNamespace(rank=rank, world_size=world_size, **nothing)
    worker.setup()
    return worker


def rollout(model: Path, **settings: Any) -> RolloutWorker:
    config = {"model": str(model), "samples_per_prompt": SAMPLES, "max_new_tokens": 4, "seed": 5, **settings}
    return started(RolloutWorker(config))


def actor(model: Path, **settings: Any) -> ActorWorker:
    return started(ActorWorker({"model": str(model), "groups_per_minibatch": 4, "lr": 3e-3, **settings}))


def prompts(iteration: int = 1) -> list[Item]:
    fields = [{"prompt": prompt, "answer": "3", "chat": False} for prompt in PROMPTS]
    return [Item((place,), iteration, entry) for place, entry in enumerate(fields)]


def graded(samples: list[Item], judge: Any) -> list[Item]:
    """Gathers by hand what the flow gathers, and grades it."""
    groups: dict[tuple[int, ...], list[Item]] = {}
    for sample in sorted(samples, key=lambda item: item.seq):
        groups.setdefault(sample.seq[:-1], []).append(sample.with_fields(reward=judge(sample)))
    return [grade(Item(seq, members[0].iteration, members=tuple(members))) for seq, members in sorted(groups.items())]


def odd(sample: Item) -> float:
    """1 if the first token's number is odd."""
    return float(sample.fields["completion_ids"][0] % 2)


def test_a_plain_loop_learns(model: Path) -> None:
    sampler, learner = rollout(model), actor(model)
    rewards = []
    for iteration in range(1, 16):
        groups = graded(list(sampler.generate(prompts(iteration))), odd)
        outcome = measure(learner.train(groups))
        sampler.load_weights(learner.named_weights(), iteration)
        rewards.append(outcome.metrics["critic/score/mean"])
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    assert {version for row in outcome.samples for version, _ in row["policy_versions"]} == {14}


def test_samples_carry_what_training_needs(model: Path) -> None:
    samples = list(rollout(model).generate(prompts()))
    assert len(samples) == len(PROMPTS) * SAMPLES
    for sample in samples:
        fields = sample.fields
        assert sample.groups["prompt"].size == SAMPLES
        assert fields["prompt_ids"].dtype == fields["completion_ids"].dtype == np.int32
        assert len(fields["logprobs"]) == len(fields["completion_ids"]) <= 4
        assert fields["token_versions"].tolist() == [0] * len(fields["completion_ids"])


def test_samples_do_not_depend_on_how_prompts_are_dealt(model: Path) -> None:
    together = {item.seq: item.fields["completion"] for item in rollout(model).generate(prompts())}
    alone = {
        item.seq: item.fields["completion"] for prompt in prompts()[::-1] for item in rollout(model).generate([prompt])
    }
    other_seed = {item.seq: item.fields["completion"] for item in rollout(model, seed=6).generate(prompts())}
    other_step = {item.seq: item.fields["completion"] for item in rollout(model).generate(prompts(2))}
    assert together == alone
    assert together != other_seed
    assert together != other_step


def test_a_stop_of_several_characters_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="want single characters"):
        rollout(model, stop=("ab",))


def gradient(learner: ActorWorker) -> torch.Tensor:
    """The averaged gradient after one step, all parameters in a row."""
    state = learner.shards()
    return torch.cat([state[name].flatten() for name in sorted(state) if name.startswith("first.")])


def test_every_way_to_deal_groups_gives_the_same_update(model: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts())), odd)
    whole, parts, small = actor(model), actor(model), actor(model, microbatch_tokens=8)
    whole.train(groups)
    small.train(groups)
    for group in groups[::-1]:
        parts.train([group])
    want = gradient(whole)
    for other in (parts, small):
        assert float((gradient(other) - want).norm()) < 1e-5 * float(want.norm())


def test_a_deterministic_actor_does_not_see_how_groups_arrive(model: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts())), odd)
    whole, parts = actor(model, deterministic=True), actor(model, deterministic=True)
    receipts = whole.train(groups)
    last = [parts.train([group])[0] for group in groups[::-1]][-1]
    assert torch.equal(gradient(parts), gradient(whole))
    assert last.fields["metrics"] == receipts[-1].fields["metrics"]


@pytest.mark.parametrize(
    ("correction", "gap", "weight", "cut"),
    [("tis", 0.1, 1.10517, 0.0), ("tis", 1.0, 2.0, 1.0), ("mis", 1.0, 0.0, 1.0), ("icepop", 0.1, 1.10517, 0.0)],
)
def test_samples_of_other_weights_are_corrected_and_counted(
    model: Path, correction: str, gap: float, weight: float, cut: float
) -> None:
    """Tokens that the sampler found less likely than the actor does, by a factor of exp(gap)."""
    groups = graded(list(rollout(model).generate(prompts())), odd)
    plain = measure(actor(model).train(groups)).metrics
    stale = [
        replace(
            group, members=tuple(m.with_fields(logprobs=m.fields["logprobs"] - np.float32(gap)) for m in group.members)
        )
        for group in groups
    ]
    metrics = measure(actor(model, correction=correction).train(stale)).metrics
    assert metrics["rollout_corr/weight"] == pytest.approx(weight, abs=1e-4)
    assert metrics["rollout_corr/cut"] == cut
    assert metrics["actor/grad_norm"] == pytest.approx(weight * plain["actor/grad_norm"], rel=1e-3)


def test_samples_that_are_too_stale_do_not_teach_and_are_counted(model: Path) -> None:
    """Of a third, the first token was drawn with weights of one update before."""
    sampler = rollout(model)
    sampler.load_weights(actor(model).named_weights(), 3)
    groups = graded(list(sampler.generate(prompts(4))), odd)
    old = [
        replace(group, members=tuple(began_earlier(m) if n % 3 == 0 else m for n, m in enumerate(group.members)))
        for group in groups
    ]
    young = [
        replace(
            group.with_fields(advantages=np.delete(group.fields["advantages"], [0, 3])),
            members=tuple(m for n, m in enumerate(group.members) if n % 3),
        )
        for group in groups
    ]
    limited, lenient = actor(model, max_staleness=1), actor(model, max_staleness=2)
    without, whole = actor(model), actor(model)
    outcome = measure(limited.train(old))
    metrics = outcome.metrics
    without.train(young)
    assert torch.equal(gradient(limited), gradient(without))
    assert metrics["staleness/dropped"] == len(PROMPTS) * SAMPLES / 3
    assert f"{metrics['staleness/dropped']:.0f} of {len(PROMPTS) * SAMPLES} samples were staler" in outcome.warning
    assert metrics["staleness/max"] == 2
    assert measure(lenient.train(old)).metrics["staleness/dropped"] == 0
    whole.train(groups)
    assert torch.equal(gradient(lenient), gradient(whole))
    assert not torch.equal(gradient(limited), gradient(whole))


def test_where_all_samples_are_too_stale_nothing_is_learned(model: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts(4))), odd)
    learner = actor(model, max_staleness=3)
    metrics = measure(learner.train(groups)).metrics
    assert metrics["staleness/dropped"] == len(PROMPTS) * SAMPLES
    assert int(learner.shards()["steps"]) == 0


def began_earlier(sample: Item) -> Item:
    """The sample, its first token drawn with weights of one update before."""
    versions = sample.fields["token_versions"].copy()
    versions[0] -= 1
    return sample.with_fields(token_versions=versions)


def test_the_optimiser_steps_at_minibatch_boundaries(model: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts())), odd)
    learner = actor(model, groups_per_minibatch=2, steps_per_iteration=2)
    receipts = learner.train(groups)
    assert [bool(receipt.fields["metrics"]) for receipt in receipts] == [False, True, False, True]
    assert int(learner.shards()["steps"]) == 2


def test_a_lost_group_does_not_hold_the_step_up(model: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts())), odd)
    learner = actor(model, groups_per_minibatch=2, steps_per_iteration=2)
    learner.train([groups[0], groups[2]])
    assert int(learner.shards()["steps"]) == 1
    learner.named_weights()
    assert int(learner.shards()["steps"]) == 2


def test_a_second_epoch_steps_again(model: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts())), odd)
    learner = actor(model, steps_per_iteration=2)
    first = measure(learner.train(groups)).metrics
    second = measure(learner.train(groups)).metrics
    assert int(learner.shards()["steps"]) == 2
    assert abs(first["actor/ppo_kl"]) < 1e-5
    assert abs(second["actor/ppo_kl"]) > 1e-5


def test_old_logprobs_of_a_stage_are_used(model: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts())), odd)
    learner = actor(model, steps_per_iteration=2)
    computed = list(learner.logprobs(groups))
    for group in computed:
        for member in group.members:
            np.testing.assert_allclose(member.fields["old_logprobs"], member.fields["logprobs"], atol=1e-4)
    shifted = [
        replace(
            group,
            members=tuple(
                m.with_fields(old_logprobs=m.fields["old_logprobs"] + np.float32(0.1)) for m in group.members
            ),
        )
        for group in computed
    ]
    metrics = measure(learner.train(shifted)).metrics
    assert metrics["actor/ppo_kl"] == pytest.approx(0.1, abs=1e-3)
    assert metrics["rollout_corr/abs_gap"] < 1e-4


def test_groups_of_equal_rewards_teach_nothing_and_are_counted(model: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts())), lambda sample: 1.0)
    learner = actor(model)
    before = {name: tensor.clone() for name, tensor in learner.named_weights().items()}
    receipts = learner.train(groups)
    metrics = measure(receipts).metrics
    assert metrics["groups/all_equal"] == metrics["groups/count"] == 4
    assert [receipt.fields["worked_tokens"] for receipt in receipts] == [0] * 4
    assert metrics["actor/grad_norm"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.named_weights().items())


EXAMPLE = {"example_ids": np.array([5, 6, 7, 8], dtype=np.int32), "example_mask": np.array([1, 0, 1, 1], dtype=bool)}


def with_examples(groups: list[Item]) -> list[Item]:
    return [
        replace(group, members=tuple(member.with_fields(**EXAMPLE) for member in group.members)) for group in groups
    ]


def test_the_supervised_stage_makes_examples_likelier_and_ends_by_sampled_success(model: Path, tmp_path: Path) -> None:
    samples = list(rollout(model).generate(prompts()))
    failed, well = (with_examples(graded(samples, lambda sample, won=won: won)) for won in (0.0, 1.0))
    learner = actor(model, imitate_until=0.5, imitate_max_steps=9)
    first = learner._learner.engine.logprobs([worked_example(group) for group in failed])
    outcomes = [measure(learner.train(failed)) for _ in range(3)]
    learner.save_checkpoint(str(tmp_path))
    resumed = actor(model, imitate_until=0.5, imitate_max_steps=9, resume=str(tmp_path))
    receipts = resumed.train(well)  # the step that finds out that it was enough is the last
    assert [receipt.fields["worked_tokens"] for receipt in receipts] == [len(EXAMPLE["example_ids"])] * 4
    outcomes.append(measure(receipts))
    after = measure(resumed.train(graded(samples, odd)))
    losses = [outcome.metrics["supervised/nll"] for outcome in outcomes]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(-np.stack(first)[:, EXAMPLE["example_mask"]].mean(), abs=1e-4)
    assert [outcome.metrics["supervised/success"] for outcome in outcomes] == [0, 0, 0, 1]
    assert not any(outcome.warning for outcome in outcomes)
    assert "supervised/nll" not in after.metrics
    assert after.metrics["actor/grad_norm"] > 0


def test_a_supervised_stage_that_does_not_succeed_fails_the_run(model: Path) -> None:
    learner = actor(model, imitate_until=0.5, imitate_max_steps=2)
    groups = with_examples(graded(list(rollout(model).generate(prompts())), lambda sample: 0.0))
    learner.train(groups)
    with pytest.raises(ValueError, match=r"got a sampled success of 0.000 after 2 steps, want 0.5: .*supervised.until"):
        learner.train(groups)


def test_a_checkpoint_goes_on_to_the_bit(model: Path, tmp_path: Path) -> None:
    groups = graded(list(rollout(model).generate(prompts())), odd)
    learner = actor(model)
    learner.train(groups)
    learner.save_checkpoint(str(tmp_path))
    resumed = actor(model, resume=str(tmp_path))
    learner.train(groups)
    resumed.train(groups)
    left, right = learner.shards(), resumed.shards()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert list(rollout(tmp_path).generate(prompts()))


def judging(task: Task) -> Any:
    """A group of one rank, whose only method judges by a task."""

    def judge(texts: list[str], problems: list[dict[str, Any]]) -> Any:
        scores = [task.score(text, problem) for text, problem in zip(texts, problems, strict=True)]
        return SimpleNamespace(result=lambda: [scores])

    group = SimpleNamespace(method={"judge": judge}.__getitem__)
    group.on = lambda rank: group
    return group


def test_evaluation_judges_every_problem_once(model: Path) -> None:
    ranks = [started(RolloutWorker(rollout(model).config), rank=rank, world_size=2) for rank in range(2)]
    task = make_task("one_digit_sums", {}, seed=0)

    def method(name: str) -> Any:
        return lambda *args: SimpleNamespace(result=lambda: [getattr(rank, name)(*args) for rank in ranks])

    metrics = Evaluation(task, num_problems=7, samples_per_problem=3, temperature=1.0, seed=0)(
        {"rollout": SimpleNamespace(method=method), "reward": judging(task)}, 0
    )
    problems = [problem.fields() for problem in task.held_out(7)]
    answers = started(RolloutWorker(rollout(model).config)).answer(problems, 1, 0.0, 0)
    want = np.mean([task.score(texts[0], problem) for texts, problem in zip(answers, problems, strict=True)])
    assert metrics["eval/greedy_accuracy"] == pytest.approx(want)
    assert 0 <= metrics["eval/sampled_accuracy"] <= 1


def test_rewards_are_the_tasks() -> None:
    worker = started(RewardWorker({"task": "two_digit_sums", "task_options": {}, "seed": 0}))
    items = completed("15\n", "16\n")
    assert [item.fields["reward"] for item in worker.score(items)] == [1.0, 0.0]
    assert worker.judge(["15", "1"], [item.fields for item in items]) == [1.0, 0.0]


def completed(*completions: str) -> list[Item]:
    fields = {"prompt": "12+3=", "answer": "15"}
    return [Item((0, n), 1, {**fields, "completion": text}) for n, text in enumerate(completions)]


@pytest.mark.medium
@pytest.mark.parametrize(("on_failure", "rewards"), [("score", [4.0, 0.0, 0.0]), ("skip", [4.0, None, None])])
def test_rewards_are_a_functions(
    on_failure: str, rewards: list[float | None], capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"task": "", "task_options": {}, "seed": 0, "function": OBEDIENT, "timeout_s": 0.5}
    worker = started(RewardWorker({**config, "on_failure": on_failure}))
    items = list(worker.score(completed("four", "raise", "sleep 60")))
    assert [item.fields.get("reward") for item in items] == rewards
    counts = ["reward/scored", "reward/errors", "reward/timeouts"]
    if on_failure == "skip":
        assert [item.tombstone for item in items] == ["", *counts[1:]]
    else:
        assert [item.fields["counts"] for item in items] == [{name: 1} for name in counts]
    assert items[0].fields["reward_parts"] == {"format": 1.0}
    assert capsys.readouterr().out.count("the reward function failed: ValueError: no answer in the completion") == 1
    assert worker.judge(["seven77", "raise"], [item.fields for item in completed("", "")]) == [7.0, 0.0]
    worker.close()


def test_grading_compares_within_the_group() -> None:
    members = tuple(Item((0, n), 1, {"reward": reward}) for n, reward in enumerate([1.0, 0.0, 0.0, 1.0]))
    group = Item((0,), 1, members=members)
    np.testing.assert_allclose(grade(group).fields["advantages"], [0.866024, -0.866024, -0.866024, 0.866024], atol=1e-5)
    np.testing.assert_allclose(grade_dr_grpo(group).fields["advantages"], [0.5, -0.5, -0.5, 0.5])
    assert grade(group).fields["rewards"].tolist() == [1.0, 0.0, 0.0, 1.0]
