"""What a person sees while a run runs: one live line on a terminal, one plain line a step elsewhere."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

__all__ = ["Progress", "StepView"]


@dataclass(frozen=True)
class StepView:
    """What is shown of one step."""

    step: int
    reward: float
    rate: float
    unit: str
    seconds: float
    stage_s: Mapping[str, float]
    note: str = ""


class Progress:
    """Shows step, reward, throughput, seconds per stage and the time left. A context manager."""

    def __init__(self, num_steps: int, *, first_step: int = 1, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, emoji=False, soft_wrap=True)
        self._num_steps = num_steps
        self._views: deque[StepView] = deque(maxlen=8)
        self._next_step = first_step
        self._step_began = time.monotonic()
        self._doing = "starting"
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4)

    def say(self, text: str) -> None:
        """Prints lines that stay."""
        self._console.print(text, markup=False)

    def doing(self, what: str) -> None:
        """Names what is being waited for; shown on a terminal only."""
        self._doing = what
        self._step_began = time.monotonic()

    def step(self, view: StepView) -> None:
        """Shows a finished step."""
        self._views.append(view)
        self._next_step = view.step + 1
        self._step_began = time.monotonic()
        if not self._console.is_terminal:
            self.say(self._line(view))

    def seconds_left(self) -> float:
        """Returns the expected seconds until the last step ends, from the last five steps; 0 before the first."""
        if not self._views:
            return 0.0
        recent = [view.seconds for view in self._views][-5:]
        return sum(recent) / len(recent) * max(self._num_steps - self._next_step + 1, 0)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _line(self, view: StepView) -> str:
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in view.stage_s.items())
        parts = [
            f"step {view.step}/{self._num_steps}",
            f"reward {view.reward:.3f}",
            f"{view.rate:.0f} {view.unit}/s",
            f"{view.seconds:.2f} s ({stages})",
            f"left {_clock(self.seconds_left())}",
        ]
        return "  ".join(parts + ([view.note] if view.note else []))

    def _table(self) -> Table:
        stages = list(dict.fromkeys(name for view in self._views for name in view.stage_s))
        table = Table(title=self._title(), title_justify="left", expand=False)
        unit = next((view.unit for view in self._views), "items")
        for column in ("step", "reward", f"{unit}/s", "seconds", *stages):
            table.add_column(column, justify="right")
        for view in self._views:
            cells = [str(view.step), f"{view.reward:.3f}", f"{view.rate:.0f}", f"{view.seconds:.2f}"]
            cells += [f"{view.stage_s[name]:.2f}" if name in view.stage_s else "" for name in stages]
            table.add_row(*cells)
        return table

    def _title(self) -> str:
        waited = time.monotonic() - self._step_began
        step = min(self._next_step, self._num_steps)
        left = f"  left {_clock(self.seconds_left())}" if self._views else ""
        return f"step {step}/{self._num_steps}  {self._doing} {waited:.0f} s{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
