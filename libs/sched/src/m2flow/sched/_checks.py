"""What the numbers of a request may be: finite, not negative, and of a size that something real could have."""

import math
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from google.protobuf.message import Message

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._cluster import MOST_DEVICES, mixed, num_devices
from m2flow.sched.errors import InputError

LONGEST_S = 1e9
_LARGEST = 1e21
_MOST_BYTES = 1e15
_SECONDS = (1e-9, LONGEST_S)
_ITEMS = (1e-6, 1e12)
_MOST_ITEMS = 10**9
_MOST_STALENESS = 64
_MOST_CHUNKS = 1024
_MOST_ROUNDS = 10_000


def check_numbers(request: sched_pb2.PlanRequest) -> None:
    """Raises InputError, which names the place, for a number that no workflow, profile or cluster can have."""
    for part in ("workflow", "profile", "cluster"):
        _finite(getattr(request, part), part)
    for i, sample in enumerate(request.profile.samples):
        _sample(sample, f"profile.samples[{i}] of stage {sample.stage!r}")
    for name, value, most in (
        ("workflow.source_items", request.workflow.source_items, _MOST_ITEMS),
        ("max_staleness", request.max_staleness, _MOST_STALENESS),
        ("max_chunks", request.max_chunks, _MOST_CHUNKS),
    ):
        if value > most:
            raise InputError(f"{name} is {value}, want at most {most:,}: make it smaller")
    if not request.workflow.source_items:
        raise InputError("workflow.source_items is 0, want the items of one iteration: give 1 or more")
    for stream in request.workflow.streams:
        if stream.rounds and not 1 <= stream.rounds <= _MOST_ROUNDS:
            raise InputError(
                f"the feedback stream from {stream.producer!r} has {stream.rounds:g} rounds, want 1 to "
                f"{_MOST_ROUNDS:,}: count passes of one item in one iteration"
            )
    for items in request.profile.loop_items:
        if max(items.passes, default=0) > _MOST_ROUNDS or (items.relative and not sum(items.relative)):
            raise InputError(
                f"the loop items of stage {items.stage!r} pass up to {max(items.passes, default=0):,} times and take "
                f"{sum(items.relative):g} in all, want at most {_MOST_ROUNDS:,} passes and some time: correct them"
            )
    count = num_devices(request.cluster)
    if count > MOST_DEVICES:
        raise InputError(f"the cluster has {count:,} devices, want at most {MOST_DEVICES:,}: plan a part of it")


def remarks(request: sched_pb2.PlanRequest) -> list[str]:
    """Notes on what is in the inputs and not used: devices that differ, or names that the workflow does not have."""
    stages = [s.name for s in request.workflow.stages]
    groups = [g.name for g in request.workflow.groups]
    profile = request.profile
    notes = [
        f"devices of kind {kind!r} differ; each is taken for the least of them: name kinds apart to plan with both"
        for kind in mixed(request.cluster)
    ]
    notes += _strangers("hand-offs of stage", (h.stage for h in profile.hand_offs), stages)
    notes += _strangers("samples of stage", (s.stage for s in profile.samples), stages)
    notes += _strangers("a completion curve of stage", (c.stage for c in profile.curves), stages)
    notes += _strangers("loop items of stage", (i.stage for i in profile.loop_items), stages)
    notes += _strangers("a model of stage", (m.stage for m in profile.models), stages)
    notes += _strangers("a switch cost of group", (s.group for s in profile.switches), groups)
    notes += _strangers("a sync cost of group", (end for s in profile.syncs for end in (s.source, s.target)), groups)
    return notes


def _strangers(what: str, names: Iterable[str], known: list[str]) -> Iterator[str]:
    for name in dict.fromkeys(names):
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            yield f"the profile has {what} {name!r}, which the workflow does not have; not used{hint}"


def _finite(message: Message, where: str) -> None:
    for field, value in message.ListFields():
        name = f"{where}.{field.name}"
        if field.message_type is not None:
            for i, inner in enumerate(value if field.is_repeated else ()):
                _finite(inner, f"{name}[{i}]")
            if not field.is_repeated:
                _finite(value, name)
        elif field.cpp_type == field.CPPTYPE_DOUBLE:
            most = _most(field.name)
            for number in value if field.is_repeated else (value,):
                if not 0 <= number <= most:  # not-a-number is neither
                    raise InputError(f"{name} is {number:g}, want 0 to {most:g}: correct the number")


def _most(name: str) -> float:
    """The largest number that a field of this name may have, by its unit."""
    if name.endswith("bytes"):
        return _MOST_BYTES
    return LONGEST_S if name.endswith(("_s", "seconds")) and not name.endswith("per_s") else _LARGEST


def check_volumes(volumes: Mapping[str, float]) -> None:
    """Raises InputError where expansions leave a stage with more or fewer items than anything could count."""
    low, high = _ITEMS
    for stage, items in volumes.items():
        if not low <= items <= high:
            raise InputError(
                f"stage {stage!r} has {items:g} items in an iteration, want {low:g} to {high:g}: correct the "
                "source_items, or the expansions before it"
            )


def check_plan(plan: flow_pb2.ExecutionPlan, stages: Iterable[str], groups: Mapping[str, tuple[int, ...]]) -> None:
    """Raises InputError where a plan does not say what its simulation needs, or says what cannot be.

    `stages` are those that cost device time; `groups` are theirs, with the devices that each may have.
    """
    said, placed = {s.stage: s for s in plan.stages}, {g.group: g for g in plan.groups}
    if plan.staleness > _MOST_STALENESS:
        raise InputError(f"the plan's staleness is {plan.staleness}, want at most {_MOST_STALENESS}: make it smaller")
    for stage in stages:
        if stage not in said or not said[stage].granularity:
            raise InputError(f"the plan has no granularity for stage {stage!r}, want 1 or more: add it to `stages`")
    for group, known in groups.items():
        ids = list(placed[group].device_ids) if group in placed else []
        if not ids:
            raise InputError(f"the plan gives group {group!r} no devices, want one or more: add it to `groups`")
        if strange := sorted(set(ids) - set(known)):
            raise InputError(f"group {group!r} has devices {strange[:5]}, want ids of its kind: use the cluster's own")
        if len(set(ids)) < len(ids) or placed[group].num_ranks > len(ids):
            raise InputError(
                f"group {group!r} has {placed[group].num_ranks} ranks on devices {ids[:8]}, want each device once and "
                "a rank to have one or more: correct `groups`"
            )


def _sample(sample: sched_pb2.Sample, where: str) -> None:
    for name, (low, high) in (("seconds", _SECONDS), ("items", _ITEMS)):
        value = getattr(sample, name)
        if not low <= value <= high:
            raise InputError(f"{where} has {name} {value:g}, want {low:g} to {high:g}: correct or drop the sample")
    if not 1 <= sample.devices <= MOST_DEVICES:
        raise InputError(
            f"{where} has devices {sample.devices}, want 1 to {MOST_DEVICES:,}: count those that the group had"
        )
    if sample.stage in sample.beside:
        raise InputError(f"{where} ran beside itself, want other stages in `beside`: name the neighbours alone")
    if sample.HasField("layout"):
        degrees = [sample.layout.data, sample.layout.tensor, sample.layout.pipeline]
        if math.prod(degrees) != sample.devices:
            raise InputError(
                f"{where} has layout {degrees[0]} x {degrees[1]} x {degrees[2]} on {sample.devices} devices, want "
                "data x tensor x pipeline to be as many: give all three degrees, 1 where a model is not split"
            )
