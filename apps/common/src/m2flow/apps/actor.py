"""The actor worker: graded groups in, gradients and optimiser steps, weights out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from m2flow.apps.graded import Aggregation, Correction, own_versions
from m2flow.apps.language import LanguageModelConfig
from m2flow.worker import GroupSpec, Item, Worker, stage
from m2flow.worker.engines.memory import keep_freed_pages
from m2flow.worker.engines.trainer import Metrics

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ActorConfig", "ActorWorker", "actor_group"]


@dataclass(frozen=True)
class ActorConfig:
    """Attributes:
    model: Hugging Face model directory, with its tokenizer.
    groups_per_minibatch: groups that one optimiser step is taken on; group g of an iteration, counted by its place
      at the source, belongs to minibatch g // groups_per_minibatch.
    steps_per_iteration: optimiser steps between two publications; see `policy_loss` for what it decides.
    microbatch_tokens: most tokens of one forward and backward pass.
    lr, betas, weight_decay, max_grad_norm: AdamW's.
    clip_low, clip_high, loss_aggregation: the policy loss's, see `PolicyLossConfig`.
    correction, max_weight: for samples of older weights, see `PolicyLossConfig`.
    max_staleness: a sample with a token whose weights were more updates behind does not teach; "any": all do.
    temperature: the sampler's.
    imitate_until, imitate_max_steps: of a supervised stage, see `Imitation`.
    deterministic: a minibatch's gradients are accumulated when it is whole, in source order and in one thread: the same
      bits however its groups arrive and on however many cores, and no pass before its last group is there.
    resume: directory that `save_checkpoint` wrote, which then takes the place of `model`; or empty.
    """

    model: str
    groups_per_minibatch: int
    steps_per_iteration: int = 1
    microbatch_tokens: int = 4096
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_aggregation: Aggregation = "token_mean"
    correction: Correction = "none"
    max_weight: float = 2.0
    max_staleness: int | Literal["any"] = "any"
    temperature: float = 1.0
    imitate_until: float = 0.0
    imitate_max_steps: int = 1
    deterministic: bool = False
    resume: str = ""


class ActorWorker(Worker):
    """Its config is an `ActorConfig` as a dict."""

    in_step: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("m2flow.apps.learning",)

    def setup(self) -> None:
        """Loads the model, and a checkpoint's state where there is one: seconds."""
        from m2flow.apps.learning import Learner  # noqa: PLC0415

        keep_freed_pages()
        self._config = config = ActorConfig(**self.config)
        if config.deterministic:
            self.context.compute_in_one_thread()
        self._learner = Learner(config)
        self._minibatch = _Minibatch()

    @stage
    def logprobs(self, items: list[Item]) -> Iterator[Item]:
        """Each group's members with `old_logprobs`, the present policy's: for steps that differ from the sampler."""
        for group in items:
            values = self._learner.logprobs(group)
            members = [m.with_fields(old_logprobs=v) for m, v in zip(group.members, values, strict=True)]
            yield replace(group, members=tuple(members))

    @stage
    def train(self, items: list[Item]) -> list[Item]:
        """Accumulates the groups' gradients, and steps whenever a minibatch is whole.

        Gives an item for each group, without its tokens: what became of it, and under `metrics` what the optimiser
        step that it completed came to (empty for the others).
        """
        receipts: list[Item] = []
        for place, run in groupby(items, key=self._place):
            groups = list(run)
            if not self._minibatch.continues(place, groups):
                self._step()
            self._take(place, groups)
            too_stale = [len(group.members) - len(self._learner.fresh(group)) for group in groups]
            worked = [self._learner.num_worked_tokens(group) for group in groups]
            whole = len(self._minibatch.seen) == self._config.groups_per_minibatch
            metrics = [*[{}] * (len(groups) - 1), self._step() if whole else {}]
            receipts += map(_receipt, groups, too_stale, worked, metrics)
        return receipts

    def named_weights(self) -> "Mapping[str, Tensor]":
        """The parameters. A minibatch that a lost group left incomplete is stepped first."""
        self._step()
        return self._learner.engine.named_weights()

    def shards(self) -> dict[str, Any]:
        """Parameters, optimiser and step count; of a supervised stage, how far it is."""
        return self._learner.shards()

    def load_shards(self, shards: Mapping[str, Any]) -> None:
        """Becomes what another was."""
        self._learner.load_shards(shards)

    def save_checkpoint(self, directory: str) -> None:
        """Writes what `from_pretrained` loads, and the state that `resume` reads, into an existing directory."""
        self._learner.save(Path(directory))

    def resident_bytes(self) -> int:
        """The bytes of parameters and optimiser."""
        return self._learner.engine.resident_bytes()

    def _place(self, group: Item) -> tuple[int, int]:
        return group.iteration, group.seq[0] // self._config.groups_per_minibatch

    def _take(self, place: tuple[int, int], groups: Sequence[Item]) -> None:
        minibatch = self._minibatch
        minibatch.place = place
        minibatch.seen |= {group.seq for group in groups}
        if self._config.deterministic:
            minibatch.held += groups
        else:
            self._accumulate(minibatch, groups)

    def _accumulate(self, minibatch: "_Minibatch", groups: Sequence[Item]) -> None:
        minibatch.rewards += [float(reward) for group in groups for reward in group.fields["rewards"]]
        weight, sums = self._learner.accumulate(groups)
        minibatch.weight += weight
        for name, value in sums.items():
            minibatch.sums[name] = minibatch.sums.get(name, 0.0) + value

    def _step(self) -> Metrics:
        """Takes the optimiser step of the minibatch at hand, if any; returns its metrics."""
        minibatch, self._minibatch = self._minibatch, _Minibatch()
        self._accumulate(minibatch, sorted(minibatch.held, key=lambda group: group.seq))
        if not minibatch.weight:
            return {}
        return self._learner.step(minibatch.weight, minibatch.sums, float(np.mean(minibatch.rewards)))


