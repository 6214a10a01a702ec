"""A scripted model in place of a real one, and workers without a flow."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow.agentic.agent import AgentWorker
from m2flow.agentic.tools import ToolWorker
from m2flow.apps.rollout import RolloutWorker
from m2flow.apps.testing.tiny import save_tiny_language_model
from m2flow.worker import Item

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # worker and tool processes import this folder's modules by it
SAMPLES = 3


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_language_model(tmp_path_factory.mktemp("model"))


def started(worker: Any) -> Any:
    worker.context = SimpleNamespace(rank=0, world_size=1, safe_point=lambda: None)
    worker.setup()
    return worker


@pytest.fixture
def agent(model: Path) -> AgentWorker:
    return started(AgentWorker({"model": str(model), "samples_per_prompt": SAMPLES, "max_turns": 3, "seed": 7}))


@pytest.fixture
def rollout(model: Path) -> RolloutWorker:
    config = {"model": str(model), "samples_per_prompt": 1, "max_new_tokens": 16, "stop": ["\n"], "seed": 7}
    return started(RolloutWorker(config))


@pytest.fixture
def tools() -> Iterator[Callable[..., ToolWorker]]:
    """Makes tool workers whose tools are `calc`, and `obey` of this folder."""
    made: list[ToolWorker] = []

    def make(**settings: Any) -> ToolWorker:
        targets = {"calc": "m2flow.agentic.calculator:calculate", "obey": "tools_that_misbehave:obey"}
        defaults = {"num_processes": 2, "timeout_s": 1.0, "max_result_characters": 64}
        made.append(started(ToolWorker({"targets": targets, **defaults, **settings})))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


class Waiting:
    """An inbox that all items are in from the start."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = list(items)

    def take(self, most: int) -> list[Item]:
        """Up to `most` of them."""
        taken, self._items = self._items[:most], self._items[most:]
        return taken


@pytest.fixture
def waiting() -> Callable[[Sequence[Item]], Waiting]:
    return Waiting


@pytest.fixture
def scripted(rollout: RolloutWorker) -> Any:
    """The scripted engine that the rollout worker has."""
    from scripted import ScriptedEngine

    rollout._engine = ScriptedEngine(rollout._tokenizer)  # type: ignore[assignment]
    return rollout._engine
