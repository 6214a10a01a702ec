"""The rollout engine in plain torch: the default on CPU, and the reference for the others.

What makes it fast is what it does not compute. Prompts are prefilled as one tree, so worked examples that prompts
share, and a prompt that its samples share, are computed once. Decoding rows are distinct prefixes, not samples:
samples that have drawn the same tokens so far share a row, and part where they differ. A finished sample leaves.
Logits are computed for the rows' last positions alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m2flow.worker.engines._causal_lm import CausalLM
from m2flow.worker.engines._trie import TokenTrie
from m2flow.worker.engines._weights import copy_weights, num_bytes
from m2flow.worker.engines.precision import generation_dtype
from m2flow.worker.engines.rollout import _sampling
from m2flow.worker.engines.rollout._cache import PrefillCapture, RowCache
from m2flow.worker.engines.rollout.engine import Completion, Prompt, SamplingParams


@dataclass(frozen=True)
class TorchRolloutConfig:
    """Attributes:
    path: Hugging Face model directory.
    dtype: "float32", "bfloat16", or "auto": what this machine generates fastest in.
    device: a torch device.
    max_samples: most samples decoded together; more are generated in waves. Memory and time, not results.
    max_prefill_tokens: most tokens of a packed prefill; the attention scores grow with their square.
    """

    path: str
    dtype: str = "auto"
    device: str = "cpu"
    max_samples: int = 256
    max_prefill_tokens: int = 4096


@dataclass
class _Row:
    """A distinct prefix that is being continued, and the samples (of one prompt) that have it."""

    prompt: int
    samples: list[int]


class _Sample:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def completion(self, stop_token_ids: Sequence[int]) -> Completion:
        return Completion(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason="stop" if self.tokens[-1] in stop_token_ids else "length",
        )


class TorchRolloutEngine:
    """`RolloutEngine` over a transformers model; see the module."""

    def __init__(self, config: TorchRolloutConfig) -> None:
        """Load the model: seconds, and its size in memory. Raises FileNotFoundError when `config.path` has none."""
        dtype = generation_dtype() if config.dtype == "auto" else getattr(torch, config.dtype)
        self.policy_version = 0
        self._config = config
        self._lm = CausalLM.load(Path(config.path), dtype=dtype, device=torch.device(config.device))
        self._lm.model.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self._lm.head.dtype

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        copy_weights(self._lm.model, weights)
        self.policy_version = version

    def resident_bytes(self) -> int:
        return num_bytes(self._lm.model)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
        for wave in self._waves(prompts):
            for index, completions in self._generate_wave([prompts[index] for index in wave], params):
                yield wave[index], completions

    def _waves(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Split prompt numbers by the two limits; a prompt that exceeds one alone is a wave of its own."""
        wave: list[int] = []
        samples = tokens = 0
        for index, prompt in enumerate(prompts):
            samples += len(prompt.seeds)
            tokens += len(prompt.token_ids)
            if wave and (samples > self._config.max_samples or tokens > self._config.max_prefill_tokens):
                yield wave
                wave, samples, tokens = [], len(prompt.seeds), len(prompt.token_ids)
            wave.append(index)
        if wave:
            yield wave

    def _generate_wave(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        samples = [[_Sample() for _ in prompt.seeds] for prompt in prompts]
        unfinished = [len(prompt.seeds) for prompt in prompts]
        seeds = [np.array([seed % 2**64 for seed in prompt.seeds], dtype=np.uint64) for prompt in prompts]
        rows = [_Row(index, list(range(len(prompt.seeds)))) for index, prompt in enumerate(prompts)]
        cache, logits = self._prefill(prompts)
        for position in range(params.max_new_tokens):
            children: list[_Row] = []
            tokens: list[int] = []
            parents: list[int] = []
            drawn = _draw(logits, [seeds[row.prompt][row.samples] for row in rows], params, position)
            for number, row in enumerate(rows):
                followers: dict[int, list[int]] = {}
                for sample, token, logprob in zip(row.samples, *drawn[number], strict=True):
                    samples[row.prompt][sample].tokens.append(token)
                    samples[row.prompt][sample].logprobs.append(logprob)
                    if token in params.stop_token_ids or position + 1 == params.max_new_tokens:
                        unfinished[row.prompt] -= 1
                    else:
                        followers.setdefault(token, []).append(sample)
                for token, followed in followers.items():
                    children.append(_Row(row.prompt, followed))
                    tokens.append(token)
                    parents.append(number)
            done = {row.prompt for row in rows if unfinished[row.prompt] == 0}
            for index in sorted(done):
                yield index, [sample.completion(params.stop_token_ids) for sample in samples[index]]
            if not children:
                return
            rows = children
            cache.select(parents)
            logits = self._decode(cache, tokens)

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[Prompt]) -> tuple[RowCache, Tensor]:
        """A row per prompt, and the logits [rows, V] of each prompt's last token."""
        trie = TokenTrie()
        paths = [trie.add(prompt.token_ids) for prompt in prompts]
        capture = PrefillCapture()
        hidden = self._lm.hidden_of(trie, kv_store=capture)
        last = torch.tensor([path[-1] for path in paths], device=hidden.device)
        return RowCache(capture, paths), hidden[last] @ self._lm.head.T

    @torch.inference_mode()
    def _decode(self, cache: RowCache, tokens: Sequence[int]) -> Tensor:
        """Append a token to each row; returns the logits [rows, V] that follow."""
        device = self._lm.device
        positions = cache.lengths.to(device)[:, None]
        mask = cache.start_step()
        hidden = self._lm.hidden(torch.tensor(tokens, device=device)[:, None], positions, mask, kv_store=cache)
        cache.end_step()
        return hidden[:, 0] @ self._lm.head.T


@torch.inference_mode()
def _draw(
    logits: Tensor, seeds: Sequence[NDArray[np.uint64]], params: SamplingParams, position: int
) -> list[tuple[list[int], list[float]]]:
    """For each row of logits [R, V]: the token drawn for each of its seeds, and that token's logprob."""
    logprobs = _sampling.log_softmax_(logits, params.temperature)
    if params.temperature == 0:
        best, tokens = logprobs.max(dim=-1)
        return [
            ([token] * len(row), [logprob] * len(row))
            for token, logprob, row in zip(tokens.tolist(), best.tolist(), seeds, strict=True)
        ]
    allowed = logprobs if params.top_p == 1 else _sampling.keep_nucleus(logprobs, params.top_p)
    drawn = []
    for full, masked, row in zip(logprobs.cpu().numpy(), allowed.cpu().numpy(), seeds, strict=True):
        chosen = _sampling.draw(masked, row, position)
        drawn.append((chosen.tolist(), full[chosen].tolist()))
    return drawn
