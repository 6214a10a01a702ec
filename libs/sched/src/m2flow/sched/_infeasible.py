"""Why no plan fits: what is missing, by how much, and which single change would make one fit."""

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._build import Model, build
from m2flow.sched._plans import best_plans

_DOUBLINGS = 7


def why_infeasible(model: Model) -> str:
    """One paragraph: the shortage, then every single change that was tried and makes a plan fit."""
    changes = _changes(model)
    remedy = "; or ".join(changes) if changes else "no single change of devices, memory or offload makes one fit"
    return f"{_shortage(model)}. What would make it fit: {remedy}."


def _shortage(model: Model) -> str:
    for kind in model.kinds:
        have = len(model.pools[kind].ids)
        for group in model.workflow.graph.groups:
            need = max(group.min_devices, group.devices_per_rank, 1)
            if group.device_kind == kind and need > have:
                return (
                    f"no plan fits: group {group.name!r} needs {need} devices of kind {kind!r}, there are {have}, "
                    f"{need - have} are missing"
                )
    needed = smallest_memory(model)
    if needed is not None:
        kind, bytes_needed, shape_bytes = needed
        return (
            f"no plan fits: the plan that needs least holds {_bytes(bytes_needed)} on a {kind} device, which has "
            f"{_bytes(shape_bytes)}: {_bytes(bytes_needed - shape_bytes)} are missing"
        )
    wanted = f"{model.request.mode} " if model.request.mode else ""
    return f"no {wanted}plan exists for these groups on {_counts(model)}"


def smallest_memory(model: Model) -> tuple[str, float, float] | None:
    """Kind, bytes on one device of the least demanding plan, and bytes that the device has; None if memory is enough.

    Found by raising all memories together until a plan fits.
    """
    if not _fits(model, memory=float("inf")):
        return None
    low, high = 1.0, 2.0
    while not _fits(model, memory=high):
        low, high = high, high * 2
    for _ in range(10):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _fits(model, memory=middle) else (middle, high)
    known = [(k, model.pools[k].spec.memory_bytes) for k in model.kinds if model.pools[k].spec.memory_bytes]
    kind, have = min(known, key=lambda k: k[1])
    return kind, have * high, have


def _changes(model: Model) -> list[str]:
    found = []
    if _fits(model, devices=2**_DOUBLINGS) or _fits(model, memory=float("inf")):
        factor = 1.0
        for _ in range(_DOUBLINGS):
            factor *= 2
            if _fits(model, devices=int(factor)):
                found.append(f"{int(factor)} times the devices ({_counts(model, int(factor))})")
                break
        memory = smallest_memory(model)
        if memory is not None:
            found.append(f"{memory[0]} devices with {_bytes(memory[1])}")
        for group in model.workflow.graph.groups:
            if not group.can_offload and _fits(model, offload=group.name):
                found.append(f"let group {group.name!r} offload (can_offload)")
        if model.request.mode and _fits(model, any_mode=True):
            found.append("allow any mode")
    return found


def _fits(model: Model, *, devices: int = 1, memory: float = 1.0, offload: str = "", any_mode: bool = False) -> bool:
    request = sched_pb2.PlanRequest()
    request.CopyFrom(model.request)
    request.device_quantum = model.problem.quanta[0] * devices  # as many units: what fits does not need finer ones
    for node in request.cluster.nodes:
        node.count = max(node.count, 1) * devices
        for spec in node.devices:
            spec.memory_bytes = 0.0 if memory == float("inf") else spec.memory_bytes * memory
    for group in request.workflow.groups:
        group.can_offload |= group.name == offload
    if any_mode:
        request.mode = ""
    changed = build(request)
    return bool(best_plans(changed.problem, request.mode, 1))


def _counts(model: Model, factor: int = 1) -> str:
    return ", ".join(f"{len(model.pools[k].ids) * factor} {k}" for k in model.kinds)


def _bytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size:.3g} bytes"
