"""Tokens in, tokens out: what is trained is what was sampled and fed, token for token."""

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from m2flow.agentic.agent import AgentWorker
from m2flow.agentic.conversation import said, told
from m2flow.agentic.recipe import calls_tool
from m2flow.apps.graded import PolicyLossConfig, graded_samples
from m2flow.apps.grading import grade
from m2flow.apps.policy_loss import PolicyLoss
from m2flow.apps.testing.tiny import save_tiny_language_model
from m2flow.worker import Item
from m2flow.worker.engines.trainer._packing import pack

pytestmark = [pytest.mark.medium, pytest.mark.timeout(60)]


def converse(agent, rollout, tools, inbox, problems) -> list[Item]:
    """The loop of the recipe by hand; conversations come back in another order each round."""
    waiting, ended = list(agent.open(problems)), []
    while waiting:
        heard = agent.read(list(rollout.speak(inbox(waiting))))
        ended += [item for item in heard if not calls_tool(item)]
        waiting = agent.write(tools.results([item for item in heard if calls_tool(item)]))
    return sorted(ended, key=lambda item: item.seq)


def problems(*numbers: tuple[int, int, int]) -> list[Item]:
    fields = [
        {"prompt": f"({a}+{b})*{c}", "answer": str((a + b) * c), "data": {"numbers": [a, b, c]}} for a, b, c in numbers
    ]
    return [Item((place,), 1, entry) for place, entry in enumerate(fields)]


def test_the_trained_sequence_is_what_was_sampled_and_fed(agent, rollout, tools, scripted, waiting) -> None:
    engine = scripted
    ended = converse(agent, rollout, tools(), waiting, problems((3, 5, 4), (2, 4, 3), (1, 7, 9)))
    assert [item.fields["reward"] for item in ended] == [1.0] * 3 + [0.0] * 6
    assert [item.fields["finish_reason"] for item in ended] == ["stop"] * 6 + ["length"] * 3
    for item in ended:
        fields = item.fields
        sequence = [*fields["prompt_ids"].tolist(), *fields["completion_ids"].tolist()]
        mine = [(fed, said) for fed, said in engine.fed if fed == sequence[: len(fed)]]
        assert len({len(fed) for fed, _ in mine}) == 3
        sampled = np.zeros(len(sequence), dtype=bool)
        logprobs = np.zeros(len(sequence), dtype=np.float32)
        for fed, turn in mine:  # every prompt of the engine is a beginning, every turn follows its prompt
            end = len(fed) + len(turn.token_ids)
            assert sequence[len(fed) : end] == turn.token_ids.tolist()
            sampled[len(fed) : end] = True
            logprobs[len(fed) : end] = turn.logprobs
        start = len(fields["prompt_ids"])
        assert not sampled[:start].any()
        assert np.array_equal(fields["loss_mask"], sampled[start:])
        assert np.array_equal(fields["logprobs"], logprobs[start:])
        fed_back = rollout._text(fields["completion_ids"][~fields["loss_mask"]])
        a, b, c = (int(digit) for digit in fields["prompt"] if digit.isdigit())
        assert fed_back == (f"{a + b}\n{(a + b) * c}\n" if c != 9 else f"{a + b}\n{a + b}\n")


def test_what_tools_say_is_in_neither_the_loss_nor_its_denominator(agent, rollout, tools, scripted, waiting) -> None:
    ended = converse(agent, rollout, tools(), waiting, problems((3, 5, 4)))
    group = grade(Item((0,), 1, members=tuple(ended)))
    for graded, item in zip(graded_samples(group), ended, strict=True):
        weight = PolicyLoss(PolicyLossConfig(), on_policy=True).weight(graded.sample)
        own = len("calc(3+5)\ncalc(8*4)\nA: 32\n")
        assert weight == own == item.fields["loss_mask"].sum()
        assert len(item.fields["completion_ids"]) == own + len("8\n32\n")


