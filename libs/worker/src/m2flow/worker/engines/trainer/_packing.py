"""Samples into microbatches, each one prefix tree: what samples share is computed, and differentiated, once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m2flow.worker.engines._trie import TokenTrie
from m2flow.worker.engines.trainer.engine import Sample


@dataclass(frozen=True)
class Microbatch:
    """B samples as one tree, and which node predicts which token.

    Attributes:
      samples: positions of the B samples in what was packed.
      trie: the nodes to run the model on: prompts and completions but for their last tokens.
      rows: int64 [R], the nodes whose logits are needed, each once.
      pair_rows, pair_tokens: int64 [M], the distinct (index into rows, next token) pairs, ordered by row.
      pairs: int64 [B, T], the pair of each completion token; 0 where padded.
      valid: bool [B, T], where there is a completion token.
      mask: bool [B, T], where it also has loss_mask.
    """

    samples: Sequence[int]
    trie: TokenTrie
    rows: NDArray[np.int64]
    pair_rows: NDArray[np.int64]
    pair_tokens: NDArray[np.int64]
    pairs: NDArray[np.int64]
    valid: NDArray[np.bool_]
    mask: NDArray[np.bool_]


def pack(samples: Sequence[Sample], max_tokens: int) -> Iterator[Microbatch]:
    """Yield microbatches of consecutive samples of at most `max_tokens` nodes each; a longer sample goes alone."""
    trie, numbers, paths = TokenTrie(), list[int](), list[NDArray[np.int64]]()
    for number, sample in enumerate(samples):
        inputs = [*map(int, sample.prompt_ids), *map(int, sample.completion_ids[:-1])]
        if numbers and len(trie) + trie.count_new(inputs) > max_tokens:
            yield _microbatch(samples, numbers, trie, paths)
            trie, numbers, paths = TokenTrie(), [], []
        paths.append(trie.add(inputs))
        numbers.append(number)
    if numbers:
        yield _microbatch(samples, numbers, trie, paths)


def _microbatch(
    samples: Sequence[Sample], numbers: list[int], trie: TokenTrie, paths: list[NDArray[np.int64]]
) -> Microbatch:
    longest = max(len(samples[number].completion_ids) for number in numbers)
    shape = (len(numbers), longest)
    nodes, tokens = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    valid, mask = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for row, (number, path) in enumerate(zip(numbers, paths, strict=True)):
        sample = samples[number]
        length = len(sample.completion_ids)
        nodes[row, :length] = path[-length:]
        tokens[row, :length] = sample.completion_ids
        valid[row, :length] = True
        mask[row, :length] = True if sample.loss_mask is None else sample.loss_mask
    keys, inverse = np.unique(np.stack([nodes[valid], tokens[valid]]), axis=1, return_inverse=True)
    rows, pair_rows = np.unique(keys[0], return_inverse=True)
    pairs = np.zeros(shape, np.int64)
    pairs[valid] = inverse.reshape(-1)
    return Microbatch(numbers, trie, rows, pair_rows.reshape(-1), keys[1], pairs, valid, mask)
