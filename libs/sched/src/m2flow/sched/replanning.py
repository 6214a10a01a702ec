"""When a run should change its plan: only for a gain that is real and pays for the change."""

from dataclasses import dataclass

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._build import build
from m2flow.sched._placement import execution_plan
from m2flow.sched.planning import searched
from m2flow.sched.simulation import run_plan

_TRIED = 5  # of the search's best, by simulation


@dataclass(frozen=True)
class Replan:
    """What to do: `plan` is None to stay; seconds are of an iteration under the profile as it now is."""

    plan: flow_pb2.ExecutionPlan | None
    current_s: float
    best_s: float
    reason: str


def replan(
    request: sched_pb2.PlanRequest,
    current: flow_pb2.ExecutionPlan,
    *,
    remaining_iterations: int,
    switch_s: float,
    margin: float = 0.05,
) -> Replan:
    """Decides whether to leave the current plan, given the profile as measured so far. A pure function.

    Both plans are simulated with the same profile. The new one is taken if it is faster by more than `margin`, and if
    what it saves over the remaining iterations is more than `switch_s`. Going back needs the same margin the other
    way, so a workload that stays where it is never swings to and fro.

    Args:
        request: The inputs, with the updated profile; its mode limits the new plan.
        current: The plan that runs.
        remaining_iterations: Iterations that would still profit, 0 or more.
        switch_s: Seconds that changing plans costs: ranks started, state streamed, caches lost.
        margin: Relative gain that is taken for real; give more than the profile's noise.

    Raises:
        InputError: the request is contradictory, or the current plan does not run on it.
    """
    model = build(request)
    current_s = run_plan(model, current)[0]
    candidates = searched(model)[0].plans
    if not candidates:
        return Replan(None, current_s, current_s, "no plan was found; the current one stays")
    plans = [execution_plan(model, c) for c in candidates[:_TRIED]]
    seconds = [run_plan(model, p)[0] for p in plans]
    best = min(range(len(plans)), key=seconds.__getitem__)
    gain = current_s - seconds[best]
    if gain <= margin * current_s:
        reason = f"the best plan takes {seconds[best]:.3g} s, the current one {current_s:.3g} s: within {margin:.0%}"
        return Replan(None, current_s, seconds[best], reason)
    if gain * remaining_iterations <= switch_s:
        reason = (
            f"{remaining_iterations} iterations would save {gain * remaining_iterations:.3g} s, the change costs "
            f"{switch_s:.3g} s"
        )
        return Replan(None, current_s, seconds[best], reason)
    reason = f"{current.mode} takes {current_s:.3g} s, {plans[best].mode} would take {seconds[best]:.3g} s"
    return Replan(plans[best], current_s, seconds[best], reason)
