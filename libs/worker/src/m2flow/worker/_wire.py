"""Between this package's types and the messages of worker/v1."""

import platform
import time
from collections.abc import Iterable

from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker.device import Device
from m2flow.worker.errors import WorkerFailed

PROTOCOL_VERSION = "1"
"""Two ends of different versions refuse each other."""

MAX_MESSAGE_BYTES = 1 << 30


def group_key(name: str, generation: int) -> str:
    """What a re-placed group is called between driver and agents, while the ranks before it are still there."""
    return f"{name}-{generation}"


def group_of(key: str) -> str:
    """The name of the group that a key stands for."""
    return key.partition("-")[0]


def device_to_proto(device: Device) -> pb.Device:
    """The message of a device."""
    return pb.Device(
        id=device.id,
        node=device.node,
        kind=device.kind,
        index=device.index,
        memory_bytes=device.memory_bytes,
        labels=device.labels,
        cores=device.cores,
    )


def device_from_proto(message: pb.Device) -> Device:
    """The device of a message."""
    return Device(
        id=message.id,
        node=message.node,
        kind=message.kind,
        index=message.index,
        memory_bytes=message.memory_bytes,
        labels=dict(message.labels),
        cores=tuple(message.cores),
    )


def merged(responses: Iterable[pb.SessionResponse]) -> list[pb.SessionResponse]:
    """The same in the same order; results that follow each other become one message."""
    told: list[pb.SessionResponse] = []
    for response in responses:
        if told and response.HasField("results") and told[-1].HasField("results"):
            told[-1].results.results.extend(response.results.results)
        else:
            told.append(response)
    return told


def failure_from_proto(report: pb.FailureReport, last_log_lines: Iterable[str]) -> WorkerFailed:
    """The error of a report."""
    return WorkerFailed(
        group=group_of(report.group),
        rank=report.rank,
        host=report.host,
        pid=report.pid,
        phase=report.phase,
        cause=report.cause,
        traceback=report.traceback,
        last_log_lines=tuple(last_log_lines),
        time_s=report.time_s,
    )


def failure_report(
    group: str,
    rank: int,
    *,
    pid: int,
    phase: str,
    cause: str,
    attempt: int = 0,
    traceback: str = "",
    call_id: int = 0,
    consequence: bool = False,
) -> pb.SessionResponse:
    """What a rank, or its agent in its name, says of its failure now."""
    return pb.SessionResponse(
        id=call_id,
        failure=pb.FailureReport(
            group=group,
            rank=rank,
            host=platform.node(),
            pid=pid,
            phase=phase,
            cause=cause,
            attempt=attempt,
            traceback=traceback,
            time_s=time.time(),
            call_id=call_id,
            consequence=consequence,
        ),
    )
