"""How a conversation reads, the calculator, and the problems."""

import inspect

import pytest

from m2flow.agentic import recipe
from m2flow.agentic.calculator import calculate
from m2flow.agentic.dialogue import Call, answer_of, call_of, error_words, preamble, result_line
from m2flow.agentic.expressions import ExpressionTask


def test_the_worked_examples_read_as_conversations_do() -> None:
    text = preamble(ExpressionTask(0).examples)
    assert text.startswith("Q: (3+4)*5\ncalc(3+4)\n7\ncalc(7*5)\n35\nA: 35\n\n")
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        for call, result in ((lines[1], lines[2]), (lines[3], lines[4])):
            found = call_of(call)
            assert found is not None
            assert calculate(found.argument) == result
        assert answer_of(lines[5]) == lines[4]


@pytest.mark.parametrize(
    ("turn", "want"),
    [
        ("calc(3+4)\n", Call("calc", "3+4")),
        ("search(a (b) c)\n", Call("search", "a (b) c")),
        ("calc()\n", Call("calc", "")),
        ("I say calc(3+4)\n", None),
        ("calc(3+4) or so\n", None),
        ("A: 35\n", None),
        ("", None),
    ],
)
def test_a_call_is_a_whole_line(turn: str, want: Call | None) -> None:
    assert call_of(turn) == want


@pytest.mark.parametrize(("turn", "want"), [("A: 35\n", "35"), ("A:-2", "-2"), ("A: 3 5\n", None), ("35\n", None)])
def test_an_answer_is_a_whole_line(turn: str, want: str | None) -> None:
    assert answer_of(turn) == want


def test_whatever_a_tool_says_is_one_line() -> None:
    assert result_line("a\nb\n\nc") == "a b c\n"
    words = error_words("RuntimeError: no\nsuch luck " + "x" * 1000)
    assert words.startswith("error: RuntimeError: no such luck x")
    assert len(words) < 80


@pytest.mark.parametrize(("expression", "want"), [("3+4", "7"), (" 12 * -3 ", "-36"), ("5-9", "-4")])
def test_the_calculator_does_one_operation(expression: str, want: str) -> None:
    assert calculate(expression) == want


@pytest.mark.parametrize(
    "expression", ["(3+4)*5", "3+4*5", "2**9", "7", "9/3", "", "__import__('os')", "1" * 40 + "*2"]
)
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match="two whole numbers"):
        calculate(expression)


def test_held_out_problems_are_never_trained_on_nor_shown() -> None:
    task = ExpressionTask(3)
    held = {problem.prompt for problem in task.held_out(10**6)}
    trained = {problem.prompt for step in range(200) for problem in task.training(step, 8)}
    changed_over = {f"({p[3]}+{p[1]}){p[5:]}" for p in held}
    shown = {example.question for example in task.examples}
    assert len(held) > 100
    assert len(trained) > 300
    assert not held & trained
    assert not changed_over & trained
    assert not shown & (held | trained)
    assert all(int(p.answer) == eval(p.prompt) for p in task.held_out(10**6))


def test_the_recipe_is_short() -> None:
    assert len(inspect.getsource(recipe).splitlines()) < 100
