"""The rollout engine in plain torch: the default on CPU, and the reference for the others.

What makes it fast is what it does not compute. Prompts are prefilled as one tree, which is kept until the weights
change: worked examples that prompts share, a prompt that its samples share, and what was said so far in a conversation
that goes on are computed once. Decoding rows are distinct prefixes, not samples: samples that have drawn the same
tokens so far share a row, and part where they differ. Prompts come in and finished samples leave between steps. Logits
are computed for the rows' last positions alone.

Weights may change between two steps. Keys and values of older weights are then thrown away and computed anew (AReaL's
choice, arXiv 2505.24298; PipelineRL, arXiv 2509.19128, keeps them): a prefill buys logprobs that are those of one
policy for each token, so that a trainer can weigh them against its own.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from m2flow.worker.engines._causal_lm import CausalLM
from m2flow.worker.engines._logprobs import log_softmax_
from m2flow.worker.engines._weights import copy_weights, num_bytes
from m2flow.worker.engines.precision import generation_dtype
from m2flow.worker.engines.rollout import _sampling
from m2flow.worker.engines.rollout._cache import PrefixCache, RowCache
from m2flow.worker.engines.rollout.engine import Completion, More, Prompt, SamplingParams


@dataclass(frozen=True)
class TorchRolloutConfig:
    """Attributes:
    path: Hugging Face model directory.
    dtype: "float32", "bfloat16", or "auto": what this machine generates fastest in.
    device: a torch device.
    max_samples: most samples decoded together; more wait for room. Memory and time, not results.
    max_prefill_tokens: most tokens of a packed prefill; the attention scores grow with their square.
    max_cached_tokens: most tokens of prompts whose keys and values are kept between calls.
    """

    path: str
    dtype: str = "auto"
    device: str = "cpu"
    max_samples: int = 256
    max_prefill_tokens: int = 4096
    max_cached_tokens: int = 4096


class _Sample:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def completion(self, stop_token_ids: Sequence[int]) -> Completion:
        return Completion(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            token_versions=np.array(self.versions, dtype=np.int32),
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
        self._prefixes = PrefixCache(config.max_cached_tokens)

    @property
    def dtype(self) -> torch.dtype:
        return self._lm.head.dtype

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        copy_weights(self._lm.model, weights)
        self._prefixes.clear()
        self.policy_version = version

    def resident_bytes(self) -> int:
        return num_bytes(self._lm.model) + self._prefixes.num_bytes()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        more: More | None = None,
        safe_point: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, list[Completion]]]:
        waiting = deque(enumerate(prompts))
        num_seen, active = len(prompts), 0
        rows: list[_Row] = []
        cache, logits = RowCache(), self._lm.head.new_empty(0, len(self._lm.head))
        while True:
            room = self._config.max_samples - active
            if more is not None and not waiting and room > 0:
                waiting.extend(enumerate(more(room), num_seen))
                num_seen += len(waiting)
            admitted = [_Running(index, prompt) for index, prompt in self._admit(waiting, room, idle=not active)]
            if admitted:
                active += sum(len(running.samples) for running in admitted)
                rows += [_Row(running, list(range(len(running.samples)))) for running in admitted]
                logits = self._prefill(cache, [running.prompt.token_ids for running in admitted], logits)
            if not rows:
                return
            version = self.policy_version
            rows, tokens, parents, done = _advance(rows, logits, params, version)
            for running in done:
                active -= len(running.samples)
                yield running.index, [sample.completion(params.stop_token_ids) for sample in running.samples]
            cache.select(parents)
            if safe_point is not None:
                safe_point()
            if not rows:
                logits = logits[:0]
            elif self.policy_version == version:
                logits = self._decode(cache, tokens)
            else:
                logits = self._begin_anew(cache, rows)

    def _admit(self, waiting: deque[tuple[int, Prompt]], room: int, *, idle: bool) -> Iterator[tuple[int, Prompt]]:
        """Takes from `waiting` what the two limits let in now; an idle engine takes one, whatever its size."""
        tokens = self._config.max_prefill_tokens
        while waiting:
            prompt = waiting[0][1]
            room -= len(prompt.seeds)
            tokens -= self._prefixes.count_new(prompt.token_ids)
            if not idle and (room < 0 or tokens < 0):
                return
            idle = False
            yield waiting.popleft()

    @torch.inference_mode()
    def _prefill(self, cache: RowCache, prompts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Adds a row per prompt; returns `logits` [rows, V] with those of each prompt's last token at the end."""
        paths, hidden = self._prefixes.prefill(self._lm, prompts)
        cache.add(self._prefixes, paths)
        return torch.cat([logits, hidden @ self._lm.head.T])

    def _begin_anew(self, cache: RowCache, rows: Sequence["_Row"]) -> Tensor:
        """Computes all that the rows hold with the present weights; returns the logits [rows, V] that follow."""
        cache.clear()
        logits = self._lm.head.new_empty(0, len(self._lm.head))
        waiting = deque(row.token_ids for row in rows)
        while waiting:
            some = [waiting.popleft()]
            tokens = self._prefixes.count_new(some[0])
            while waiting and tokens + self._prefixes.count_new(waiting[0]) <= self._config.max_prefill_tokens:
                tokens += self._prefixes.count_new(waiting[0])
                some.append(waiting.popleft())
            logits = self._prefill(cache, some, logits)
        return logits

    @torch.inference_mode()
    def _decode(self, cache: RowCache, tokens: Sequence[int]) -> Tensor:
        """Append a token to each row; returns the logits [rows, V] that follow."""
        device = self._lm.device
        positions = cache.lengths.to(device)[:, None]
        mask = cache.start_step()
        hidden = self._lm.hidden(torch.tensor(tokens, device=device)[:, None], positions, mask, kv_store=cache)
        cache.end_step()
        return hidden[:, 0] @ self._lm.head.T


