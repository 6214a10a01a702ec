"""From a macro flow, written once, to a micro flow in time and space."""

from m2flow.flow.checking import check_plan
from m2flow.flow.errors import FlowError, GraphError, PlanError, RunError, RunStopped, TraceError
from m2flow.flow.graph import Graph
from m2flow.flow.microflow import MicroFlow
from m2flow.flow.modes import hybrid_plan, spatial_plan, temporal_plan
from m2flow.flow.passes import PASSES, lower
from m2flow.flow.pending import Pending
from m2flow.flow.planning import Planner, load_plan, save_plan
from m2flow.flow.result import IterationResult
from m2flow.flow.runtime import Runtime
from m2flow.flow.stream import Loop, Stream
from m2flow.flow.timeline import DeviceAccount, account, account_table, chrome_trace, save_trace
from m2flow.flow.tracing import Flow, StageProxy, trace

__all__ = [
    "PASSES",
    "DeviceAccount",
    "Flow",
    "FlowError",
    "Graph",
    "GraphError",
    "IterationResult",
    "Loop",
    "MicroFlow",
    "Pending",
    "PlanError",
    "Planner",
    "RunError",
    "RunStopped",
    "Runtime",
    "StageProxy",
    "Stream",
    "TraceError",
    "account",
    "account_table",
    "check_plan",
    "chrome_trace",
    "hybrid_plan",
    "load_plan",
    "lower",
    "save_plan",
    "save_trace",
    "spatial_plan",
    "temporal_plan",
    "trace",
]
