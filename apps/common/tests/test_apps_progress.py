"""Progress: what is shown with and without a terminal."""

import io

import pytest
from rich.console import Console

from m2flow.apps.progress import Progress, StepView


def _view(step: int, seconds: float = 5.0) -> StepView:
    stages = {"rollout.generate": 2.0, "actor.train": 3.0}
    return StepView(step=step, reward=0.4, rate=300.0, unit="tokens", seconds=seconds, stage_s=stages)


def test_one_plain_line_a_step_without_a_terminal() -> None:
    out = io.StringIO()
    with Progress(30, console=Console(file=out, force_terminal=False, width=300)) as progress:
        progress.say("plan: [temporal]")
        progress.step(_view(1))
    assert out.getvalue().splitlines() == [
        "plan: [temporal]",
        "step 1/30  reward 0.400  300 tokens/s  5.00 s (rollout.generate 2.00 s, actor.train 3.00 s)  left 2:25",
    ]


def test_a_table_on_a_terminal() -> None:
    out = io.StringIO()
    with Progress(30, console=Console(file=out, force_terminal=True, width=120, color_system=None)) as progress:
        progress.step(_view(1))
        progress.doing("training")
    text = out.getvalue()
    assert all(word in text for word in ("step 2/30", "reward", "tokens/s", "actor.train", "0.400", "left 2:25"))


def test_time_left_follows_the_last_five_steps() -> None:
    progress = Progress(20, console=Console(file=io.StringIO()))
    assert progress.seconds_left() == 0.0
    for step in range(1, 11):
        progress.step(_view(step, seconds=100.0 if step <= 5 else 2.0))
    assert progress.seconds_left() == pytest.approx(20.0)
