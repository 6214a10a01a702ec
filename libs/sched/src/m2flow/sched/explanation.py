"""Why this plan: in words, with the runners-up, what binds, and what would change the choice."""

from collections.abc import Iterator
from dataclasses import dataclass

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._build import Model, build
from m2flow.sched._build import scaled as scaled_model
from m2flow.sched._cluster import with_devices
from m2flow.sched._coarse import is_large
from m2flow.sched._plans import best_plans
from m2flow.sched._tree import shape
from m2flow.sched._words import plan_in_words
from m2flow.sched.planning import respond, searched

_MOST = 4.0  # a sensitivity is looked for between a quarter and four times the number
_STEPS = 5
_MOST_STAGES = 3


@dataclass(frozen=True)
class WhatIf:
    """A change of the inputs, what the best plan then takes and looks like."""

    what: str
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

    Blocks for some tens of searches.
    """
    asked = request.request if isinstance(request, sched_pb2.ExplainRequest) else request
    model = build(asked)
    candidates, seconds = searched(model)
    answer = respond(model, candidates, seconds)
    if not answer.plans:
        return sched_pb2.ExplainResponse(response=answer, text=answer.infeasible)
    response = sched_pb2.ExplainResponse(response=answer)
    base = _what_if(model, "as given")
    assert base is not None
    binding = _binding(model, base)
    response.binding_constraint = binding[0] if binding else "nothing: no change tried saves 1%"
    response.sensitivities.extend(_sensitivities(model, base))
    lines = plan_in_words(model, answer)
    lines += _mode_lines(model, base)
    lines.append(f"Binding: {response.binding_constraint}.")
    lines += [f"Else: {line}." for line in binding[1:4]]
    lines += [f"It flips: {s.what} x{s.factor:.2f} makes it {s.becomes}." for s in response.sensitivities]
    if not response.sensitivities:
        lines.append("It holds when any one stage's time, the switching or the memory moves fourfold either way.")
    lines += _device_lines(model, base)
    response.text = "\n".join(lines)
    return response


def _what_if(
    model: Model,
    what: str,
    *,
    scaled: dict[str, float] | None = None,
    memory: float = 1.0,
    switching: float = 1.0,
    cluster: sched_pb2.ClusterSpec | None = None,
    mode: str | None = None,
) -> WhatIf | None:
    """The best plan after a change; None if no plan fits then."""
    if scaled:
        return _best(scaled_model(model, scaled), what)
    request = sched_pb2.PlanRequest()
    request.CopyFrom(model.request)
    request.mode = request.mode if mode is None else mode
    if cluster is not None:
        request.cluster.CopyFrom(cluster)
    for node in request.cluster.nodes:
        for spec in node.devices:
            spec.memory_bytes *= memory
    for switch in request.profile.switches:
        switch.onload_s = max(switch.onload_s * switching, 1e-12)
        switch.offload_s = max(switch.offload_s * switching, 1e-12)
    return _best(build(request), what)


def _best(model: Model, what: str) -> WhatIf | None:
    best = best_plans(model.problem, model.request.mode, 1)
    if not best:
        return None
    return WhatIf(what, best[0].seconds, best[0].mode, shape(best[0].tree))


def _binding(model: Model, base: WhatIf) -> list[str]:
    """What would save 1% or more if it were easier, most first."""
    found: list[tuple[float, str]] = []
    for what, changed in _reliefs(model):
        if changed is not None and changed.seconds < 0.99 * base.seconds:
            saved = 1 - changed.seconds / base.seconds
            found.append((saved, f"{what} would save {saved:.1%} ({changed.seconds:.4g} s, {changed.shape})"))
    return [line for _, line in sorted(found, key=lambda f: -f[0])]


def _reliefs(model: Model) -> Iterator[tuple[str, WhatIf | None]]:
    for stage in (s for node in model.workflow.nodes for s in node.stages):
        yield f"{stage} a fifth faster", _what_if(model, stage, scaled={stage: 0.8})
    if any(pool.spec.memory_bytes for pool in model.pools.values()):
        yield "memory twice as large", _what_if(model, "memory", memory=2.0)
    if model.request.profile.switches:
        yield "switching for nothing", _what_if(model, "switching", switching=0.0)
    if model.problem.sync_s:
        request_free = _what_if(model, "sync")
        if request_free is not None:
            shorter = request_free.seconds - model.problem.sync_s
            yield "publishing weights for nothing", WhatIf("sync", shorter, request_free.mode, request_free.shape)


def _sensitivities(model: Model, base: WhatIf) -> list[sched_pb2.Sensitivity]:
    """The smallest change of each number, up and down, that makes another kind of plan the best."""
    found = []
    for stage in _weighty(model):
        for upward in (True, False):
            flip = _flip(model, base, upward, stage=stage)
            if flip is not None:
                found.append(sched_pb2.Sensitivity(what=f"{stage} seconds", factor=flip[0], becomes=flip[1]))
    for what in ("memory", "switching"):
        if what == "switching" and not model.request.profile.switches:
            continue
        if what == "memory" and model.problem.unlimited:
            continue
        for upward in (True, False):
            flip = _flip(model, base, upward, what=what)
            if flip is not None:
                found.append(sched_pb2.Sensitivity(what=what, factor=flip[0], becomes=flip[1]))
    return sorted(found, key=lambda s: max(s.factor, 1 / s.factor))


def _weighty(model: Model) -> list[str]:
    """The stages; of a large graph the three with the most work, whose times matter most."""
    stages = [s for node in model.workflow.nodes for s in node.stages]
    if not is_large(model.problem):
        return stages
    volumes = model.workflow.volumes
    return sorted(stages, key=lambda s: (-model.costs.estimate(s, volumes[s], 1).seconds, s))[:_MOST_STAGES]


def _flip(model: Model, base: WhatIf, upward: bool, *, stage: str = "", what: str = "") -> tuple[float, str] | None:
    """The factor at which the choice changes, by bisection, and what it becomes; None if it holds up to fourfold."""

    def ask(factor: float) -> WhatIf | None:
        if stage:
            return _what_if(model, stage, scaled={stage: factor})
        return _what_if(model, what, **{what: factor})  # type: ignore[arg-type]

    def differs(answer: WhatIf | None) -> bool:
        return answer is None or _kind(answer) != _kind(base)

    steady, flipped = 1.0, _MOST if upward else 1 / _MOST
    answer = ask(flipped)
    if not differs(answer):
        return None
    for _ in range(_STEPS):
        middle = (steady * flipped) ** 0.5
        tried = ask(middle)
        if differs(tried):
            flipped, answer = middle, tried
        else:
            steady = middle
    return flipped, "infeasible" if answer is None else f"{answer.mode} {answer.shape}"


def _kind(answer: WhatIf) -> str:
    """A plan's choice: its shape without chunk counts."""
    kept: list[str] = []
    skip = False
    for char in answer.shape:
        skip = char == "x" if not skip and kept and kept[-1] == " " else skip and char.isdigit()
        if not skip:
            kept.append(char)
    return answer.mode + "".join(kept)


