"""How good the policy is on problems that it was never trained on: greedily, and as it samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m2flow.apps.seeding import derived_seed
from m2flow.apps.tasks import Task
from m2flow.worker import WorkerGroup

__all__ = ["Evaluation"]


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    task: sets the problems and judges the answers.
    num_problems: held-out problems, or all there are.
    samples_per_problem: for the sampled accuracy, at `temperature`.
    seed: the run's. Every evaluation of a run draws with the same seeds.
    """

    task: Task
    num_problems: int
    samples_per_problem: int
    temperature: float
    seed: int

    def __call__(self, groups: Mapping[str, WorkerGroup], step: int) -> Mapping[str, float]:
        """Returns eval/greedy_accuracy and eval/sampled_accuracy of the weights that "rollout" has now. Blocks."""
        problems = [problem.fields() for problem in self.task.held_out(self.num_problems)]
        seed = derived_seed(self.seed, "evaluation")
        rollout = groups["rollout"].method("answer")
        greedy = rollout(problems, 1, 0.0, seed).result()
        sampled = rollout(problems, self.samples_per_problem, self.temperature, seed).result()
        return {
            "eval/greedy_accuracy": self._accuracy(problems, greedy),
            "eval/sampled_accuracy": self._accuracy(problems, sampled),
        }

    def _accuracy(self, problems: Sequence[Mapping[str, object]], by_rank: Sequence[Sequence[Sequence[str]]]) -> float:
        scores = [
            self.task.score(text, problem)
            for rank, answers in enumerate(by_rank)
            for problem, texts in zip(problems[rank :: len(by_rank)], answers, strict=True)
            for text in texts
        ]
        return sum(scores) / len(scores)
