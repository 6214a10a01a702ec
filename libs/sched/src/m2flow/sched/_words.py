"""A plan and its runners-up in words."""

from collections.abc import Iterable

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._build import Model

_RUNNERS_UP = 3


def plan_in_words(model: Model, answer: sched_pb2.PlanResponse) -> list[str]:
    """Lines: the plan, its groups, its predicted times, how sure it is, and the next best."""
    best = answer.plans[0]
    plan = best.plan
    lines = [
        f"{plan.mode.capitalize()}: {best.shape}, {best.simulated_s:.4g} s an iteration "
        f"(closed form {best.searched_s:.4g} s, {best.searched_s / best.simulated_s - 1:+z.1%}; "
        f"stage estimates give +-{plan.prediction.error_s:.2g} s)."
    ]
    if plan.staleness:
        lines.append(f"Asynchronous: up to {plan.staleness} iterations start before their weights are there.")
    published = {p.name for p in model.workflow.publishes}
    granularity = {s.stage: s.granularity for s in plan.stages}
    for group in plan.groups:
        stages = [s.name for s in model.workflow.graph.stages if s.group == group.group and s.name in granularity]
        work = ", ".join(f"{s} by {granularity[s]}" for s in stages if s not in published)
        rest = "offloaded between turns" if group.residency == flow_pb2.RESIDENCY_OFFLOADED else "resident"
        lines.append(f"  {group.group}: {ranges(group.device_ids)}, {rest}; {work}.")
    if best.peak_bytes:
        lines.append(f"  Memory: {best.peak_bytes / 2**30:.1f} GiB on the fullest device.")
    for other in answer.plans[1 : 1 + _RUNNERS_UP]:
        held = f", {other.peak_bytes / 2**30:.1f} GiB" if other.peak_bytes else ""
        slower = other.simulated_s / best.simulated_s - 1
        lines.append(f"Runner-up: {other.shape}, {other.simulated_s:.4g} s ({slower:+z.1%}){held}, {other.plan.mode}.")
    proof = "Exact" if answer.exact else f"Within {best.searched_s / answer.lower_bound_s - 1:.1%} of the best"
    lines.append(
        f"{proof} for device counts in multiples of {answer.device_quantum}; no plan of them takes less than "
        f"{answer.lower_bound_s:.4g} s by the closed form."
    )
    return lines + [f"Note: {note}." for note in answer.notes]


def ranges(ids: Iterable[int]) -> str:
    """ "0-3,6" for [0, 1, 2, 3, 6]."""
    numbers = sorted(ids)
    parts: list[str] = []
    start = previous = None
    for number in [*numbers, None]:
        if previous is not None and number != previous + 1:
            parts.append(f"{start}-{previous}" if start != previous else f"{start}")
            start = number
        elif start is None:
            start = number
        previous = number
    return ",".join(parts)