def test_conversations_about_a_problem_have_seeds_of_their_own_and_the_same_ones_again(agent) -> None:
    first, again = (list(agent.open(problems((3, 5, 4), (2, 4, 3)))) for _ in range(2))
    seeds = [item.fields["seed"] for item in first]
    assert len(set(seeds)) == 6
    assert seeds == [item.fields["seed"] for item in again]
    assert {len(item.fields["completion_ids"]) for item in first} == {0}
    (prompt_ids,) = {tuple(item.fields["prompt_ids"]) for item in first[:3]}
    assert agent._text(np.array(prompt_ids)).endswith("A: 56\n\nQ: (3+5)*4\n")


def test_what_is_counted(agent, rollout, tools, scripted, waiting) -> None:
    right, _, _, too_often, _, _ = converse(agent, rollout, tools(), waiting, problems((3, 5, 4), (1, 7, 9)))
    assert {name: count for name, count in right.fields["counts"].items() if count} == {
        "agent/turns": 3,
        "agent/answers": 1,
        "tool/calls": 2,
    }
    assert too_often.fields["counts"]["agent/answers"] == 0
    assert set(too_often.fields["counts"]) == set(right.fields["counts"])


def test_a_worked_example_is_the_conversation_that_solves_its_problem(agent, rollout, tools, scripted, waiting) -> None:
    teller = AgentWorker({**agent.config, "with_examples": True})
    teller.context = agent.context
    teller.setup()
    solved = converse(teller, rollout, tools(), waiting, problems((3, 5, 4)))[0].fields
    assert solved["reward"] == 1.0
    assert solved["example_ids"].tolist() == solved["completion_ids"].tolist()
    assert solved["example_mask"].tolist() == solved["loss_mask"].tolist()


def test_worked_examples_and_question_are_computed_once_for_each_microbatch(
    agent, rollout, tools, scripted, waiting
) -> None:
    ended = converse(agent, rollout, tools(), waiting, problems((3, 5, 4), (2, 4, 3)))
    samples = [
        graded.sample
        for n in (0, 3)
        for graded in graded_samples(grade(Item((n,), 1, members=tuple(ended[n : n + 3]))))
    ]
    (microbatch,) = pack(samples, 10_000)
    sequences = [(*sample.prompt_ids, *sample.completion_ids[:-1]) for sample in samples]
    assert len(microbatch.trie) == len(
        {sequence[:end] for sequence in sequences for end in range(1, 1 + len(sequence))}
    )
    shown = len(agent._preamble_ids)
    assert len(microbatch.trie) < shown + 2 * 60 < len(samples) * shown


def test_a_turn_that_new_weights_cut_says_which_tokens_each_version_drew(agent, rollout, waiting, tmp_path) -> None:
    """What was drawn before stays; the sample is as stale as its oldest token, whatever came in later turns."""
    newer = AutoModelForCausalLM.from_pretrained(save_tiny_language_model(tmp_path / "newer", seed=1))
    opened = list(agent.open(problems((3, 5, 4))))
    (whole, *_) = sorted(rollout.speak(waiting(opened)), key=lambda item: item.seq)
    steps = 0

    def safe_point() -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            rollout.load_weights(dict(newer.named_parameters()), 1)

    rollout.context.safe_point = safe_point
    (cut, *_) = sorted(rollout.speak(waiting(opened)), key=lambda item: item.seq)
    versions = cut.fields["turn_versions"].tolist()
    assert versions == [0] * 4 + [1] * (len(versions) - 4)
    assert len(versions) > 4
    assert cut.fields["turn_ids"][:4].tolist() == whole.fields["turn_ids"][:4].tolist()
    np.testing.assert_allclose(cut.fields["turn_logprobs"][:4], whole.fields["turn_logprobs"][:4], rtol=1e-5)
    assert abs(cut.fields["turn_logprobs"][4] - whole.fields["turn_logprobs"][4]) > 1e-3

    (again,) = rollout.speak(waiting([told(said(cut), [5, 6])]))
    conversation = said(again)
    later = again.fields["turn_versions"].tolist()
    assert set(later) == {1}
    assert conversation.fields["token_versions"].tolist() == [*versions, -1, -1, *later]
    group = Item((0,), 1, {"advantages": [0.5]}, members=(conversation,))
    assert [sample.staleness for sample in graded_samples(group)] == [1]
