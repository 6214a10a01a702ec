"""What a step's receipts come to: numbers by verl's names, and rollouts to look at."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from m2flow.apps.app import StepOutcome
from m2flow.worker import Item

__all__ = ["measure"]

_NO_SIGNAL = (
    "all samples of every prompt have equal rewards, so there is no signal to learn from: choose an easier or harder"
    " task, or more samples_per_prompt"
)

# What a reward function's failures are counted by.
_FAILURES = ("reward/errors", "reward/timeouts", "reward/deaths")


def measure(receipts: Sequence[Item]) -> StepOutcome:
    """Returns the outcome of the groups that an actor gave back; the metrics of several optimiser steps are averaged.

    `groups/all_equal` counts the groups whose rewards are all the same, which teach nothing. Lengths are of the
    policy's own tokens. What samples counted themselves (`counts`, by name) is summed; `reward_part/NAME` is the mean
    of that part of a reward over the samples that have it.
    `staleness` is how many updates the weights that drew a token were behind those that its step began to train, over
    tokens; `staleness/swapped` counts samples in the middle of which weights changed, `staleness/dropped` those that
    were too stale to be learned from.
    """
    by_seq = {receipt.seq: receipt for receipt in receipts}  # epochs give a receipt each
    groups = [by_seq[seq].fields for seq in sorted(by_seq)]
    rewards = [reward for group in groups for reward in group["rewards"]]
    lengths = [length for group in groups for length in group["lengths"]]
    clipped = [cut for group in groups for cut in group["clipped"]]
    prompt_lengths = [group["prompt_length"] for group in groups]
    given = sum(group["prompt_length"] * len(group["lengths"]) + sum(group["fed"]) for group in groups)
    versions = [spans for group in groups for spans in group["versions"]]
    staleness = Counter[int]()
    for receipt in by_seq.values():
        for version, num_tokens in itertools.chain(*receipt.fields["versions"]):
            staleness[receipt.iteration - version] += num_tokens
    counts: Counter[str] = Counter()
    for group in groups:
        for counted in group["counts"]:
            counts.update(counted)
    parts: dict[str, list[float]] = defaultdict(list)
    for named in [named for group in groups for named in group["parts"]]:
        for name, value in named.items():
            parts[name].append(value)
    metrics = {
        "critic/score/mean": _mean(rewards),
        "critic/score/max": max(rewards),
        "critic/score/min": min(rewards),
        "response_length/mean": _mean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": _mean(clipped),
        "prompt_length/mean": _mean(prompt_lengths),
        "groups/count": float(len(groups)),
        "groups/all_equal": float(sum(len(set(group["rewards"])) == 1 for group in groups)),
        "staleness/mean": sum(updates * num_tokens for updates, num_tokens in staleness.items()) / staleness.total(),
        "staleness/max": float(max(staleness)),
        "staleness/swapped": float(sum(len(spans) > 1 for spans in versions)),
        "staleness/dropped": float(sum(group["too_stale"] for group in groups)),
        "tokens": float(given + sum(lengths)),
        **{name: float(count) for name, count in counts.items()},
        **{f"reward_part/{name}": _mean(values) for name, values in parts.items()},
    }
    steps: dict[str, list[float]] = defaultdict(list)
    for receipt in receipts:
        for name, value in receipt.fields["metrics"].items():
            steps[name].append(value)
    rows = [
        {
            "prompt": group["prompt"],
            "completion": completion,
            "answer": group["answer"],
            "reward": reward,
            "policy_versions": spans,
        }
        for group in groups
        for completion, reward, spans in zip(group["completions"], group["rewards"], group["versions"], strict=True)
    ]
    means = {name: _mean(values) for name, values in steps.items()}
    silent = metrics["groups/all_equal"] == metrics["groups/count"] and "supervised/nll" not in means
    warnings = [_NO_SIGNAL] if silent else []
    if failed := sum(counts[name] for name in _FAILURES):
        warnings = [f"the reward function failed on {failed} of {len(rewards)} samples: logs/reward.*.log says why"]
    if dropped := sum(group["too_stale"] for group in groups):
        warnings.append(f"{dropped} of {len(rewards)} samples were staler than loss.max_staleness and taught nothing")
    return StepOutcome(metrics | means, rows, volume=metrics["tokens"], warning="; ".join(warnings))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
