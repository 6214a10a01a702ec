"""The learner: what was played in, values and advantages, then PPO's passes over its steps; weights out."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from m2flow.algos import advantages, losses, returns, values
from m2flow.apps.seeding import derived_seed
from m2flow.embodied.policy import load_policy, save_policy
from m2flow.worker import Item, Worker, stage

__all__ = ["LearnerConfig", "LearnerWorker"]

_STATE = "trainer.safetensors"
_FIELDS = ("observations", "actions", "logprobs", "rewards", "mask", "terminated", "truncated")


@dataclass(frozen=True)
class LearnerConfig:
    """Attributes:
    model: directory that `save_policy` wrote.
    seed: the run's; with the iteration it seeds the order of steps.
    minibatch_size: environment steps of one optimiser step, at most.
    num_epochs: passes over what was played.
    gamma, lam, clip, value_coef, entropy_coef: PPO's.
    lr, betas, weight_decay, max_grad_norm: AdamW's.
    resume: directory that `save_checkpoint` wrote, which is then `model` too; or empty.
    """

    model: str
    seed: int
    minibatch_size: int
    num_epochs: int
    gamma: float
    lam: float
    clip: float
    value_coef: float
    entropy_coef: float
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    resume: str = ""


class LearnerWorker(Worker):
    """Its config is a `LearnerConfig` as a dict."""

    in_step: ClassVar[bool] = True

    def setup(self) -> None:
        """Loads the policy, and a checkpoint's optimiser where there is one."""
        self._config = config = LearnerConfig(**{**self.config, "betas": tuple(self.config["betas"])})
        self._policy = load_policy(Path(config.model))
        self._parameters = list(self._policy.parameters())
        # The networks are small: a kernel for each parameter and each step of the formula would cost more than they do.
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, eps=1e-5, weight_decay=config.weight_decay, fused=True
        )
        for parameter in self._parameters:
            zeros = {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        if config.resume:
            self.load_shards(load_file(Path(config.resume) / _STATE))

    @stage
    def judge(self, items: list[Item]) -> Iterator[Item]:
        """What was played with `advantages`, whitened over all of it, and `returns`, float32 [B, T] each.

        Where an episode was truncated, what would have followed is worth the value of its last observation.
        """
        for item in items:
            fields = {name: torch.from_numpy(np.asarray(item.fields[name])) for name in _FIELDS}
            with torch.inference_mode():
                seen = self._policy.value(fields["observations"])
                gained, returned = returns.gae(
                    fields["rewards"],
                    seen,
                    fields["mask"],
                    gamma=self._config.gamma,
                    lam=self._config.lam,
                    terminated=fields["terminated"],
                    truncated=fields["truncated"],
                    final_values=seen[:, 1:],
                )
                white = advantages.whiten(gained, fields["mask"])
            yield item.with_fields(advantages=white.numpy(), returns=returned.numpy())

    @stage
    def train(self, items: list[Item]) -> Iterator[Item]:
        """PPO on what was judged; gives what became of each episode, and under `metrics` what the steps came to."""
        for item in items:
            metrics = self._learn(item)
            yield Item(item.seq, item.iteration, {**_outcomes(item.fields), "metrics": metrics})

    def named_weights(self) -> Mapping[str, Tensor]:
        """The parameters."""
        return {name: tensor.detach() for name, tensor in self._policy.state_dict().items()}

    def shards(self) -> dict[str, Tensor]:
        """Parameters and the optimiser's moments, by name: live."""
        return {f"param.{name}": tensor for name, tensor in self.named_weights().items()} | self._moments()

    def load_shards(self, shards: Mapping[str, Tensor]) -> None:
        """Becomes what another was."""
        own = self.shards()
        for name, value in shards.items():
            own[name].copy_(value)

    def save_checkpoint(self, directory: str) -> None:
        """Writes what `load_policy` reads, and the optimiser's moments, into an existing directory."""
        save_policy(self._policy, Path(directory))
        save_file(self._moments(), Path(directory) / _STATE)

    def num_updates(self) -> int:
        """Optimiser steps that were taken, a checkpoint's included."""
        return int(self._optimizer.state[self._parameters[0]]["step"])

    def resident_bytes(self) -> int:
        """The bytes of parameters, gradients and moments."""
        return 4 * sum(parameter.numel() * parameter.element_size() for parameter in self._parameters)

    def _moments(self) -> dict[str, Tensor]:
        return {
            f"{moment}.{name}": tensor
            for name, parameter in self._policy.named_parameters()
            for moment, tensor in self._optimizer.state[parameter].items()
        }

    def _learn(self, item: Item) -> dict[str, float]:
        config, mask = self._config, item.fields["mask"]
        names = ("actions", "logprobs", "advantages", "returns")
        steps = {name: torch.from_numpy(np.asarray(item.fields[name][mask])) for name in names}
        steps["observations"] = torch.from_numpy(np.asarray(item.fields["observations"][:, :-1][mask]))
        generator = torch.Generator().manual_seed(derived_seed(config.seed, "minibatches", item.iteration) >> 1)
        sums: Counter[str] = Counter()
        count = 0
        for _ in range(config.num_epochs):
            order = torch.randperm(int(mask.sum()), generator=generator)
            shuffled = [torch.split(tensor[order], config.minibatch_size) for tensor in steps.values()]
            for parts in zip(*shuffled, strict=True):
                sums.update(self._step(dict(zip(steps, parts, strict=True))))
                count += 1
        return {name: value / count for name, value in sums.items()} | {"actor/lr": config.lr}

    def _step(self, part: Mapping[str, Tensor]) -> dict[str, float]:
        config, policy = self._config, self._policy
        new = policy.logprob(part["observations"], part["actions"])
        everywhere = torch.ones(1, len(new), dtype=torch.bool)
        row = {name: part[name][None] for name in ("logprobs", "advantages", "returns")}
        gain = losses.ppo_clip(
            new[None], row["logprobs"], row["advantages"], everywhere, clip_low=config.clip, clip_high=config.clip
        ).mean()
        error = values.mse(policy.value(part["observations"])[None], row["returns"], everywhere).mean()
        entropy = policy.entropy()
        self._optimizer.zero_grad()
        loss = gain + config.value_coef * error - config.entropy_coef * entropy
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            moved = new.detach() - part["logprobs"]
            found = [gain, error, entropy, norm, -moved.mean(), (moved.expm1().abs() > config.clip).float().mean()]
            numbers = torch.stack([tensor.detach() for tensor in found]).tolist()
        names = ("actor/pg_loss", "critic/vf_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl")
        return dict(zip((*names, "actor/pg_clipfrac"), numbers, strict=True))


def _outcomes(fields: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What became of each episode of a batch, an entry each."""
    mask, successes = fields["mask"], fields["successes"]
    lengths = mask.sum(1)
    last = np.maximum(lengths - 1, 0)
    return {
        "returns": [float(value) for value in (fields["rewards"] * mask).sum(1)],
        "lengths": [int(value) for value in lengths],
        "terminated": [bool(value) for value in fields["terminated"].any(1)],
        "success_once": [bool(value) for value in (successes & mask).any(1)],
        "success_at_end": [bool(value) for value in successes[np.arange(len(last)), last]],
    }
