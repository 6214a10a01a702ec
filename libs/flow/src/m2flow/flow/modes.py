"""The modes that need no search, as plans: everything in turns on all devices, or everything side by side."""

from collections.abc import Mapping, Sequence

from m2flow.flow.errors import PlanError
from m2flow.flow.graph import Graph
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.worker import Cluster


def temporal_plan(graph: Graph, cluster: Cluster) -> pb.ExecutionPlan:
    """Every group has all devices of its kind, in turns: a stage takes its whole iteration, then makes room.

    Raises PlanError where a group's kind of device is not there.
    """
    placed = {name: _all_devices(graph, cluster, name) for name in graph.groups}
    return _plan(graph, placed, {}, "temporal")


def spatial_plan(
    graph: Graph, cluster: Cluster, *, weights: Mapping[str, float] | None = None, num_chunks: int = 8
) -> pb.ExecutionPlan:
    """Groups side by side on disjoint devices, items moving between them in `num_chunks` chunks an iteration.

    `weights` deals the devices of a kind: a group gets its part of them, in the program's order (equal parts unless
    told). With fewer devices than groups, the first groups have one each and the rest take turns on the last.
    Raises PlanError where a group's kind of device is not there.
    """
    if unknown := set(weights or {}) - set(graph.groups):
        raise PlanError([f"spatial plan: weights name {sorted(unknown)}, want some of {', '.join(graph.groups)}"])
    placed = _side_by_side(graph, cluster, _in_order(graph), weights or {})
    return _plan(graph, placed, _chunks(graph, placed, num_chunks), "spatial")


def hybrid_plan(graph: Graph, cluster: Cluster, *, num_chunks: int = 8) -> pb.ExecutionPlan:
    """What makes samples side by side, as in a spatial plan; what learns from them and publishes, on all devices after.

    The learners and the others take turns. Raises PlanError where a group's kind of device is not there.
    """
    learners = {stage.group for stage in graph.kinds(pb.STAGE_KIND_PUBLISH)}
    makers = [name for name in _in_order(graph) if name not in learners]
    placed = _side_by_side(graph, cluster, makers, {})
    chunks = _chunks(graph, placed, num_chunks)
    placed |= {name: _all_devices(graph, cluster, name) for name in _in_order(graph) if name in learners}
    return _plan(graph, placed, chunks, "hybrid")


def _side_by_side(
    graph: Graph, cluster: Cluster, names: Sequence[str], weights: Mapping[str, float]
) -> dict[str, list[int]]:
    placed: dict[str, list[int]] = {}
    for kind in dict.fromkeys(graph.groups[name].device_kind for name in names):
        alike = [name for name in names if graph.groups[name].device_kind == kind]
        placed |= _dealt(graph, cluster, alike, weights)
    return placed


