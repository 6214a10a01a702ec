"""A model that says what its problem tells it to: imported by name where the rollout runs."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from m2flow.apps.rollout import RolloutWorker
from m2flow.worker.engines.rollout import Completion, More, Prompt, SamplingParams


def solve(text: str) -> str:
    """The next turn after a text. Sums times 3 are solved wrongly, times 9 never; tools for 1+1 sleep, for 2+2 hang."""
    lines = text.rpartition("Q: ")[2].splitlines()
    inner, _, factor = lines[0].partition("*")
    slow = {"(1+1)": "obey(sleep 1)\n", "(2+2)": "obey(sleep 60)\n"}
    if factor == "9" or len(lines) == 1:
        return slow.get(inner, f"calc{inner}\n")
    if len(lines) == 3:
        return f"calc({lines[2]}*{factor})\n" if lines[2].isdigit() else "A: 0\n"
    return f"A: {lines[4] if factor != '3' else '0'}\n"


class ScriptedEngine:
    """Takes `seconds` a turn, one after the other; remembers what it was fed. Each logprob tells its token."""

    policy_version = 0

    def __init__(self, tokenizer: Any, *, seconds: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self.fed: list[tuple[list[int], Completion]] = []

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        more: More | None = None,
        safe_point: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Turns as they were told, the newest prompt's first."""
        waiting = deque(enumerate(prompts))
        num_seen = len(prompts)
        while True:
            fresh = list(more(1000)) if more else []
            waiting.extend(enumerate(fresh, num_seen))
            num_seen += len(fresh)
            if not waiting:
                return
            index, prompt = waiting.pop()
            time.sleep(self._seconds)
            ids = list(prompt.token_ids)
            said = self._tokenizer(solve(self._tokenizer.decode(ids)), add_special_tokens=False).input_ids
            token_ids = np.array(said, dtype=np.int32)
            versions = np.full(len(said), self.policy_version, dtype=np.int32)
            self.fed.append((ids, Completion(token_ids, -0.5 - token_ids.astype(np.float32), versions, "stop")))
            yield index, [self.fed[-1][1]]


class ScriptedRollout(RolloutWorker):
    """A rollout worker with such an engine; its weights are of no use."""

    def setup(self) -> None:
        """Replaces the engine."""
        super().setup()
        self._engine = ScriptedEngine(self._tokenizer, seconds=0.02)  # type: ignore[assignment]

    def load_weights(self, weights: Any, version: int) -> None:
        """Takes none."""
        self._engine.policy_version = version

    def resident_bytes(self) -> int:
        """Nothing."""
        return 0
