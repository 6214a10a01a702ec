"""The seam between a rollout worker and whatever generates tokens for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One prompt and the seeds of the samples wanted of it: as many samples as seeds.

    Attributes:
      token_ids: the prompt's tokens, at least one.
      seeds: one number in [0, 2**64) per sample. A sample is a function of weights, tokens, parameters and its seed.
    """

    token_ids: Sequence[int]
    seeds: Sequence[int]

    def __post_init__(self) -> None:
        if not len(self.token_ids):
            raise ValueError("prompt: got 0 tokens, want at least 1")
        if not len(self.seeds):
            raise ValueError("prompt: got 0 seeds, want one per sample")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
      max_new_tokens: most tokens of a completion, its stop token included.
      temperature: the policy is softmax(logits / temperature); 0 takes the likeliest token (greedy).
      top_p: draw only among the likeliest tokens whose probabilities reach this sum; 1 draws among all.
      stop_token_ids: a completion ends with the first of these, which is part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {self.max_new_tokens}, want at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature: got {self.temperature}, want 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, want above 0 and at most 1")


@dataclass(frozen=True)
class Completion:
    """One sample.

    Attributes:
      token_ids: int32 [T], 1 <= T <= max_new_tokens.
      logprobs: float32 [T], of softmax(logits / temperature) over the whole vocabulary (temperature 1 when greedy):
        `top_p` limits what is drawn, not what is reported.
      token_versions: int32 [T], the version of the weights that each token was drawn with; they never fall.
      finish_reason: "stop" if the last token is a stop token, else "length".
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    token_versions: NDArray[np.int32]
    finish_reason: Literal["stop", "length"]


More: TypeAlias = Callable[[int], Sequence[Prompt]]
"""Prompts that have come in the meantime; the engine has room for so many samples. Returns at once."""


class RolloutEngine(Protocol):
    """Generates from one set of weights at a time. Not thread-safe: one caller."""

    policy_version: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        more: More | None = None,
        safe_point: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index in `prompts`, a completion per seed) for each prompt, as soon as its last sample ends.

        Where there is `more`, the engine asks it while it generates, and once it has nothing left; what comes of it is
        counted on from `prompts`. It ends when it has nothing left and there is no more.

        A sample depends on its own prompt and seed, never on what shares its batch, on the order of `prompts` or on
        how they are split over calls (to the rounding of the number format). Blocks while it computes.

        Where there is `safe_point`, the engine calls it between decoding steps, and it may load weights: what was drawn
        stays, keys and values are computed anew, and generation goes on. A token's logprob is that of the weights that
        drew it, after all the tokens before it. At no other time may weights be loaded while the iterator is alive.
        """

    def load_weights(self, weights: "Mapping[str, Tensor]", version: int) -> None:
        """Take new weights by parameter name; raises ValueError when a name is missing or unknown or a shape differs.

        The tensors may be read-only; they are copied, and may be released when this returns.
        """

    def resident_bytes(self) -> int:
        """Bytes that the engine holds between calls."""
