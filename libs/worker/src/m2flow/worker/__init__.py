"""Devices, placement, workers and groups, launchers, locks, engine adapters."""

from m2flow.worker.base import Worker
from m2flow.worker.call import CallHandle
from m2flow.worker.cluster import Cluster
from m2flow.worker.context import WorkerContext
from m2flow.worker.device import Device
from m2flow.worker.errors import (
    CallCancelled,
    CallTimeout,
    LaunchError,
    LockTimeout,
    MemoryRefused,
    PlacementError,
    RefusedError,
    SessionClosedError,
    WorkerError,
    WorkerFailed,
)
from m2flow.worker.group import AttachedGroup, WorkerGroup
from m2flow.worker.item import Group, Item
from m2flow.worker.launch import AgentAddress, find_cluster, launch, launch_run
from m2flow.worker.lock import LockStats
from m2flow.worker.placement import Placement, parse_placement
from m2flow.worker.residency import claim_memory
from m2flow.worker.session import Session
from m2flow.worker.spec import GroupSpec
from m2flow.worker.stage import Inbox, pulls, stage, stage_names
from m2flow.worker.target import resolve_target, target_of
from m2flow.worker.turns import DeviceLock, LockServer

__all__ = [
    "AgentAddress",
    "AttachedGroup",
    "CallCancelled",
    "CallHandle",
    "CallTimeout",
    "Cluster",
    "Device",
    "DeviceLock",
    "Group",
    "GroupSpec",
    "Inbox",
    "Item",
    "LaunchError",
    "LockServer",
    "LockStats",
    "LockTimeout",
    "MemoryRefused",
    "Placement",
    "PlacementError",
    "RefusedError",
    "Session",
    "SessionClosedError",
    "Worker",
    "WorkerContext",
    "WorkerError",
    "WorkerFailed",
    "WorkerGroup",
    "claim_memory",
    "find_cluster",
    "launch",
    "launch_run",
    "parse_placement",
    "pulls",
    "resolve_target",
    "stage",
    "stage_names",
    "target_of",
]