def actor_group(
    config: LanguageModelConfig,
    weights: Path,
    resume: Path | None,
    *,
    imitate_until: float = 0.0,
    imitate_max_steps: int = 1,
) -> GroupSpec:
    """The specification of a run's actor: on the model in `weights`, or on the state of the checkpoint `resume`."""
    settings = {
        "model": str(weights),
        "groups_per_minibatch": config.groups_per_minibatch,
        "steps_per_iteration": config.derived_numbers()["optimiser_steps_per_step"],
        "microbatch_tokens": config.microbatch_tokens,
        "lr": config.optimiser.lr,
        "betas": config.optimiser.betas,
        "weight_decay": config.optimiser.weight_decay,
        "max_grad_norm": config.optimiser.max_grad_norm,
        "clip_low": config.loss.clip_low,
        "clip_high": config.loss.clip_high,
        "loss_aggregation": config.loss.aggregation,
        "correction": config.loss.correction,
        "max_weight": config.loss.max_weight,
        "max_staleness": config.loss.max_staleness,
        "temperature": config.sampling.temperature,
        "imitate_until": imitate_until,
        "imitate_max_steps": imitate_max_steps,
        "deterministic": config.deterministic,
        "resume": str(resume or ""),
    }
    return ActorWorker.group(settings, name="actor", devices_per_rank=None)


@dataclass
class _Minibatch:
    """What is accumulated of the next optimiser step: of which groups, and sums; `held` groups are yet to be."""

    place: tuple[int, int] = (-1, -1)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    held: list[Item] = field(default_factory=list)
    weight: float = 0.0
    rewards: list[float] = field(default_factory=list)
    sums: Metrics = field(default_factory=dict)

    def continues(self, place: tuple[int, int], groups: Sequence[Item]) -> bool:
        """Whether these groups belong to it; one that it has seen is the next epoch's."""
        return not self.seen or (place == self.place and self.seen.isdisjoint(group.seq for group in groups))


def _receipt(group: Item, too_stale: int, worked_tokens: int, metrics: Metrics) -> Item:
    """A group for the driver: what people and metrics need of it, without its tokens."""
    members = group.members
    first = members[0].fields
    return Item(
        group.seq,
        group.iteration,
        {
            "prompt": first["prompt"],
            "answer": first["answer"],
            "completions": [member.fields["completion"] for member in members],
            "rewards": [float(reward) for reward in group.fields["rewards"]],
            "advantages": [float(advantage) for advantage in group.fields["advantages"]],
            "versions": [_tokens_by_version(member) for member in members],
            "too_stale": too_stale,
            "prompt_length": len(first["prompt_ids"]),
            "lengths": [_num_own(member) for member in members],
            "fed": [len(member.fields["completion_ids"]) - _num_own(member) for member in members],
            "clipped": [member.fields["finish_reason"] == "length" for member in members],
            "counts": [dict(member.fields.get("counts", {})) for member in members],
            "parts": [dict(member.fields.get("reward_parts", {})) for member in members],
            "worked_tokens": worked_tokens,
            "metrics": metrics,
        },
    )


def _tokens_by_version(sample: Item) -> list[list[int]]:
    """[version, tokens that it drew] for each policy version that a sample has tokens of, the oldest first."""
    versions, counts = np.unique(own_versions(sample), return_counts=True)
    return [list(pair) for pair in zip(versions.tolist(), counts.tolist(), strict=True)]


def _num_own(sample: Item) -> int:
    """The tokens that the policy produced: what tools said in between is not its own."""
    mask = sample.fields.get("loss_mask")
    return len(sample.fields["completion_ids"]) if mask is None else int(mask.sum())
