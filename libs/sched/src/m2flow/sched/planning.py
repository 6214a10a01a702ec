"""Plans a request: search, placement, simulation of the best, and what was assumed."""

import time

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._build import Model, build
from m2flow.sched._infeasible import why_infeasible
from m2flow.sched._placement import estimates, execution_plan
from m2flow.sched._plans import Candidate, Found, best_plans
from m2flow.sched._tree import shape
from m2flow.sched.errors import InfeasibleError, InputError
from m2flow.sched.simulation import run_plan

NUM_RANKED = 20
_BEYOND = {"roofline": "a roofline says how its curve goes on", "extrapolated": "its curve is extended"}


def plan(request: sched_pb2.PlanRequest) -> sched_pb2.PlanResponse:
    """Returns the best plans of a request, best first, or why none fits (`PlanResponse.infeasible`).

    Args:
        request: `mode` "" asks for any plan, else for temporal, spatial or hybrid ones only. A stage without samples
            or model is assumed and noted; `max_staleness` over 0 allows asynchronous plans.

    Raises:
        InputError: a part of the request is contradictory.

    Blocks for milliseconds of CPU; see the README for measured figures. Oracle: tests/test_sched_exact.py.
    """
    model = build(request)
    found, seconds = searched(model)
    return respond(model, found, seconds)


def best_plan(request: sched_pb2.PlanRequest) -> sched_pb2.RankedPlan:
    """As `plan`, but the first plan alone.

    Raises:
        InputError: as `plan`.
        InfeasibleError: no plan fits.
    """
    response = plan(request)
    if not response.plans:
        raise InfeasibleError(response.infeasible)
    return response.plans[0]


def searched(model: Model) -> tuple[Found, float]:
    """The best plans of a model and the CPU seconds that finding them took."""
    start = time.process_time()
    found = best_plans(model.problem, model.request.mode, NUM_RANKED)
    return found, time.process_time() - start


def respond(model: Model, found: Found, seconds: float) -> sched_pb2.PlanResponse:
    """The answer: plans simulated, the fastest by simulation first, ties by the closed form."""
    response = sched_pb2.PlanResponse(
        search_s=seconds,
        exact=found.exact,
        lower_bound_s=found.lower_bound_s if found.plans else 0.0,
        device_quantum=model.problem.quanta[0],
    )
    response.notes.extend(model.costs.notes)
    ranked: list[tuple[sched_pb2.RankedPlan, Candidate]] = []
    for candidate in found.plans:
        plan = execution_plan(model, candidate)
        try:
            simulated = run_plan(model, plan)[0]
        except InputError as stuck:
            response.notes.append(f"{shape(candidate.tree)} is left out: {stuck}")
            continue
        peak = max(plan.prediction.peak_bytes.values(), default=0)
        plan.prediction.iteration_s = simulated
        answer = sched_pb2.RankedPlan(
            plan=plan,
            searched_s=candidate.seconds,
            simulated_s=simulated,
            peak_bytes=peak,
            shape=shape(candidate.tree),
        )
        ranked.append((answer, candidate))
    ranked.sort(key=lambda pair: pair[0].simulated_s)
    response.plans.extend(answer for answer, _ in ranked)
    if ranked:
        best = ranked[0][1]
        response.notes.extend(
            f"{stage}: asked far outside its samples; {_BEYOND[estimate.origin]}, {estimate.low_s:.3g} to "
            f"{estimate.high_s:.3g} s a chunk"
            for _, stage, estimate in estimates(model, best.tree)
            if model.costs.stages[stage].origin == "measured" and estimate.far
        )
    if not found.plans:
        response.infeasible = why_infeasible(model, found)
    light = model.problem.light
    if light and found.plans:
        response.notes.append(
            f"{', '.join(sorted(light))}: the least work of more groups than device units; may share in any mode"
        )
    return response
