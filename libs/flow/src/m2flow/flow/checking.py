"""Whether a plan can run: every reason why it cannot, found before any process starts."""

import difflib
from collections.abc import Iterable, Iterator
from itertools import combinations
from math import ceil

from m2flow.flow.errors import PlanError
from m2flow.flow.graph import Graph
from m2flow.flow.passes.pipeline import inbox_capacity, is_routed
from m2flow.flow.spec import Spec
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Cluster, Placement, PlacementError


def check_plan(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> None:
    """Raises PlanError with every reason why `plan` cannot run `graph` on `cluster`; returns where it can."""
    for rule in (_names, _devices, _sharing, _granularity, _quotas, _restarts, _turns, _capacities, _memory):
        # Later rules read what earlier ones have checked.
        if reasons := list(rule(graph, plan, cluster)):
            raise PlanError(reasons)


def _names(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    planned = [stage.name for stage in graph.kinds(pb.STAGE_KIND_WORK, pb.STAGE_KIND_PUBLISH)]
    yield from _exactly("group", [group.group for group in plan.groups], list(graph.groups))
    yield from _exactly("stage", [stage.stage for stage in plan.stages], planned)
    for edge in plan.edges:
        for name in (edge.producer, edge.consumer):
            if name not in graph.stages:
                yield f"plan: edge {edge.producer} -> {edge.consumer}: {_unknown('stage', name, graph.stages)}"
    for share in plan.share_groups:
        for name in share.groups:
            if name not in graph.groups:
                yield f"plan: share group: {_unknown('group', name, graph.groups)}"


def _exactly(word: str, got: list[str], want: list[str]) -> Iterator[str]:
    for name in got:
        if name not in want:
            yield f"plan: {_unknown(word, name, want)}"
        elif got.count(name) > 1:
            yield f"plan: {word} {name} is planned {got.count(name)} times, want once"
    for name in want:
        if name not in got:
            yield f"plan: {word} {name} has no plan, want one for each {word} of the program"


def _unknown(word: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"unknown {word} {name!r}, " + (f"did you mean {near[0]!r}?" if near else f"want one of {', '.join(names)}")


def _devices(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    devices = {device.id: device for device in cluster.devices}
    for own in plan.groups:
        group = graph.groups[own.group]
        ids = list(own.device_ids)
        for number in ids:
            if number not in devices:
                yield f"plan: group {own.group} has device {number}, want one of 0 to {len(devices) - 1}"
            elif group.device_kind not in ("", devices[number].kind, *devices[number].labels):
                yield (
                    f"plan: group {own.group} has device {number}, a {devices[number].kind}; "
                    f"want devices of kind {group.device_kind}"
                )
        if len(set(ids)) < len(ids):
            yield f"plan: group {own.group} has a device twice ({ids}), want each once"
        width = group.devices_per_rank
        if not own.num_ranks or len(ids) % own.num_ranks or (width and len(ids) != own.num_ranks * width):
            want = f"{width} devices a rank" if width else "a multiple of its ranks"
            yield f"plan: group {own.group} has {own.num_ranks} ranks on {len(ids)} devices, want {want}"
        elif set(ids) <= devices.keys():
            try:
                Placement.of(ids, len(ids) // own.num_ranks).check(cluster)
            except PlacementError as refused:
                yield f"plan: group {own.group}: {refused}"
        if len(ids) < group.min_devices or (group.max_devices and len(ids) > group.max_devices):
            upper = group.max_devices or "any number"
            yield f"plan: group {own.group} has {len(ids)} devices, want {group.min_devices} to {upper}"


def _sharing(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    shared = [set(share.groups) for share in plan.share_groups]
    for one, other in combinations(plan.groups, 2):
        common = sorted(set(one.device_ids) & set(other.device_ids))
        if common and not any({one.group, other.group} <= groups for groups in shared):
            yield (
                f"plan: groups {one.group} and {other.group} both have devices {common} and no share group: "
                "put them into one, so that they take turns"
            )
    owned = {group.group: set(group.device_ids) for group in plan.groups}
    for share in plan.share_groups:
        for name in share.groups:
            if not owned[name] & set(share.device_ids):
                yield f"plan: group {name} shares devices {list(share.device_ids)} and has none of them"
        if share.groups and (beyond := set(share.device_ids) - set().union(*(owned[g] for g in share.groups))):
            yield f"plan: share group of {', '.join(share.groups)} names devices {sorted(beyond)} that none of them has"


def _granularity(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    ranks = {group.group: group.num_ranks for group in plan.groups}
    eager = graph.in_cycles | graph.before_quotas
    for stage in plan.stages:
        volume = graph.volume(stage.stage)
        if not 1 <= stage.granularity <= volume:
            yield f"plan: stage {stage.stage} has granularity {stage.granularity}, want 1 to {volume}, its whole volume"
        group = graph.stages[stage.stage].group
        alone = [glue for glue in graph.glue_before(stage.stage) if _needs_one_rank(glue)]
        if alone and ranks[group] > 1:
            yield (
                f"plan: stage {stage.stage} sees {alone[0].name}, which needs all items in one place; "
                f"want one rank of {group}, got {ranks[group]}"
            )
        where = "is inside a loop" if stage.stage in graph.in_cycles else "has a quota behind it"
        if stage.stage in eager and graph.groups[group].in_step and ranks[group] > 1:
            yield (
                f"plan: stage {stage.stage} {where} and the ranks of {group} move in step: each would wait for an item "
                f"that another's step has to bring; want one rank of {group}, got {ranks[group]}"
            )


def _quotas(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    for stage in graph.stages.values():
        if stage.kind == pb.STAGE_KIND_BARRIER and stage.name in graph.before_quotas:
            yield f"plan: {stage.name} waits for the end, which a quota behind it decides: want the barrier after it"
        if stage.kind == pb.STAGE_KIND_SINK:
            for glue in (glue for glue in graph.glue_before(stage.name) if glue.HasField("quota")):
                yield f"plan: {glue.name} is a result of the program, which ends with its quota: want a stage after it"


def _restarts(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    """What a process knows that no other could take over from it, where the program would go on after its death."""
    ranks = {group.group: group.num_ranks for group in plan.groups}
    for name, spec in graph.specs.items():
        if name not in ranks or spec.on_death == "stop":
            continue
        stages = graph.stages_of(name)
        quotas = [glue.name for s in stages for glue in graph.glue_before(s.name) if glue.HasField("quota")]
        if any(stage.kind == pb.STAGE_KIND_PUBLISH for stage in stages):
            yield _unlike(name, spec, "publishes what it has learned")
        if quotas:
            yield _unlike(name, spec, f"knows what {quotas[0]} has let pass")
        if spec.in_step and ranks[name] > 1:
            yield _unlike(name, spec, f"has {ranks[name]} ranks that move in step")


def _unlike(group: str, spec: Spec, knows: str) -> str:
    return (
        f"plan: group {group} {knows}, which a process started anew after a death does not: got "
        f"on_death = {spec.on_death!r}, want 'stop'"
    )


def _needs_one_rank(glue: pb.Stage) -> bool:
    return bool(glue.kind == pb.STAGE_KIND_BARRIER or glue.HasField("quota"))


def _turns(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    positions = {stage.stage: stage.position for stage in plan.stages}
    for producer, consumer in _sharing_pairs(graph, plan):
        if positions[producer] >= positions[consumer]:
            yield (
                f"plan: {consumer} (position {positions[consumer]}) takes its turn before {producer} "
                f"(position {positions[producer]}), which feeds it: a cycle across the lock; want the producer first"
            )


def _sharing_pairs(graph: Graph, plan: pb.ExecutionPlan) -> Iterator[tuple[str, str]]:
    """Pairs of stages on common devices where the first comes before the second, which in a loop both do of each other:
    there they are left out."""
    owned = {group.group: set(group.device_ids) for group in plan.groups}
    planned = [name for name in graph.order if name in {stage.stage for stage in plan.stages}]
    for consumer in planned:
        before = graph.ancestors(consumer)
        for producer in planned:
            groups = graph.stages[producer].group, graph.stages[consumer].group
            looped = {producer, consumer} <= graph.in_cycles
            if producer in before and not looped and producer != consumer and owned[groups[0]] & owned[groups[1]]:
                yield producer, consumer


def _capacities(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    plans = {stage.stage: stage for stage in plan.stages}
    capacity, entering = {}, {}
    for name in plans:
        ports = tuple(graph.workers_before(name))
        capacity[name] = inbox_capacity(graph, plan, name)
        entering[name] = sum(graph.volume_out(port) for port in ports)
        source = sum(graph.volume_out(port) for port in ports if graph.stages[port].kind == pb.STAGE_KIND_SOURCE)
        if plan.staleness and 0 < capacity[name] < source * (1 + plan.staleness):
            yield (
                f"plan: the edge into {name} holds {capacity[name]} items, want at least "
                f"{source * (1 + plan.staleness)}, or 0: the next iteration would not begin while one waits for room"
            )
        elif capacity[name]:
            yield from _crowding(graph, plan, name, ports, capacity[name], entering[name])
    for producer, consumer in _sharing_pairs(graph, plan):
        turn = plans[producer]
        part = 1.0 if turn.hold else turn.granularity / graph.volume(producer)
        pressing = {producer}  # on whom those that wait for room press back: not past an inbox without bound
        for name in filter(capacity.get, graph.order):
            if (name == consumer or name in graph.ancestors(consumer)) and pressing & graph.workers_before(name):
                pressing.add(name)
                need = ceil(part * entering[name]) * (1 + plan.staleness)
                if capacity[name] < need:
                    yield (
                        f"plan: the edge into {name} holds {capacity[name]} items, and one turn of {producer} gives "
                        f"{need}: it would wait for room that only {consumer} can make, in a turn on its devices; "
                        f"want a capacity of at least {need}, or 0"
                    )


def _crowding(
    graph: Graph, plan: pb.ExecutionPlan, name: str, ports: tuple[str, ...], capacity: int, entering: int
) -> Iterator[str]:
    """Items that nobody can take yet must not fill an inbox before those that somebody waits for."""
    ranks = {group.group: group.num_ranks for group in plan.groups}
    num_producers = sum(ranks.get(graph.stages[port].group, 1) for port in ports)
    routed = is_routed(graph, name, ranks[graph.stages[name].group])
    need = entering * (1 + plan.staleness) if routed else entering * plan.staleness + 1 if num_producers > 1 else 1
    why = "items of one rank would keep out those of another" if routed else "a later iteration would keep out this"
    if need > 1 and (name in graph.before_quotas or any(glue.HasField("quota") for glue in graph.glue_before(name))):
        yield f"plan: the edge into {name} holds {capacity} items, want 0, as a quota decides how many come: {why}"
    elif capacity < need:
        yield f"plan: the edge into {name} holds {capacity} items, want at least {need}, or 0: {why}"


def _memory(graph: Graph, plan: pb.ExecutionPlan, cluster: Cluster) -> Iterator[str]:
    for number, peak in sorted(plan.prediction.peak_bytes.items()):
        if number >= len(cluster.devices):
            yield f"plan: predicts memory of device {number}, want one of 0 to {len(cluster.devices) - 1}"
            continue
        memory = cluster.devices[number].memory_bytes
        if 0 < memory < peak:
            groups = ", ".join(group.group for group in plan.groups if number in group.device_ids)
            yield (
                f"plan: device {number} would hold {peak / 2**30:.2f} GiB of {groups} and has {memory / 2**30:.2f}: "
                "offload a group between its turns, or give one of them other devices"
            )
