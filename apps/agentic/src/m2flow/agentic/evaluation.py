"""How many held-out problems the model solves with its tools: greedily, and as it samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.agentic.recipe import calls_tool
from m2flow.apps.seeding import derived_seed
from m2flow.apps.tasks import Problem
from m2flow.worker import Item, WorkerGroup

__all__ = ["EVALUATED", "ToolEvaluation"]

EVALUATED = ("agent", "rollout", "tools")


@dataclass(frozen=True)
class ToolEvaluation:
    """Attributes:
    problems: the held-out problems.
    samples_per_problem: conversations about each for the sampled accuracy, at `temperature`.
    seed: the run's. Every evaluation of a run draws with the same seeds.
    """

    problems: Sequence[Problem]
    samples_per_problem: int
    temperature: float
    seed: int

    def __call__(self, groups: Mapping[str, WorkerGroup], step: int) -> Mapping[str, float]:
        """Returns eval/greedy_accuracy and eval/sampled_accuracy of the weights that "rollout" has now. Blocks."""
        greedy = self._converse(groups, num_samples=1, temperature=0.0)
        sampled = self._converse(groups, num_samples=self.samples_per_problem, temperature=self.temperature)
        return {"eval/greedy_accuracy": _accuracy(greedy), "eval/sampled_accuracy": _accuracy(sampled)}

    def _converse(self, groups: Mapping[str, WorkerGroup], *, num_samples: int, temperature: float) -> list[Item]:
        """The same steps as the macro flow's loop, by calls, all conversations together."""
        fields = [problem.fields() for problem in self.problems]
        seed = derived_seed(self.seed, "evaluation")
        waiting: list[Item] = groups["agent"].on(0).method("begin")(fields, num_samples, seed).result()[0]
        ended: list[Item] = []
        while waiting:
            heard = _dealt(groups["agent"], "read", _dealt(groups["rollout"], "turns", waiting, temperature))
            ended += [item for item in heard if not calls_tool(item)]
            calls = [item for item in heard if calls_tool(item)]
            waiting = _dealt(groups["agent"], "write", _dealt(groups["tools"], "results", calls))
        return ended


def _dealt(group: WorkerGroup, method: str, items: Sequence[Item], *arguments: Any) -> list[Item]:
    """What the ranks of a group make of items that are dealt to them, in the items' order."""
    size = group.world_size
    parts = [list(items[rank::size]) for rank in range(size)]
    made = group.method(method).scatter(parts, *([argument] * size for argument in arguments)).result()
    return sorted((item for part in made for item in part), key=lambda item: item.seq)


def _accuracy(ended: Sequence[Item]) -> float:
    return sum(float(item.fields["reward"]) for item in ended) / len(ended)