class _Running:
    """A prompt whose samples are being drawn; those that have not ended have `position` tokens each."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index = index
        self.prompt = prompt
        self.seeds = np.array([seed % 2**64 for seed in prompt.seeds], dtype=np.uint64)
        self.samples = [_Sample() for _ in prompt.seeds]
        self.unfinished = len(self.samples)
        self.position = 0


@dataclass
class _Row:
    """A distinct prefix that is being continued, and the samples (of one prompt) that have it."""

    running: _Running
    samples: list[int]

    @property
    def token_ids(self) -> list[int]:
        """Its prompt and what its samples have drawn."""
        return [*self.running.prompt.token_ids, *self.running.samples[self.samples[0]].tokens]


def _advance(
    rows: Sequence[_Row], logits: Tensor, params: SamplingParams, version: int
) -> tuple[list[_Row], list[int], list[int], list[_Running]]:
    """Draws a token for each sample of each row from logits [R, V] of weights of `version`.

    Returns the rows that go on, with the token that each begins with and the row that each comes of; and the prompts
    whose last sample has ended.
    """
    children: list[_Row] = []
    tokens: list[int] = []
    parents: list[int] = []
    drawn = _draw(logits, rows, params)
    every = list(dict.fromkeys(row.running for row in rows))
    for number, row in enumerate(rows):
        running = row.running
        followers: dict[int, list[int]] = {}
        for sample, token, logprob in zip(row.samples, *drawn[number], strict=True):
            running.samples[sample].tokens.append(token)
            running.samples[sample].logprobs.append(logprob)
            running.samples[sample].versions.append(version)
            if token in params.stop_token_ids or running.position + 1 == params.max_new_tokens:
                running.unfinished -= 1
            else:
                followers.setdefault(token, []).append(sample)
        for token, followed in followers.items():
            children.append(_Row(running, followed))
            tokens.append(token)
            parents.append(number)
    for running in every:
        running.position += 1
    return children, tokens, parents, [running for running in every if not running.unfinished]


@torch.inference_mode()
def _draw(logits: Tensor, rows: Sequence[_Row], params: SamplingParams) -> list[tuple[list[int], list[float]]]:
    """For each row of logits [R, V]: the token drawn for each of its samples, and that token's logprob."""
    logprobs = log_softmax_(logits, params.temperature)
    if params.temperature == 0:
        best, tokens = logprobs.max(dim=-1)
        return [
            ([token] * len(row.samples), [logprob] * len(row.samples))
            for token, logprob, row in zip(tokens.tolist(), best.tolist(), rows, strict=True)
        ]
    allowed = logprobs if params.top_p == 1 else _sampling.keep_nucleus(logprobs, params.top_p)
    drawn = []
    for full, masked, row in zip(logprobs.cpu().numpy(), allowed.cpu().numpy(), rows, strict=True):
        chosen = _sampling.draw(masked, row.running.seeds[row.samples], row.running.position)
        drawn.append((chosen.tolist(), full[chosen].tolist()))
    return drawn