def _chunks(graph: Graph, placed: Mapping[str, list[int]], num_chunks: int) -> dict[str, int]:
    """The granularity of each stage of the placed groups."""
    if num_chunks < 1:
        raise PlanError([f"plan: got num_chunks={num_chunks}, want at least 1"])
    granularity = {}
    for stage in (stage for stage in graph.kinds(pb.STAGE_KIND_WORK) if stage.group in placed):
        width = graph.groups[stage.group].devices_per_rank or len(placed[stage.group])
        num_ranks = len(placed[stage.group]) // width
        volume = graph.volume(stage.name)
        granularity[stage.name] = min(volume, max(num_ranks, -(-volume // num_chunks)))
    return granularity


def _in_order(graph: Graph) -> list[str]:
    """All groups by where the program comes to them first, those without a stage at the end."""
    staged = [graph.stages[name].group for name in graph.order if graph.stages[name].group]
    return list(dict.fromkeys([*staged, *graph.groups]))


def _of_kind(cluster: Cluster, kind: str) -> list[int]:
    return [device.id for device in cluster.devices if kind in ("", device.kind, *device.labels)]


def _all_devices(graph: Graph, cluster: Cluster, name: str) -> list[int]:
    group = graph.groups[name]
    ids = _of_kind(cluster, group.device_kind)
    width = max(1, group.devices_per_rank)
    usable = min(len(ids), group.max_devices or len(ids)) // width * width
    if usable < max(1, group.min_devices):
        raise PlanError(
            [
                f"plan: group {name} needs {max(width, group.min_devices)} devices of kind "
                f"{group.device_kind or 'any'}, and the cluster has {len(ids)}"
            ]
        )
    return ids[:usable]


def _dealt(graph: Graph, cluster: Cluster, names: Sequence[str], weights: Mapping[str, float]) -> dict[str, list[int]]:
    _all_devices(graph, cluster, names[0])  # raises where there are none, or too few for one rank
    ids = _of_kind(cluster, graph.groups[names[0]].device_kind)
    widths = {name: max(1, graph.groups[name].devices_per_rank, graph.groups[name].min_devices) for name in names}
    if sum(widths.values()) > len(ids):
        return _crowded(names, widths, ids)
    counts = dict(widths)
    # One rank more, again and again, for the group that is furthest below its part.
    while True:
        left = len(ids) - sum(counts.values())
        able = [
            name
            for name in names
            if (step := max(1, graph.groups[name].devices_per_rank)) <= left
            and (not graph.groups[name].max_devices or counts[name] + step <= graph.groups[name].max_devices)
            and weights.get(name, 1.0) > 0
        ]
        if not able:
            break
        name = min(able, key=lambda name: counts[name] / weights.get(name, 1.0))
        counts[name] += max(1, graph.groups[name].devices_per_rank)
    placed, at = {}, 0
    for name in names:
        placed[name] = ids[at : at + counts[name]]
        at += counts[name]
    return placed


def _crowded(names: Sequence[str], widths: Mapping[str, int], ids: list[int]) -> dict[str, list[int]]:
    placed, at = {}, 0
    for number, name in enumerate(names):
        rest = max(widths[other] for other in names[number:])
        alone = number + 1 < len(names) and at + widths[name] + rest <= len(ids)
        start = at if alone else max(0, len(ids) - widths[name])
        placed[name] = ids[start : start + widths[name]]
        at = at + widths[name] if alone else at
        if len(placed[name]) < widths[name]:
            raise PlanError([f"plan: group {name} needs {widths[name]} devices, and the cluster has {len(ids)}"])
    return placed


def _plan(graph: Graph, placed: Mapping[str, list[int]], granularity: Mapping[str, int], mode: str) -> pb.ExecutionPlan:
    shares = _share_groups(placed)
    sharing = {name for share in shares for name in share.groups}
    plan = pb.ExecutionPlan(mode=mode if mode == "temporal" or not sharing else "hybrid", share_groups=shares)
    for name, ids in placed.items():
        group = graph.groups[name]
        leaves = mode == "temporal" and name in sharing and group.can_offload
        plan.groups.append(
            pb.GroupPlan(
                group=name,
                device_ids=ids,
                num_ranks=len(ids) // (group.devices_per_rank or len(ids)),
                residency=pb.RESIDENCY_OFFLOADED if leaves else pb.RESIDENCY_RESIDENT,
            )
        )
    for back, loop in zip((s for s in graph.streams if s.feedback), graph.cycles, strict=True):
        # A chunk for each stage of a loop: all are at work, and the first items leave it early.
        held = sum(granularity.get(name, 0) for name in loop)
        plan.edges.add(producer=back.producer, consumer=back.consumer, capacity=held)
    for position, stage in enumerate(graph.kinds(pb.STAGE_KIND_WORK, pb.STAGE_KIND_PUBLISH)):
        whole = graph.volume(stage.name)
        plan.stages.append(
            pb.StagePlan(
                stage=stage.name,
                granularity=granularity.get(stage.name, whole),
                position=position,
                hold=mode == "temporal",
            )
        )
    return plan


def _share_groups(placed: Mapping[str, list[int]]) -> list[pb.ShareGroup]:
    """Groups whose devices overlap, directly or through others."""
    parts: list[tuple[list[str], set[int]]] = []
    for name, ids in placed.items():
        names, devices = [name], set(ids)
        for part in [part for part in parts if part[1] & devices]:
            parts.remove(part)
            names, devices = part[0] + names, part[1] | devices
        parts.append((names, devices))
    return [pb.ShareGroup(groups=names, device_ids=sorted(ids)) for names, ids in parts if len(names) > 1]
