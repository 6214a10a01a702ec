"""A scripted model in place of a real one, and workers without a flow."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from m2flow.agentic.agent import AgentWorker
from m2flow.agentic.tools import ToolWorker
from m2flow.apps.rollout import RolloutWorker
from m2flow.apps.testing.tiny import save_tiny_language_model
from m2flow.worker.engines.rollout import Completion, Prompt, SamplingParams

HERE = Path(__file__).parent
SAMPLES = 3


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_language_model(tmp_path_factory.mktemp("model"))


def started(worker: Any) -> Any:
    worker.context = SimpleNamespace(rank=0, world_size=1)
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
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ToolWorker]]:
    """Makes tool workers whose tools are `calc`, and `obey` of this folder."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(HERE), *sys.path]))
    made: list[ToolWorker] = []

    def make(**settings: Any) -> ToolWorker:
        targets = {"calc": "m2flow.agentic.calculator:calculate", "obey": "tools_that_misbehave:obey"}
        defaults = {"num_processes": 2, "timeout_s": 1.0, "max_result_characters": 64}
        made.append(started(ToolWorker({"targets": targets, **defaults, **settings})))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


class ScriptedEngine:
    """Says what it is told, in the order of the prompts' seeds seen first; remembers every prompt that it was fed.

    `says(text so far) -> next turn`.
    """

    policy_version = 0

    def __init__(self, tokenizer: Any, says: Callable[[str], str]) -> None:
        self._tokenizer = tokenizer
        self._says = says
        self.fed: list[tuple[list[int], Completion]] = []

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
        """Turns as they were told, the last prompt's first; each logprob tells its token."""
        for index in reversed(range(len(prompts))):
            ids = list(prompts[index].token_ids)
            said = self._tokenizer(self._says(self._tokenizer.decode(ids)), add_special_tokens=False).input_ids
            token_ids = np.array(said, dtype=np.int32)
            completion = Completion(token_ids, -0.5 - token_ids.astype(np.float32), "stop")
            self.fed.append((ids, completion))
            yield index, [completion]


@pytest.fixture
def scripted(rollout: RolloutWorker) -> Callable[[Callable[[str], str]], ScriptedEngine]:
    """Puts a scripted engine into the rollout worker."""

    def put(says: Callable[[str], str]) -> ScriptedEngine:
        engine = ScriptedEngine(rollout._tokenizer, says)
        rollout._engine = engine  # type: ignore[assignment]
        return engine

    return put