def _mode_lines(model: Model, base: WhatIf) -> list[str]:
    lines = []
    for mode in ("temporal", "spatial", "hybrid"):
        if mode == base.mode or model.request.mode:
            continue
        other = _what_if(model, mode, mode=mode)
        if other is None:
            lines.append(f"No {mode} plan fits.")
        else:
            lines.append(
                f"Best {mode}: {other.seconds:.4g} s ({other.seconds / base.seconds - 1:+.1%}), {other.shape}."
            )
    return lines


def _device_lines(model: Model, base: WhatIf) -> list[str]:
    lines = []
    for kind, quantum, units in zip(model.kinds, model.problem.quanta, model.problem.grid.shape, strict=True):
        step = quantum if units > 1 else 1
        for change in (step, -step):
            cluster = with_devices(model.request.cluster, kind, change)
            if cluster is None:
                continue
            answer = _what_if(model, "devices", cluster=cluster)
            what = f"{step} {kind} device{'s' if step > 1 else ''} {'more' if change > 0 else 'fewer'}"
            if answer is None:
                lines.append(f"With {what}: no plan fits.")
            else:
                change_of = f"{answer.seconds / base.seconds - 1:+.1%}"
                lines.append(f"With {what}: {answer.seconds:.4g} s ({change_of}), {answer.shape}.")
    return lines
