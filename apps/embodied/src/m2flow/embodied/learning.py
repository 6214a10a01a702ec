"""PPO over what was played: values and advantages, then passes over its steps; the optimiser and its files."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from m2flow.algos import advantages, losses, returns, values
from m2flow.apps.seeding import derived_seed
from m2flow.embodied.learner import LearnerConfig
from m2flow.embodied.policy import load_policy, save_policy

__all__ = ["Learner"]

_STATE = "trainer.safetensors"
_FIELDS = ("observations", "actions", "logprobs", "rewards", "mask", "terminated", "truncated")


class Learner:
    """The policy under AdamW. What was played is given by its fields, as `episodes.batched` makes them."""

    def __init__(self, config: LearnerConfig) -> None:
        """Loads the policy, and a checkpoint's optimiser where there is one."""
        self._config = config
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

    def judge(self, played: Mapping[str, Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Advantages, whitened over all that was played, and returns, float32 [B, T] each.

        Where an episode was truncated, what would have followed is worth the value of its last observation.
        """
        fields = {name: torch.from_numpy(np.asarray(played[name])) for name in _FIELDS}
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
        return white.numpy(), returned.numpy()

    def learn(self, judged: Mapping[str, Any], iteration: int) -> dict[str, float]:
        """PPO's passes over all steps within the mask; what its steps came to in the mean."""
        config, mask = self._config, judged["mask"]
        names = ("actions", "logprobs", "advantages", "returns")
        steps = {name: torch.from_numpy(np.asarray(judged[name][mask])) for name in names}
        steps["observations"] = torch.from_numpy(np.asarray(judged["observations"][:, :-1][mask]))
        generator = torch.Generator().manual_seed(derived_seed(config.seed, "minibatches", iteration) >> 1)
        sums: Counter[str] = Counter()
        count = 0
        for _ in range(config.num_epochs):
            order = torch.randperm(int(mask.sum()), generator=generator)
            shuffled = [torch.split(tensor[order], config.minibatch_size) for tensor in steps.values()]
            for parts in zip(*shuffled, strict=True):
                sums.update(self._step(dict(zip(steps, parts, strict=True))))
                count += 1
        return {name: value / count for name, value in sums.items()} | {"actor/lr": config.lr}

    def named_weights(self) -> dict[str, Tensor]:
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

    def save(self, directory: Path) -> None:
        """Writes what `load_policy` reads, and the optimiser's moments, into an existing directory."""
        save_policy(self._policy, directory)
        save_file(self._moments(), directory / _STATE)

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
