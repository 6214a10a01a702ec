"""Profiles over time: measured spans folded in, runs merged, and what no longer holds dropped."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from statistics import median
from typing import TypeVar

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._curve import completion_curve
from m2flow.sched._hand_offs import LATELY, hand_offs, moments
from m2flow.sched._loop_items import loop_stage
from m2flow.sched._workflow import reduce_graph
from m2flow.sched.errors import InputError

_KEPT = 256  # samples of one stage: the latest
_Entry = TypeVar("_Entry", sched_pb2.Sample, sched_pb2.HandOff)
_SIDE_BY_SIDE = 0.5  # of a stage's busy time that another must overlap to have been its neighbour


def fold_spans(
    profile: sched_pb2.Profile,
    timeline: flow_pb2.Timeline,
    graph: flow_pb2.WorkflowGraph,
    plan: flow_pb2.ExecutionPlan,
) -> sched_pb2.Profile:
    """Returns the profile with what a run's spans measured; the argument is left as it is.

    Each stage and iteration gives one sample: its group's devices, the items (tokens) of one call of the whole group,
    the busy seconds of its slowest rank in one call, and its highest peak; in a loop one for each size of its calls.
    Items of a rank are what its span counts, so a call of the group is the ranks' calls side by side. A stage whose
    busy time is overlapped by half or more with another group's on other devices was measured beside it. Onload and
    offload become switch costs, a publish stage's way from sender to receiver a sync cost: the median of the iterations
    in the timeline. A stage that gave its items one by one, in one call of each rank, leaves its completion curve on so
    many devices: the latest. What passes between stages, the devices free and nobody at work, becomes hand-offs
    (`_hand_offs`), what the items did in a loop, the latest, loop items (`_loop_items`).

    Raises:
        InputError: a span names a stage that the graph does not have.
    """
    folded = sched_pb2.Profile()
    folded.CopyFrom(profile)
    stages = {s.name: s for s in graph.stages}
    looped = {stage for node in reduce_graph(graph).nodes if node.cyclic for stage in node.stages}
    devices = {g.group: len(g.device_ids) for g in plan.groups}
    heads = {(s.producer, s.consumer) for s in graph.streams if s.feedback}
    room = {e.consumer: e.capacity for e in plan.edges if (e.producer, e.consumer) in heads}
    busy: dict[tuple[str, int], list[flow_pb2.Span]] = {}
    waits: dict[tuple[str, int], list[flow_pb2.Span]] = {}
    moves: dict[tuple[str, int], list[flow_pb2.Span]] = {}
    for span in timeline.spans:
        if span.stage not in stages and span.kind == flow_pb2.SPAN_KIND_BUSY:
            raise InputError(f"a span names stage {span.stage!r}, want one of {sorted(stages)}: fold it with its graph")
        if span.kind == flow_pb2.SPAN_KIND_BUSY:
            busy.setdefault((span.stage, span.iteration), []).append(span)
        elif span.kind == flow_pb2.SPAN_KIND_WAIT_WEIGHTS:
            waits.setdefault((span.stage, span.iteration), []).append(span)
        elif span.kind in (flow_pb2.SPAN_KIND_ONLOAD, flow_pb2.SPAN_KIND_OFFLOAD):
            moves.setdefault((span.group, span.kind), []).append(span)
    syncs: dict[str, list[float]] = {}
    worked: dict[int, list[flow_pb2.Span]] = {}
    for (_, iteration), spans in busy.items():
        worked.setdefault(iteration, []).extend(spans)
    out = {iteration: moments(spans) for iteration, spans in worked.items()} if looped else {}
    for (stage, iteration), spans in sorted(busy.items(), key=lambda b: (b[0][1], b[0][0])):
        if stages[stage].kind == flow_pb2.STAGE_KIND_PUBLISH:
            syncs.setdefault(stage, []).append(_sync_seconds(spans, waits.get((stage, iteration), [])))
            continue
        num_devices = devices.get(stages[stage].group, 0) or 1
        if stage in looped:
            in_flight = -(-room.get(stage, 0) // len({span.rank for span in spans}))
            items, samples = loop_stage(stage, spans, out[iteration], num_devices, in_flight)
            _replace(folded.loop_items, [items], ("stage",))
        else:
            samples = _samples(stage, spans, num_devices)
            if (curve := completion_curve(stage, spans, num_devices)) is not None:
                _replace(folded.curves, [curve], ("stage", "devices"))
        for sample in samples:
            sample.beside.extend(_neighbours(stage, iteration, busy, stages, plan))
        folded.samples.extend(samples)
    for stage, seconds in syncs.items():
        sync = sched_pb2.SyncCost(source=stages[stage].group, target=stages[stage].to, seconds=median(seconds))
        _replace(folded.syncs, [sync], ("source", "target"))
    for (group, kind), spans in moves.items():
        _set_switch(folded, group, kind, spans)
    if not plan.staleness:  # else what a device did in another iteration is not in sight
        folded.hand_offs.extend(hand_offs(timeline, graph))
    _trim(folded)
    return folded


def merge(profiles: Iterable[sched_pb2.Profile]) -> sched_pb2.Profile:
    """Returns one profile of several runs, older first: samples add up, the latest switch, sync and curve hold.

    Raises:
        InputError: they are of different models, hardware or versions, or there are none.
    """
    merged: sched_pb2.Profile | None = None
    for profile in profiles:
        if merged is None:
            merged = sched_pb2.Profile()
            merged.CopyFrom(profile)
            continue
        if not usable(profile, model=merged.model, hardware=merged.hardware, version=merged.version):
            raise InputError(
                f"merge: a profile of {_identity(profile)}, want {_identity(merged)}: merge only runs of one model, "
                "hardware and version"
            )
        merged.samples.extend(profile.samples)
        _replace(merged.switches, profile.switches, ("group",))
        _replace(merged.syncs, profile.syncs, ("source", "target"))
        _replace(merged.curves, profile.curves, ("stage", "devices"))
        merged.hand_offs.extend(profile.hand_offs)
        _replace(merged.loop_items, profile.loop_items, ("stage",))
        _replace(merged.models, profile.models, ("stage",))
        merged.transfer_latency_s = profile.transfer_latency_s or merged.transfer_latency_s
        merged.transfer_bytes_per_s = profile.transfer_bytes_per_s or merged.transfer_bytes_per_s
    if merged is None:
        raise InputError("merge: no profiles, want one or more: give the profiles of earlier runs")
    _trim(merged)
    return merged


def usable(profile: sched_pb2.Profile, *, model: str, hardware: str, version: str) -> bool:
    """Whether a stored profile was measured on this model, hardware and version; one of another is not used."""
    return (profile.model, profile.hardware, profile.version) == (model, hardware, version)


def _identity(profile: sched_pb2.Profile) -> str:
    return f"model {profile.model!r} on {profile.hardware!r}, version {profile.version!r}"


def _samples(stage: str, spans: list[flow_pb2.Span], devices: int) -> list[sched_pb2.Sample]:
    items, tokens = sum(s.items for s in spans), sum(s.tokens for s in spans)
    ranks: dict[int, list[flow_pb2.Span]] = {}
    for span in spans:
        ranks.setdefault(span.rank, []).append(span)
    calls = max(len(r) for r in ranks.values())
    seconds = max(sum(s.end_ns - s.start_ns for s in r) for r in ranks.values()) / 1e9
    if not items or not seconds:
        return []
    peak = max(s.peak_bytes for s in spans)
    return [
        sched_pb2.Sample(
            stage=stage,
            devices=devices,
            items=items / calls,
            tokens=tokens / calls,
            seconds=seconds / calls,
            peak_bytes=peak,
        )
    ]


def _sync_seconds(spans: list[flow_pb2.Span], waits: list[flow_pb2.Span]) -> float:
    """The slowest sender, then what receivers wait for (they fetch and check), then the slowest receiver."""
    sides: dict[str, int] = {}
    for span in spans:
        sides[span.group] = max(sides.get(span.group, 0), span.end_ns - span.start_ns)
    sent = max((s.end_ns for s in spans if not waits or s.group != waits[0].group), default=0)
    on_the_way = max((w.end_ns - sent for w in waits), default=0) if sent else 0
    return (sum(sides.values()) + max(on_the_way, 0)) / 1e9


def _neighbours(
    stage: str,
    iteration: int,
    busy: Mapping[tuple[str, int], list[flow_pb2.Span]],
    stages: Mapping[str, flow_pb2.Stage],
    plan: flow_pb2.ExecutionPlan,
) -> list[str]:
    ids = {g.group: set(g.device_ids) for g in plan.groups}
    mine = ids.get(stages[stage].group, set())
    spans = busy[stage, iteration]
    total = sum(s.end_ns - s.start_ns for s in spans)
    found = []
    for (other, when), theirs in busy.items():
        devices = ids.get(stages[other].group, set())
        if other == stage or when != iteration or not mine or not devices or mine & devices:
            continue
        if _overlap(spans, theirs) >= _SIDE_BY_SIDE * total:
            found.append(other)
    return sorted(found)


def _overlap(spans: list[flow_pb2.Span], others: list[flow_pb2.Span]) -> int:
    """Nanoseconds of `spans` during which one or more of `others` ran."""
    union: list[list[int]] = []
    for start, end in sorted((o.start_ns, o.end_ns) for o in others):
        if union and start <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([start, end])
    found = 0
    for span in spans:
        first = bisect_right(union, span.start_ns, key=_end)
        for start, end in islice(union, first, None):
            if start >= span.end_ns:
                break
            found += min(span.end_ns, end) - max(span.start_ns, start)
    return found


def _end(interval: list[int]) -> int:
    return interval[1]


def _set_switch(profile: sched_pb2.Profile, group: str, kind: int, spans: list[flow_pb2.Span]) -> None:
    known = next((s for s in profile.switches if s.group == group), None)
    if known is None:
        known = profile.switches.add(group=group)
    seconds = median((s.end_ns - s.start_ns) / 1e9 for s in spans)
    if kind == flow_pb2.SPAN_KIND_ONLOAD:
        known.onload_s = seconds
    else:
        known.offload_s = seconds


def _replace(merged: object, added: Iterable[object], keys: tuple[str, ...]) -> None:
    """Puts each of `added` in the place of the entry with equal keys, or at the end."""
    for entry in added:
        identity = tuple(getattr(entry, k) for k in keys)
        for known in merged:  # type: ignore[attr-defined]
            if tuple(getattr(known, k) for k in keys) == identity:
                known.CopyFrom(entry)
                break
        else:
            merged.add().CopyFrom(entry)  # type: ignore[attr-defined]


def _trim(profile: sched_pb2.Profile) -> None:
    """Keeps the latest samples and hand-offs of each stage, in order."""
    _keep_latest(profile.samples, _KEPT)
    _keep_latest(profile.hand_offs, LATELY)


def _keep_latest(entries: "RepeatedCompositeFieldContainer[_Entry]", most: int) -> None:
    count: Counter[str] = Counter()
    kept = []
    for entry in reversed(entries):
        count[entry.stage] += 1
        if count[entry.stage] <= most:
            kept.append(entry)
    if len(kept) < len(entries):
        del entries[:]
        entries.extend(reversed(kept))
