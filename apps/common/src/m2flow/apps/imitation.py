"""A supervised stage at the beginning of a run: steps on worked examples, for as long as sampling does not succeed.

Every step samples and grades as always. While the success of the last step's samples is below a level, the step is
taken on the worked examples of its problems in place of the samples; once it is reached, the stage is over for good.
So what ends it is measured, on problems that were sampled before they were learned from.
"""

import torch
from torch import Tensor

from m2flow.algos import aggregation, cloning
from m2flow.worker import Item
from m2flow.worker.engines.trainer import LossInputs, Metrics, Sample

__all__ = ["Imitation", "imitation_loss", "worked_example"]


class Imitation:
    """The stage as an actor is in it. `state` int64 [2], live: steps that were taken; 1 once the stage is over."""

    def __init__(self, until: float, max_steps: int) -> None:
        """`until`: mean reward of a minibatch's samples that ends it, within `max_steps` steps; 0: there is none."""
        self.until = until
        self.state = torch.zeros(2, dtype=torch.int64)
        self._max_steps = max_steps

    @property
    def is_on(self) -> bool:
        """Whether the next step is taken on worked examples."""
        return self.until > 0 and not self.state[1]

    def stepped(self, success: float) -> Metrics:
        """Notes a step of the stage, whose samples came to `success`. Raises ValueError where it was the last."""
        self.state += torch.tensor([1, success >= self.until])
        num_steps, is_over = self.state.tolist()
        if not is_over and num_steps == self._max_steps:
            raise ValueError(
                f"supervised: got a sampled success of {success:.3f} after {num_steps} steps, want {self.until}: "
                "look at the samples, then lower supervised.until or raise supervised.max_steps or optimiser.lr"
            )
        return {"supervised/success": success}


def worked_example(group: Item) -> Sample:
    """The worked example that a group's members carry: `example_ids` int32 [T], `example_mask` bool [T]."""
    fields = group.members[0].fields
    return Sample(fields["prompt_ids"], fields["example_ids"], fields["example_mask"])


def imitation_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The negative log-likelihood of the tokens within the mask, summed: a `LossFn`."""
    per_token = cloning.nll(inputs.logprobs, inputs.mask)
    total = aggregation.token_mean(per_token, inputs.mask, num_tokens=1.0)
    return total, {"supervised/nll": float(total.detach()), "tokens": float(inputs.mask.sum())}
