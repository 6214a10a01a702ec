"""An app whose workers sleep and add: every part of the driver runs for real, with no model and no device.

`python -m m2flow.apps.testing` is its command line.
"""

import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from m2flow.apps.app import App, Job, StepOutcome
from m2flow.apps.language import LanguageModelConfig
from m2flow.apps.model_check import model_problems, room_problems
from m2flow.apps.parsing import setting
from m2flow.flow import Flow, StageProxy, Stream
from m2flow.flow.synthetic import SyntheticActor, SyntheticReward, SyntheticRollout
from m2flow.flow.testing import mean_reward
from m2flow.worker import Item, WorkerGroup, stage

__all__ = ["TOY", "ToyActor", "ToyConfig"]


@dataclass(frozen=True)
class ToyConfig(LanguageModelConfig):
    """What the toy's workers sleep, and when its actor fails or dies."""

    generate_s: float = setting(0.0, "seconds that the rollout sleeps for a prompt", low=0)
    train_s: float = setting(0.0, "seconds that the actor sleeps for a group", low=0)
    fails_at: int = setting(0, "the iteration in which the actor raises; 0: in none", low=0)
    dies_at: int = setting(0, "the iteration in which the actor's process kills itself; 0: in none", low=0)


class ToyActor(SyntheticActor):
    """The synthetic actor, with checkpoints, and accidents on demand."""

    def setup(self) -> None:
        """Starts anew, or from a checkpoint."""
        super().setup()
        if self.config["resume"]:
            self.load_shards(json.loads((Path(self.config["resume"]) / "state.json").read_text(encoding="utf-8")))

    @stage
    def train(self, items: list[Item]) -> Iterable[Item]:
        """Trains; in the chosen iterations it raises, or dies."""
        if items and items[0].iteration == self.config["fails_at"]:
            raise RuntimeError("the toy was told to fail")
        if items and items[0].iteration == self.config["dies_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(items)

    def save_checkpoint(self, directory: str) -> None:
        """Writes all that a successor needs."""
        text = json.dumps({name: value.tolist() for name, value in self.shards().items()})
        (Path(directory) / "state.json").write_text(text, encoding="utf-8")


def grpo(flow: Flow, rollout: StageProxy, reward: StageProxy, actor: StageProxy, *, num_epochs: int = 1) -> Stream:
    """The macro flow."""
    scored = reward.score(rollout.generate(flow.source("prompts")))
    graded = flow.map(mean_reward, flow.gather(scored, by="prompt"))
    metrics = actor.train(flow.epochs(graded, num_epochs))
    flow.publish(actor, to=rollout)
    return metrics


def _build(config: ToyConfig, weights: Path, resume: Path | None) -> Job:
    samples = config.samples_per_prompt
    actor = {
        "seconds": config.train_s,
        "minibatch": config.minibatch_size // samples,
        "resume": str(resume or ""),
        "fails_at": config.fails_at,
        "dies_at": config.dies_at,
    }
    return Job(
        program=partial(grpo, num_epochs=config.num_epochs),
        groups={
            "rollout": SyntheticRollout.group({"samples": samples, "seconds": config.generate_s}, name="rollout"),
            "reward": SyntheticReward.group({}, name="reward"),
            "actor": ToyActor.group(actor, name="actor", devices_per_rank=None),
        },
        expansions={"rollout.generate": samples},
        items=lambda step: [Item((i,), step, {"seed": config.seed}) for i in range(config.prompts_per_step)],
        measure=_measure,
        evaluate=_evaluate,
    )


def _measure(outputs: Sequence[Item]) -> StepOutcome:
    rewards = [reward for item in outputs for reward in item.fields["rewards"]]
    equal = sum(len(set(item.fields["rewards"])) == 1 for item in outputs)
    metrics = {
        "critic/score/mean": sum(rewards) / len(rewards),
        "response_length/mean": 1.0,
        "groups/count": float(len(outputs)),
        "groups/all_equal": float(equal),
        "tokens": float(len(rewards)),
    }
    rows = [
        {"prompt": item.id, "completion": "", "reward": reward, "policy_versions": [[item.fields["versions"][0], 1]]}
        for item in outputs
        for reward in item.fields["rewards"]
    ]
    return StepOutcome(metrics, rows, volume=metrics["tokens"])


def _evaluate(groups: Mapping[str, WorkerGroup], step: int) -> Mapping[str, float]:
    (version,) = set(groups["rollout"].method("version")().result())
    return {"eval/greedy_accuracy": float(version)}


TOY: App[ToyConfig] = App(
    name="toy",
    purpose="An app whose workers sleep and add.",
    config_class=ToyConfig,
    recipes={"small": Path(__file__).parent / "small.yaml"},
    default_recipe="small",
    default_profile=Path(__file__).parent / "profile.yaml",
    problems=lambda config: [],
    prepare=lambda config: Path(config.model.source),
    build=_build,
    model_problems=model_problems,
    room_problems=room_problems,
)
