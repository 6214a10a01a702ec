"""What a step's receipts come to: numbers under the field's names, and a row for each episode."""

from collections.abc import Sequence

from m2flow.apps.app import StepOutcome
from m2flow.worker import Item

__all__ = ["measure"]

_LOST = "every episode of the step died with its process: nothing was learned"


def measure(receipts: Sequence[Item], *, num_episodes: int) -> StepOutcome:
    """Returns the outcome of what the learner gave back, of `num_episodes` that were begun.

    Those that are missing were dropped with the process that they ran in: `env/episodes_dropped`.
    """
    rows = [_row(receipt, place) for receipt in receipts for place in range(len(receipt.fields["returns"]))]
    dropped = {"env/episodes": float(len(rows)), "env/episodes_dropped": float(num_episodes - len(rows))}
    if not rows:
        return StepOutcome({"critic/score/mean": float("nan"), **dropped}, [], volume=0.0, warning=_LOST)
    (receipt,) = receipts
    fields = receipt.fields
    num_steps = float(sum(fields["lengths"]))
    metrics = {
        "critic/score/mean": _mean(fields["returns"]),
        "critic/score/max": max(fields["returns"]),
        "critic/score/min": min(fields["returns"]),
        "env/success_once": _mean(fields["success_once"]),
        "env/success_at_end": _mean(fields["success_at_end"]),
        "env/episode_len": num_steps / len(rows),
        "env/terminated": _mean(fields["terminated"]),
        "env/truncated": 1.0 - _mean(fields["terminated"]),
        "env/steps": num_steps,
        **dropped,
        **fields["metrics"],
    }
    return StepOutcome(metrics, rows, volume=num_steps)


def _row(receipt: Item, place: int) -> dict[str, object]:
    fields = receipt.fields
    return {
        "episode": place,
        "reward": round(fields["returns"][place], 4),
        "steps": fields["lengths"][place],
        "ended": "terminated" if fields["terminated"][place] else "truncated",
        "success": fields["success_at_end"][place],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
