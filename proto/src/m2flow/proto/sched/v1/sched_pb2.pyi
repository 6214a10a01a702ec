from m2flow.proto.flow.v1 import flow_pb2 as _flow_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_GENERATE: _ClassVar[Phase]
    PHASE_FORWARD: _ClassVar[Phase]
    PHASE_TRAIN: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_GENERATE: Phase
PHASE_FORWARD: Phase
PHASE_TRAIN: Phase

class Layout(_message.Message):
    __slots__ = ("data", "tensor", "pipeline")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    data: int
    tensor: int
    pipeline: int
    def __init__(self, data: _Optional[int] = ..., tensor: _Optional[int] = ..., pipeline: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("stage", "devices", "layout", "items", "tokens", "seconds", "peak_bytes", "beside")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    devices: int
    layout: Layout
    items: float
    tokens: float
    seconds: float
    peak_bytes: float
    beside: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stage: _Optional[str] = ..., devices: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., items: _Optional[float] = ..., tokens: _Optional[float] = ..., seconds: _Optional[float] = ..., peak_bytes: _Optional[float] = ..., beside: _Optional[_Iterable[str]] = ...) -> None: ...

class CompletionCurve(_message.Message):
    __slots__ = ("stage", "time_fraction", "item_fraction", "devices", "group_fraction")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_FRACTION_FIELD_NUMBER: _ClassVar[int]
    ITEM_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FRACTION_FIELD_NUMBER: _ClassVar[int]
    stage: str
    time_fraction: _containers.RepeatedScalarFieldContainer[float]
    item_fraction: _containers.RepeatedScalarFieldContainer[float]
    devices: int
    group_fraction: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, stage: _Optional[str] = ..., time_fraction: _Optional[_Iterable[float]] = ..., item_fraction: _Optional[_Iterable[float]] = ..., devices: _Optional[int] = ..., group_fraction: _Optional[_Iterable[float]] = ...) -> None: ...

class LoopItems(_message.Message):
    __slots__ = ("stage", "passes", "relative", "pulls", "one_by_one")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    ONE_BY_ONE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    passes: _containers.RepeatedScalarFieldContainer[int]
    relative: _containers.RepeatedScalarFieldContainer[float]
    pulls: bool
    one_by_one: bool
    def __init__(self, stage: _Optional[str] = ..., passes: _Optional[_Iterable[int]] = ..., relative: _Optional[_Iterable[float]] = ..., pulls: bool = ..., one_by_one: bool = ...) -> None: ...

