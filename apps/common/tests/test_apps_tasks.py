"""Problems are disjoint from what is held out, the same for the same seed, and judged exactly."""

import json
import os
from pathlib import Path

import pytest

from m2flow.apps.seeding import derived_seed
from m2flow.apps.tasks import make_task, task_problems

SUMS = ["one_digit_sums", "two_digit_sums", "two_digit_pairs"]


def numbers(prompt: str) -> frozenset[str]:
    """The unordered pair that a prompt asks for."""
    return frozenset(prompt.splitlines()[-1].rstrip("=").split("+"))


@pytest.mark.parametrize("name", SUMS)
def test_training_never_draws_what_is_held_out_or_shown(name: str) -> None:
    task = make_task(name, {}, seed=3)
    held_out = {numbers(problem.prompt) for problem in task.held_out(100)}
    drawn = {numbers(problem.prompt) for step in range(1, 200) for problem in task.training(step, 16)}
    shown = {numbers(line.partition("=")[0] + "=") for line in task.training(1, 1)[0].prompt.splitlines()[:2]}
    assert len(held_out) >= 10
    assert not drawn & held_out
    assert not shown & (drawn | held_out)


def test_the_held_out_problems_are_different_ones() -> None:
    problems = make_task("two_digit_sums", {}, seed=0).held_out(100)
    assert len({problem.prompt for problem in problems}) == 100


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    one, other = (make_task("two_digit_sums", {}, seed=5) for _ in range(2))
    other.training(1, 8)
    assert one.training(2, 8) == other.training(2, 8)
    assert one.training(2, 8) != one.training(3, 8)
    assert one.training(2, 8) != make_task("two_digit_sums", {}, seed=6).training(2, 8)


def test_a_prompt_ends_where_the_answer_begins() -> None:
    problem = make_task("two_digit_sums", {}, seed=0).training(1, 1)[0]
    *examples, question = problem.prompt.split("\n")
    assert examples == ["12+3=15", "41+7=48"]
    left, _, right = question.removesuffix("=").partition("+")
    assert int(left) + int(right) == int(problem.answer)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("15\n", 1.0), ("15", 1.0), ("15 and", 1.0), ("151", 0.0), (" 15", 0.0), ("", 0.0), ("=15", 0.0), ("1", 0.0)],
)
def test_sums_are_judged_by_the_number_at_the_start(completion: str, reward: float) -> None:
    assert make_task("two_digit_sums", {}, seed=0).score(completion, {"answer": "15"}) == reward


def test_a_task_that_is_not_there_names_the_nearest() -> None:
    (problem,) = task_problems("two_digit_sum", {})
    assert "did you mean 'two_digit_sums'" in problem
    (problem,) = task_problems("two_digit_sums", {"digits": 2})
    assert "digits" in problem
    with pytest.raises(ValueError, match="want one of"):
        make_task("nothing", {}, seed=0)


def test_reasoning_gym_problems_by_name() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra gym of m2flow-reasoning")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    task = make_task("gym/chain_sum", options, seed=1)
    problems = task.training(1, 6)
    held_out = {problem.prompt for problem in task.held_out(50)}
    assert len(problems) == 6
    assert len(held_out) == 50
    assert not held_out & {problem.prompt for problem in problems}
    assert all(problem.chat for problem in problems)
    assert problems == make_task("gym/chain_sum", options, seed=1).training(1, 6)
    fields = problems[0].fields()
    assert task.score(f" {problems[0].answer}\n", fields) == 1.0
    assert task.score("no idea", fields) < 1.0


def test_reasoning_gym_refuses_what_it_does_not_have() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra gym of m2flow-reasoning")
    (problem,) = task_problems("gym/no_such_generator", {})
    assert "no_such_generator" in problem
    (problem,) = task_problems("gym/chain_sum", {"no_such_setting": 1})
    assert "no_such_setting" in problem


def write_lines(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return f"file/{path}"


def test_problems_of_a_file_are_parted_and_judged_by_their_answers(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": n + 1, "hard": n > 5}) for n in range(12)]
    name = write_lines(tmp_path / "sums.jsonl", *lines, lines[3], "")
    assert task_problems(name, {}) == []
    task = make_task(name, {}, seed=0)
    held_out = {problem.prompt for problem in task.held_out(99)}
    drawn = {problem.prompt for step in range(40) for problem in task.training(step, 4)}
    assert (len(held_out), len(drawn)) == (3, 9)
    assert not held_out & drawn
    (problem,) = task.training(1, 1)
    assert problem.data == {"hard": int(problem.answer) > 6}
    assert task.score(f" {problem.answer}\n", problem.fields()) == 1.0
    assert task.score("none", problem.fields()) == 0.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line.jsonl:2: got '{', want a JSON object"),
        ("[1]", "want an object with a text under 'prompt'"),
        ('{"answer": 1}', "want an object with a text under 'prompt'"),
        ('{"prompt": "a", "answer": [1]}', r"got answer [1] and chat False, want a text or a number"),
        ('{"prompt": "a", "chat": 1}', "and chat 1, want"),
        pytest.param('{"prompt": "a", "deep": ' + "[" * 200 + "]" * 200 + "}", "nested deeper", id="deep"),
        pytest.param('{"prompt": "a", "deep": ' + "[" * 9999 + "]" * 9999 + "}", "recursion", id="deeper"),
        pytest.param('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "line.jsonl:2: got", id="number"),
        ('{"prompt": "a"}', "got 2 problems, want at least 4"),
    ],
)
def test_a_file_that_is_wrong_is_answered_with_the_line(tmp_path: Path, line: str, says: str) -> None:
    (problem,) = task_problems(write_lines(tmp_path / "line.jsonl", '{"prompt": "b", "answer": "2"}', line), {})
    assert says in problem


def test_files_of_other_editors_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{n}\u2028\x85+1=", "answer": n + 1}, ensure_ascii=False) for n in range(4)]
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert task_problems(f"file/{path}", {}) == []


def test_what_cannot_be_read_as_a_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        (problem,) = task_problems(f"file/{path}", {})
        assert "it is no regular file" in problem
    (problem,) = task_problems("file/~nobody-of-that-name/sums.jsonl", {})
    assert "want a file of JSON lines" in problem


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    (problem,) = task_problems(f"file/{tmp_path}/none.jsonl", {})
    assert "want a file of JSON lines" in problem
    (problem,) = task_problems(f"file/{tmp_path}/none.jsonl", {"digits": 2})
    assert "want none for" in problem


def test_derived_seeds_differ_by_every_part() -> None:
    seeds = {
        derived_seed(*parts) for parts in ((0,), (1,), (0, 1), (0, "1"), (0, 1, 2), (0, 12), (0, "a", "b"), (0, "ab"))
    }
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derived_seed(7, "sample", 3) == derived_seed(7, "sample", 3)
