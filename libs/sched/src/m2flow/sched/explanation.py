"""Why this plan: in words, with the runners-up, what binds, and what would change the choice."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._build import Model, build, what_if
from m2flow.sched._cluster import MOST_DEVICES
from m2flow.sched._coarse import is_large
from m2flow.sched._plans import Found, best_plans
from m2flow.sched._tree import shape
from m2flow.sched._words import plan_in_words
from m2flow.sched.planning import respond, searched

_MOST = 4.0  # a sensitivity is looked for between a quarter and four times the number,
_STEPS = 6  # in so many steps,
_CLOSE = 1.005  # of which the first that flips the choice is halved until the number is this close
_MOST_STAGES = 3
_SEARCHES = 3  # of a what-if, from the pins of the best plan on
_FIRST_SEARCHES = 64  # of one, as long as no plan fits


@dataclass(frozen=True)
class Choice:
    """What the best plan takes and looks like."""

    seconds: float
    mode: str
    shape: str


def explain(request: sched_pb2.ExplainRequest | sched_pb2.PlanRequest) -> sched_pb2.ExplainResponse:
    """Returns the plans of a request and why the first one is first.

    The text names the plan and each group's devices, the predicted times, the runners-up, the best of each other mode,
    the binding constraint (what, made easier, would save most), how far each number of the profile may move before
    another plan wins, and what more or fewer devices bring.

    Raises:
        InputError: a part of the request is contradictory.

    Blocks for a hundred searches or so: mostly under a second of CPU.
    """
    asked = request.request if isinstance(request, sched_pb2.ExplainRequest) else request
    model = build(asked)
    found, seconds = searched(model)
    answer = respond(model, found, seconds)
    if not answer.plans:
        return sched_pb2.ExplainResponse(response=answer, text=answer.infeasible)
    response = sched_pb2.ExplainResponse(response=answer)
    model = replace(model, problem=replace(model.problem, near=found.plans[0].pins))
    base = _best(model)
    assert base is not None
    binding = _binding(model, base)
    response.binding_constraint = binding[0] if binding else "nothing: no change tried saves 1%"
    response.sensitivities.extend(_sensitivities(model, base))
    lines = plan_in_words(model, answer)
    lines.append(f"What follows is by the closed form alone, of which the best plan takes {base.seconds:.4g} s.")
    lines += _mode_lines(model, base)
    lines.append(f"Binding: {response.binding_constraint}.")
    lines += [f"Else: {line}." for line in binding[1:4]]
    lines += [f"It flips: {s.what} x{s.factor:.3g} makes it {s.becomes}." for s in response.sensitivities]
    if not response.sensitivities:
        lines.append(
            "It holds when any one stage's time, the switching or the memory moves fourfold either way, in "
            f"{_STEPS} steps."
        )
    lines += _device_lines(model, base)
    response.text = "\n".join(lines)
    return response


def _found(model: Model, mode: str = "") -> Found:
    """The best plan of a mode ("" for the one asked for)."""
    return best_plans(model.problem, mode or model.request.mode, 1, _SEARCHES, _FIRST_SEARCHES)


def _choice(found: Found) -> Choice | None:
    best = found.plans[0] if found.plans else None
    return Choice(best.seconds, best.mode, shape(best.tree)) if best else None


def _best(model: Model) -> Choice | None:
    return _choice(_found(model))


def _none(found: Found) -> str:
    return "fits" if found.exact else f"was found in {found.searches} searches"


def _binding(model: Model, base: Choice) -> list[str]:
    """What would save 1% or more if it were easier, most first."""
    found: list[tuple[float, str]] = []
    for what, changed in _reliefs(model, base):
        if changed is not None and changed.seconds < 0.99 * base.seconds:
            saved = 1 - changed.seconds / base.seconds
            found.append((saved, f"{what} would save {saved:.1%} ({changed.seconds:.4g} s, {changed.shape})"))
    return [line for _, line in sorted(found, key=lambda f: -f[0])]


def _reliefs(model: Model, base: Choice) -> Iterator[tuple[str, Choice | None]]:
    for stage in (s for node in model.workflow.nodes for s in node.stages):
        yield f"{stage} a fifth faster", _best(what_if(model, seconds={stage: 0.8}))
    if any(pool.spec.memory_bytes for pool in model.pools.values()):
        yield "memory twice as large", _best(_with_memory(model, 2.0))
    if model.request.profile.switches:
        yield "switching for nothing", _best(what_if(model, switching=0.0))
    if model.problem.sync_s:
        yield "publishing weights for nothing", replace(base, seconds=base.seconds - model.problem.sync_s)


def _sensitivities(model: Model, base: Choice) -> list[sched_pb2.Sensitivity]:
    """The smallest change of each number, up and down, that makes another kind of plan the best."""
    changes: dict[str, Callable[[float], Model]] = {
        f"{stage} seconds": lambda factor, stage=stage: what_if(model, seconds={stage: factor})  # type: ignore[misc]
        for stage in _weighty(model)
    }
    if not model.problem.unlimited:
        changes["memory"] = lambda factor: _with_memory(model, factor)
    if model.request.profile.switches:
        changes["switching"] = lambda factor: what_if(model, switching=factor)
    steps = 1 if is_large(model.problem) else _STEPS
    found = []
    for what, change in changes.items():
        for furthest in (_MOST, 1 / _MOST):
            flip = _flip(base, change, furthest, steps)
            if flip is not None:
                found.append(sched_pb2.Sensitivity(what=what, factor=flip[0], becomes=flip[1]))
    return sorted(found, key=lambda s: max(s.factor, 1 / s.factor))


def _with_memory(model: Model, factor: float) -> Model:
    return what_if(model, memory=dict.fromkeys(model.kinds, factor))


def _weighty(model: Model) -> list[str]:
    """The stages; of a large graph the three with the most work, whose times matter most."""
    stages = [s for node in model.workflow.nodes for s in node.stages]
    if not is_large(model.problem):
        return stages
    volumes = model.workflow.volumes
    return sorted(stages, key=lambda s: (-model.costs.stages[s].estimate(volumes[s], 1).seconds, s))[:_MOST_STAGES]


def _flip(base: Choice, change: Callable[[float], Model], furthest: float, steps: int) -> tuple[float, str] | None:
    """The first factor on the way to `furthest` at which the choice changes, and what it becomes; None if it holds."""
    held = 1.0
    for step in range(1, steps + 1):
        flipped = furthest ** (step / steps)
        answer = _best(change(flipped))
        if _kind(answer) != _kind(base):
            break
        held = flipped
    else:
        return None
    while max(held / flipped, flipped / held) > _CLOSE:
        middle = (held * flipped) ** 0.5
        tried = _best(change(middle))
        if _kind(tried) == _kind(base):
            held = middle
        else:
            flipped, answer = middle, tried
    return flipped, "infeasible" if answer is None else f"{answer.mode} {answer.shape}"


def _kind(answer: Choice | None) -> str:
    """A plan's choice: its mode, and its shape without chunk counts."""
    return "" if answer is None else answer.mode + re.sub(r" x\d+", "", answer.shape)