class HandOff(_message.Message):
    __slots__ = ("stage", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    seconds: float
    def __init__(self, stage: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class SwitchCost(_message.Message):
    __slots__ = ("group", "onload_s", "offload_s", "resident_bytes", "offloaded_bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ONLOAD_S_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    group: str
    onload_s: float
    offload_s: float
    resident_bytes: float
    offloaded_bytes: float
    def __init__(self, group: _Optional[str] = ..., onload_s: _Optional[float] = ..., offload_s: _Optional[float] = ..., resident_bytes: _Optional[float] = ..., offloaded_bytes: _Optional[float] = ...) -> None: ...

class SyncCost(_message.Message):
    __slots__ = ("source", "target", "seconds")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    seconds: float
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("model", "hardware", "version", "samples", "curves", "switches", "syncs", "transfer_latency_s", "transfer_bytes_per_s", "models", "measured_on", "hand_offs", "loop_items")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CURVES_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    SYNCS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_ON_FIELD_NUMBER: _ClassVar[int]
    HAND_OFFS_FIELD_NUMBER: _ClassVar[int]
    LOOP_ITEMS_FIELD_NUMBER: _ClassVar[int]
    model: str
    hardware: str
    version: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    curves: _containers.RepeatedCompositeFieldContainer[CompletionCurve]
    switches: _containers.RepeatedCompositeFieldContainer[SwitchCost]
    syncs: _containers.RepeatedCompositeFieldContainer[SyncCost]
    transfer_latency_s: float
    transfer_bytes_per_s: float
    models: _containers.RepeatedCompositeFieldContainer[StageModel]
    measured_on: DeviceSpec
    hand_offs: _containers.RepeatedCompositeFieldContainer[HandOff]
    loop_items: _containers.RepeatedCompositeFieldContainer[LoopItems]
    def __init__(self, model: _Optional[str] = ..., hardware: _Optional[str] = ..., version: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., curves: _Optional[_Iterable[_Union[CompletionCurve, _Mapping]]] = ..., switches: _Optional[_Iterable[_Union[SwitchCost, _Mapping]]] = ..., syncs: _Optional[_Iterable[_Union[SyncCost, _Mapping]]] = ..., transfer_latency_s: _Optional[float] = ..., transfer_bytes_per_s: _Optional[float] = ..., models: _Optional[_Iterable[_Union[StageModel, _Mapping]]] = ..., measured_on: _Optional[_Union[DeviceSpec, _Mapping]] = ..., hand_offs: _Optional[_Iterable[_Union[HandOff, _Mapping]]] = ..., loop_items: _Optional[_Iterable[_Union[LoopItems, _Mapping]]] = ...) -> None: ...

class Transformer(_message.Message):
    __slots__ = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocabulary", "tied_embeddings", "experts", "active_experts", "head_size")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    TIED_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool
    experts: int
    active_experts: int
    head_size: int
    def __init__(self, layers: _Optional[int] = ..., hidden: _Optional[int] = ..., heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., intermediate: _Optional[int] = ..., vocabulary: _Optional[int] = ..., tied_embeddings: bool = ..., experts: _Optional[int] = ..., active_experts: _Optional[int] = ..., head_size: _Optional[int] = ...) -> None: ...

class StageModel(_message.Message):
    __slots__ = ("stage", "transformer", "phase", "prompt_tokens", "new_tokens", "weight_bytes", "tokens_in_flight", "sequences")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    stage: str
    transformer: Transformer
    phase: Phase
    prompt_tokens: float
    new_tokens: float
    weight_bytes: float
    tokens_in_flight: float
    sequences: float
    def __init__(self, stage: _Optional[str] = ..., transformer: _Optional[_Union[Transformer, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., prompt_tokens: _Optional[float] = ..., new_tokens: _Optional[float] = ..., weight_bytes: _Optional[float] = ..., tokens_in_flight: _Optional[float] = ..., sequences: _Optional[float] = ...) -> None: ...

class DeviceSpec(_message.Message):
    __slots__ = ("kind", "count", "memory_bytes", "flops_per_s", "memory_bytes_per_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    count: int
    memory_bytes: float
    flops_per_s: float
    memory_bytes_per_s: float
    def __init__(self, kind: _Optional[str] = ..., count: _Optional[int] = ..., memory_bytes: _Optional[float] = ..., flops_per_s: _Optional[float] = ..., memory_bytes_per_s: _Optional[float] = ...) -> None: ...

class NodeSpec(_message.Message):
    __slots__ = ("name", "count", "devices", "cores", "link_bytes_per_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    devices: _containers.RepeatedCompositeFieldContainer[DeviceSpec]
    cores: int
    link_bytes_per_s: float
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[DeviceSpec, _Mapping]]] = ..., cores: _Optional[int] = ..., link_bytes_per_s: _Optional[float] = ...) -> None: ...

class ClusterSpec(_message.Message):
    __slots__ = ("nodes", "network_bytes_per_s", "network_latency_s")
    NODES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NETWORK_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeSpec]
    network_bytes_per_s: float
    network_latency_s: float
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeSpec, _Mapping]]] = ..., network_bytes_per_s: _Optional[float] = ..., network_latency_s: _Optional[float] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("workflow", "profile", "cluster", "mode", "max_staleness", "device_quantum", "max_chunks")
    WORKFLOW_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_QUANTUM_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    workflow: _flow_pb2.WorkflowGraph
    profile: Profile
    cluster: ClusterSpec
    mode: str
    max_staleness: int
    device_quantum: int
    max_chunks: int
    def __init__(self, workflow: _Optional[_Union[_flow_pb2.WorkflowGraph, _Mapping]] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ..., cluster: _Optional[_Union[ClusterSpec, _Mapping]] = ..., mode: _Optional[str] = ..., max_staleness: _Optional[int] = ..., device_quantum: _Optional[int] = ..., max_chunks: _Optional[int] = ...) -> None: ...

