"""What the numbers of a request may be: finite, not negative, and of a size that something real could have."""

import math
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from google.protobuf.message import Message

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._cluster import MOST_DEVICES, mixed, num_devices
from m2flow.sched.errors import InputError

_LARGEST = 1e21
_SECONDS = (1e-9, 1e9)
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
        if stream.rounds > _MOST_ROUNDS:
            raise InputError(
                f"the feedback stream from {stream.producer!r} has {stream.rounds:g} rounds, want at most "
                f"{_MOST_ROUNDS:,}: count passes of one item in one iteration"
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
            for number in value if field.is_repeated else (value,):
                if not 0 <= number <= _LARGEST:  # not-a-number is neither
                    raise InputError(f"{name} is {number:g}, want 0 to {_LARGEST:g}: correct the number")


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
