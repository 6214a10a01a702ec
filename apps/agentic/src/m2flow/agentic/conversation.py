"""A conversation as tokens: what was sampled and what was fed, in order, and never tokenised again.

It travels as an item whose fields only grow at the end:

    prompt_ids       int32 [P]  examples and question
    completion_ids   int32 [T]  all that was said since, by the model and by its tools
    loss_mask        bool [T]   which of them the model said
    logprobs         float32 [T] of the policy that said them; 0 where a tool spoke
    token_versions   int32 [T]  of that policy; -1 where a tool spoke
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from m2flow.worker import Item

__all__ = ["COUNTS", "counted", "opened", "said", "told"]

COUNTS = (
    "agent/turns",
    "agent/answers",
    "tool/calls",
    "tool/errors",
    "tool/timeouts",
    "tool/deaths",
    "tool/unknown",
    "tool/too_long",
)
"""What a conversation counts, each from 0, so that metrics have every name in every step."""


def opened(problem: Item, number: int, size: int, *, prompt_ids: Sequence[int], seed: int) -> Item:
    """The `number`-th of `size` conversations about a problem, to be gathered by "prompt". Nothing was said yet."""
    return problem.child(
        number,
        size,
        "prompt",
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        completion_ids=np.empty(0, dtype=np.int32),
        loss_mask=np.empty(0, dtype=np.bool_),
        logprobs=np.empty(0, dtype=np.float32),
        token_versions=np.empty(0, dtype=np.int32),
        seed=seed,
        turn=0,
        counts=dict.fromkeys(COUNTS, 0),
    )


def said(conversation: Item) -> Item:
    """The conversation with the model's turn at its end: `turn_ids`, `turn_logprobs` and `turn_versions`."""
    fields = conversation.fields
    grown = _grown(conversation, fields["turn_ids"], fields["turn_logprobs"], fields["turn_versions"], own=True)
    return counted(grown.with_fields(turn=fields["turn"] + 1), "agent/turns")


def told(conversation: Item, token_ids: Sequence[int]) -> Item:
    """The conversation with what a tool said at its end."""
    size = len(token_ids)
    said_by_none = np.zeros(size, np.float32), np.full(size, -1, np.int32)
    return _grown(conversation, np.array(token_ids, dtype=np.int32), *said_by_none, own=False)


def counted(conversation: Item, *names: str) -> Item:
    """The conversation with one more of each of these counts."""
    counts = dict(conversation.fields["counts"])
    for name in names:
        counts[name] += 1
    return conversation.with_fields(counts=counts)


def _grown(
    conversation: Item,
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    versions: NDArray[np.int32],
    *,
    own: bool,
) -> Item:
    fields = conversation.fields
    return conversation.with_fields(
        completion_ids=np.concatenate([fields["completion_ids"], token_ids]),
        loss_mask=np.concatenate([fields["loss_mask"], np.full(len(token_ids), own)]),
        logprobs=np.concatenate([fields["logprobs"], logprobs]),
        token_versions=np.concatenate([fields["token_versions"], versions]),
    )
