"""The policy and its value: two small networks, and a Gaussian around what the first one says."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from m2flow.worker.engines.env import Floats

__all__ = ["GaussianPolicy", "PolicyShape", "load_policy", "save_policy"]

_SHAPE, _WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class PolicyShape:
    """Attributes:
    observation_size, action_size: numbers in and out.
    hidden: units of each hidden layer.
    log_std: logarithm of the deviation at the start.
    """

    observation_size: int
    action_size: int
    hidden: tuple[int, ...]
    log_std: float


class GaussianPolicy(nn.Module):
    """`mean` [..., action_size] and `value` [...] of observations [..., observation_size], one deviation a number."""

    def __init__(self, shape: PolicyShape, *, seed: int = 0) -> None:
        """Weights are orthogonal, from `seed` alone; the mean begins near 0."""
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._mean = _network([shape.observation_size, *shape.hidden, shape.action_size], last_gain=0.01)
            self._value = _network([shape.observation_size, *shape.hidden, 1], last_gain=1.0)
        self.log_std = nn.Parameter(torch.full((shape.action_size,), shape.log_std))

    def mean(self, observations: Tensor) -> Tensor:
        """The most likely action."""
        mean: Tensor = self._mean(observations)
        return mean

    def value(self, observations: Tensor) -> Tensor:
        """The discounted return that is expected."""
        value: Tensor = self._value(observations)
        return value.squeeze(-1)

    def action(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """An action [N, A] at `noise` [N, A] of the standard normal, and its log-probability [N]."""
        action = self.mean(observations) + self.log_std.exp() * noise
        return action, self._log_density(noise)

    def act(self, observations: Floats, noise: Floats) -> tuple[Floats, Floats]:
        """`action` of arrays, as arrays, without gradient."""
        with torch.inference_mode():
            action, logprob = self.action(torch.from_numpy(observations), torch.from_numpy(noise))
        return action.numpy(), logprob.numpy()

    def decide(self, observations: Floats) -> Floats:
        """`mean` of an array, as an array, without gradient."""
        with torch.inference_mode():
            mean: Floats = self.mean(torch.tensor(observations)).numpy()
        return mean

    def logprob(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Log-probability [N] of actions [N, A]."""
        return self._log_density((actions - self.mean(observations)) * (-self.log_std).exp())

    def entropy(self) -> Tensor:
        """Of an action, wherever it is taken: sum of log(std) + log(2 pi e) / 2."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()

    def _log_density(self, z: Tensor) -> Tensor:
        return -(0.5 * z.square() + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


def save_policy(policy: GaussianPolicy, directory: Path) -> None:
    """Writes shape and weights into an existing directory."""
    weights = {name: tensor.detach().contiguous() for name, tensor in policy.state_dict().items()}
    save_file(weights, directory / _WEIGHTS)
    (directory / _SHAPE).write_text(json.dumps(asdict(policy.shape), indent=2) + "\n", encoding="utf-8")


def load_policy(directory: Path) -> GaussianPolicy:
    """Returns what `save_policy` wrote."""
    fields: Mapping[str, object] = json.loads((directory / _SHAPE).read_text(encoding="utf-8"))
    policy = GaussianPolicy(PolicyShape(**{**fields, "hidden": tuple(fields["hidden"])}))  # type: ignore[arg-type]
    policy.load_state_dict(load_file(directory / _WEIGHTS))
    return policy


def _network(sizes: Sequence[int], *, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (size, following) in enumerate(pairwise(sizes), start=1):
        linear = nn.Linear(size, following)
        last = number == len(sizes) - 1
        nn.init.orthogonal_(linear.weight, last_gain if last else math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, nn.Tanh()]
    return nn.Sequential(*layers)