class RankedPlan(_message.Message):
    __slots__ = ("plan", "searched_s", "simulated_s", "peak_bytes", "shape")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_S_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    plan: _flow_pb2.ExecutionPlan
    searched_s: float
    simulated_s: float
    peak_bytes: float
    shape: str
    def __init__(self, plan: _Optional[_Union[_flow_pb2.ExecutionPlan, _Mapping]] = ..., searched_s: _Optional[float] = ..., simulated_s: _Optional[float] = ..., peak_bytes: _Optional[float] = ..., shape: _Optional[str] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("plans", "search_s", "lower_bound_s", "infeasible", "exact", "device_quantum", "notes")
    PLANS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_S_FIELD_NUMBER: _ClassVar[int]
    LOWER_BOUND_S_FIELD_NUMBER: _ClassVar[int]
    INFEASIBLE_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_QUANTUM_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[RankedPlan]
    search_s: float
    lower_bound_s: float
    infeasible: str
    exact: bool
    device_quantum: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, plans: _Optional[_Iterable[_Union[RankedPlan, _Mapping]]] = ..., search_s: _Optional[float] = ..., lower_bound_s: _Optional[float] = ..., infeasible: _Optional[str] = ..., exact: bool = ..., device_quantum: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: PlanRequest
    def __init__(self, request: _Optional[_Union[PlanRequest, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("response", "text", "binding_constraint", "sensitivities")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BINDING_CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    SENSITIVITIES_FIELD_NUMBER: _ClassVar[int]
    response: PlanResponse
    text: str
    binding_constraint: str
    sensitivities: _containers.RepeatedCompositeFieldContainer[Sensitivity]
    def __init__(self, response: _Optional[_Union[PlanResponse, _Mapping]] = ..., text: _Optional[str] = ..., binding_constraint: _Optional[str] = ..., sensitivities: _Optional[_Iterable[_Union[Sensitivity, _Mapping]]] = ...) -> None: ...

class Sensitivity(_message.Message):
    __slots__ = ("what", "factor", "becomes")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    BECOMES_FIELD_NUMBER: _ClassVar[int]
    what: str
    factor: float
    becomes: str
    def __init__(self, what: _Optional[str] = ..., factor: _Optional[float] = ..., becomes: _Optional[str] = ...) -> None: ...

class CompareRequest(_message.Message):
    __slots__ = ("left", "right")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    left: PlanRequest
    right: PlanRequest
    def __init__(self, left: _Optional[_Union[PlanRequest, _Mapping]] = ..., right: _Optional[_Union[PlanRequest, _Mapping]] = ...) -> None: ...

class CompareResponse(_message.Message):
    __slots__ = ("left", "right", "text")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    left: PlanResponse
    right: PlanResponse
    text: str
    def __init__(self, left: _Optional[_Union[PlanResponse, _Mapping]] = ..., right: _Optional[_Union[PlanResponse, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class SimulateRequest(_message.Message):
    __slots__ = ("request", "plan")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    request: PlanRequest
    plan: _flow_pb2.ExecutionPlan
    def __init__(self, request: _Optional[_Union[PlanRequest, _Mapping]] = ..., plan: _Optional[_Union[_flow_pb2.ExecutionPlan, _Mapping]] = ...) -> None: ...

class SimulateResponse(_message.Message):
    __slots__ = ("iteration_s", "timeline")
    ITERATION_S_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    iteration_s: float
    timeline: _flow_pb2.Timeline
    def __init__(self, iteration_s: _Optional[float] = ..., timeline: _Optional[_Union[_flow_pb2.Timeline, _Mapping]] = ...) -> None: ...
