"""How good the policy is on problems that it was never trained on: greedily, and as it samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m2flow.apps.seeding import derived_seed
from m2flow.apps.tasks import Task
from m2flow.worker import WorkerGroup

__all__ = ["EVALUATED", "Evaluation"]

EVALUATED = ("rollout", "reward")


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    task: sets the problems.
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
        """Returns eval/greedy_accuracy and eval/sampled_accuracy of the weights that "rollout" has now. Blocks.

        They are means of what "reward" gives the answers.
        """
        problems = [problem.fields() for problem in self.task.held_out(self.num_problems)]
        seed = derived_seed(self.seed, "evaluation")
        rollout = groups["rollout"].method("answer")
        greedy = rollout(problems, 1, 0.0, seed).result()
        sampled = rollout(problems, self.samples_per_problem, self.temperature, seed).result()
        return {
            "eval/greedy_accuracy": _accuracy(groups["reward"], problems, greedy),
            "eval/sampled_accuracy": _accuracy(groups["reward"], problems, sampled),
        }


def _accuracy(
    reward: WorkerGroup, problems: Sequence[Mapping[str, object]], by_rank: Sequence[Sequence[Sequence[str]]]
) -> float:
    answered = [
        (text, problem)
        for rank, answers in enumerate(by_rank)
        for problem, texts in zip(problems[rank :: len(by_rank)], answers, strict=True)
        for text in texts
    ]
    texts, asked = zip(*answered, strict=True)
    scores: list[float] = reward.on(0).method("judge")(list(texts), list(asked)).result()[0]
    return sum(scores) / len(scores)
