"""A prefix tree of token sequences, so that what several sequences share is computed once.

A prompt's samples share the prompt; prompts share their worked examples; samples of a confident policy share their
first tokens. A causal model's hidden state at a token depends on the tokens before it and on nothing else, so one
node per distinct prefix gives every sequence its exact hidden states: nodes are packed into one row, and the
attention mask lets a node see its ancestors and itself.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenTrie:
    """Distinct prefixes of the sequences added, numbered so that a parent comes before its children.

    Attributes:
      tokens: token id per node.
      parents: node number of the parent per node, -1 for a first token.
      depths: position of the token in its sequence per node, from 0.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, sequence: Sequence[int]) -> NDArray[np.int64]:
        """Insert `sequence`; returns the node number of each of its tokens, int64 [len]."""
        path = np.empty(len(sequence), dtype=np.int64)
        node = -1
        for offset, token in enumerate(sequence):
            key = (node, token)
            child = self._children.get(key)
            if child is None:
                child = self._children[key] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(offset)
            path[offset] = node = child
        return path

    def count_new(self, sequence: Sequence[int]) -> int:
        """Number of nodes that adding `sequence` would make."""
        node = -1
        for offset, token in enumerate(sequence):
            child = self._children.get((node, token))
            if child is None:
                return len(sequence) - offset
            node = child
        return 0

    def visible(self, nodes: Sequence[int] | None = None) -> NDArray[np.bool_]:
        """bool [len(nodes), N]: entry (i, j) says that node i attends to node j, its ancestor or itself.

        `nodes` are node numbers in rising order; all of them unless given.
        """
        chosen = range(len(self)) if nodes is None else nodes
        rows = {node: row for row, node in enumerate(chosen)}
        mask = np.zeros((len(chosen), len(self)), dtype=np.bool_)
        for node, row in rows.items():
            ancestor = self.parents[node]
            while ancestor >= 0 and ancestor not in rows:
                mask[row, ancestor] = True
                ancestor = self.parents[ancestor]
            if ancestor >= 0:
                mask[row] |= mask[rows[ancestor]]
            mask[row, node] = True
        return mask
