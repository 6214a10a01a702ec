"""The seam between an actor (or critic) worker and whatever computes gradients for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Metrics: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Sample:
    """A sequence to learn from.

    Attributes:
      prompt_ids: tokens that are given; at least one.
      completion_ids: T tokens that follow; at least one.
      loss_mask: bool [T], which of them the policy produced; None means all.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    loss_mask: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt_ids) or not len(self.completion_ids):
            raise ValueError(
                f"sample: got {len(self.prompt_ids)} prompt and {len(self.completion_ids)} completion tokens, "
                "want at least 1 of each"
            )
        if self.loss_mask is not None and len(self.loss_mask) != len(self.completion_ids):
            raise ValueError(
                f"sample: loss_mask has {len(self.loss_mask)} entries, want {len(self.completion_ids)}, one per token"
            )


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of one microbatch of B samples, padded on the right to T completion tokens.

    Attributes:
      samples: position of each of the B samples in the sequence that `accumulate` was given.
      logprobs: float32 [B, T] of the current policy, with gradient; 0 where padded.
      entropy: float32 [B, T] of the policy's distribution at each token, without gradient; 0 where padded.
      mask: bool [B, T], where there is a token with loss_mask.
    """

    samples: Sequence[int]
    logprobs: "Tensor"
    entropy: "Tensor"
    mask: "Tensor"


# Returns the microbatch's loss as a SUM over its terms, and sums for metrics.
LossFn: TypeAlias = Callable[[LossInputs], "tuple[Tensor, Metrics]"]


class TrainerEngine(Protocol):
    """Holds parameters and an optimiser. Not thread-safe: one caller."""

    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """The current policy's logprob of each completion token: float32 [T] per sample, in the order given."""

    def accumulate(self, samples: Sequence[Sample], loss: LossFn) -> Metrics:
        """Add the gradient of the sum of `loss` over all `samples`, in as many microbatches as memory asks for.

        Returns the sums of the metrics. How samples fall into microbatches changes nothing but rounding, so long as
        `loss` is a sum over samples or tokens. Blocks while it computes.
        """

    def step(self, weight: float) -> Metrics:
        """Divide the gradients by `weight` (tokens, samples: what the sums are averaged over), clip, update, clear.

        Returns `grad_norm` (before clipping) and `lr`. Raises ValueError when `weight` is not positive. Without an
        `accumulate` before it nothing changes but the step count, and grad_norm is 0.
        """

    def named_weights(self) -> "Mapping[str, Tensor]":
        """The parameters by name: live, to be read or staged before the next `step`."""

    def state_dict(self) -> "dict[str, Tensor]":
        """Parameters, optimiser and step count, as a flat mapping that `load_state_dict` takes."""

    def load_state_dict(self, state: "Mapping[str, Tensor]") -> None:
        """Become the saved state exactly; raises ValueError when names or shapes differ."""

    def save_pretrained(self, path: Path) -> None:
        """Write the model as a directory that transformers' `from_pretrained` loads."""

    def resident_bytes(self) -> int:
        """Bytes that the engine holds between calls."""


def train_minibatch(engine: TrainerEngine, samples: Sequence[Sample], loss: LossFn, *, weight: float) -> Metrics:
    """One optimiser step on `samples`; returns the metrics' sums divided by `weight`, and the step's own."""
    sums = engine.accumulate(samples, loss)
    return {name: value / weight for name, value in sums.items()} | engine.step(weight)
