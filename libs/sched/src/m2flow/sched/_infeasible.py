"""Why no plan fits: what is missing, by how much, and which single change would make one fit."""

from m2flow.sched._build import Model, what_if
from m2flow.sched._cluster import MOST_DEVICES
from m2flow.sched._plans import Found, best_plans

_MOST_TIMES = 128  # as many devices as a change may ask for
_MOST_MEMORY = 2.0**20  # as much memory
_SEARCHES = 64  # of each change, for a plan that fits
_UNITS = 64  # into which more devices are divided; what fits in coarser steps fits in finer ones


def why_infeasible(model: Model, found: Found) -> str:
    """One paragraph: the shortage, then every single change that was tried and makes a plan fit.

    Args:
        found: The search that has found no plan.
    """
    devices = {kind: count for kind in model.kinds if (count := _least_devices(model, kind))}
    memory = {kind: size for kind in model.kinds if (size := _least_memory(model, kind))}
    changes = []
    for kind, count in devices.items():
        more = count - len(model.pools[kind].ids)
        changes.append(f"{more} {kind} device{'s' if more > 1 else ''} more ({count} in all)")
    changes += [f"{kind} devices with {_bytes(size)}" for kind, (size, _) in memory.items()]
    for group in model.workflow.graph.groups:
        if not group.can_offload and _search(what_if(model, offload=group.name)).plans:
            changes.append(f"let group {group.name!r} offload (can_offload)")
    if model.request.mode and _search(model, "").plans:
        changes.append("allow any mode")
    remedy = "; or ".join(changes) if changes else "no single change of devices, memory, offload or mode makes one fit"
    return f"{_shortage(model, found, devices, memory)}. What would make it fit: {remedy}."


def _shortage(model: Model, found: Found, devices: dict[str, int], memory: dict[str, tuple[float, bool]]) -> str:
    for group in model.workflow.graph.groups:
        kind, need = group.device_kind, max(group.min_devices, group.devices_per_rank, 1)
        if kind in model.kinds and need > len(model.pools[kind].ids):
            have = len(model.pools[kind].ids)
            return (
                f"no plan fits: group {group.name!r} needs {need} devices of kind {kind!r}, there are {have}, "
                f"{need - have} are missing"
            )
    wanted = f"{model.request.mode} " if model.request.mode else ""
    none = f"no {wanted}plan fits" if found.exact else f"no {wanted}plan was found in {found.searches} searches"
    for kind, (least, proved) in memory.items():
        size = model.pools[kind].spec.memory_bytes
        which = "the plan that needs least" if proved else "of those that were searched, the one that needs least"
        return (
            f"{none}: {which} holds {_bytes(least)} on a {kind} device, which has {_bytes(size)}: "
            f"{_bytes(least - size)} are missing"
        )
    for kind, count in devices.items():
        have = len(model.pools[kind].ids)
        missing = f"{count - have} {'is' if count - have == 1 else 'are'} missing"
        return f"{none}: it needs {count} devices of kind {kind!r}, there are {have}, {missing}"
    counts = ", ".join(f"{len(model.pools[k].ids)} {k}" for k in model.kinds)
    if model.request.mode == "spatial" and not model.problem.chunk_counts:
        items = model.request.workflow.source_items
        return f"no spatial plan exists: {items} items an iteration divide into no equal chunks"
    return f"no {wanted}plan exists for these groups on {counts}" if found.exact else f"{none} on {counts}"


def _least_devices(model: Model, kind: str) -> int:
    """The fewest devices of a kind with which a plan fits, in steps of the quantum asked for; 0 if 128 times do not."""
    have, step = len(model.pools[kind].ids), max(model.request.device_quantum, 1)
    low, more = 0, step
    while not _fits_with(model, kind, have + more):
        if more > _MOST_TIMES * have:
            return 0
        low, more = more, more * 2
    while more - low > step:
        middle = (low + more) // 2 // step * step
        low, more = (low, middle) if _fits_with(model, kind, have + middle) else (middle, more)
    return have + more


def _least_memory(model: Model, kind: str) -> tuple[float, bool] | None:
    """Bytes on one device of a kind with which a plan fits, to 0.1%, and whether none fits into less (else none was
    found); None where no memory is enough."""
    have = model.pools[kind].spec.memory_bytes
    if not have or not _search(what_if(model, memory={kind: _MOST_MEMORY})).plans:
        return None
    low, high, proved = 1.0, _MOST_MEMORY, True
    while high > 1.001 * low:
        middle = (low * high) ** 0.5
        found = _search(what_if(model, memory={kind: middle}))
        if found.plans:
            high = middle
        else:
            low, proved = middle, found.exact  # what does not fit into this does not into less
    return have * high, proved


def _search(model: Model, mode: str | None = None) -> Found:
    """A plan that fits, of a mode or the one asked for."""
    return best_plans(model.problem, model.request.mode if mode is None else mode, 1, 1, _SEARCHES)


def _fits_with(model: Model, kind: str, count: int) -> bool:
    """Whether a plan fits with so many devices of a kind, in units so large that the search takes no longer."""
    others = sum(len(pool.ids) for other, pool in model.pools.items() if other != kind)
    if count + others > MOST_DEVICES:
        return False
    quantum = model.problem.quanta[model.kinds.index(kind)]
    coarser = -(-count // (quantum * max(_UNITS, *model.problem.grid.shape)))
    return bool(_search(what_if(model, devices={kind: count}, coarser=coarser)).plans)


def _bytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size:.3g} bytes"