def _mode_lines(model: Model, base: Choice) -> list[str]:
    lines = []
    for mode in ("temporal", "spatial", "hybrid"):
        if mode == base.mode or model.request.mode:
            continue
        found = _found(model, mode)
        other = _choice(found)
        if other is None:
            lines.append(f"No {mode} plan {_none(found)}.")
        else:
            lines.append(
                f"Best {mode}: {other.seconds:.4g} s ({other.seconds / base.seconds - 1:+z.1%}), {other.shape}."
            )
    return lines


def _device_lines(model: Model, base: Choice) -> list[str]:
    lines = []
    total = sum(len(pool.ids) for pool in model.pools.values())
    for kind, quantum, units in zip(model.kinds, model.problem.quanta, model.problem.grid.shape, strict=True):
        step, have = quantum if units > 1 else 1, len(model.pools[kind].ids)
        for change in (step, -step):
            if have + change < 1 or total + change > MOST_DEVICES:
                continue
            found = _found(what_if(model, devices={kind: have + change}))
            answer = _choice(found)
            what = f"{step} {kind} device{'s' if step > 1 else ''} {'more' if change > 0 else 'fewer'}"
            if answer is None:
                lines.append(f"With {what}: no plan {_none(found)}.")
            else:
                change_of = f"{answer.seconds / base.seconds - 1:+z.1%}"
                lines.append(f"With {what}: {answer.seconds:.4g} s ({change_of}), {answer.shape}.")
    return lines
