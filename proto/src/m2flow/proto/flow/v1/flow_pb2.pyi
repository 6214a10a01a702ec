from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_KIND_UNSPECIFIED: _ClassVar[StageKind]
    STAGE_KIND_SOURCE: _ClassVar[StageKind]
    STAGE_KIND_WORK: _ClassVar[StageKind]
    STAGE_KIND_MAP: _ClassVar[StageKind]
    STAGE_KIND_FILTER: _ClassVar[StageKind]
    STAGE_KIND_GATHER: _ClassVar[StageKind]
    STAGE_KIND_BARRIER: _ClassVar[StageKind]
    STAGE_KIND_PUBLISH: _ClassVar[StageKind]
    STAGE_KIND_SINK: _ClassVar[StageKind]
    STAGE_KIND_MERGE: _ClassVar[StageKind]
    STAGE_KIND_JOIN: _ClassVar[StageKind]

class Residency(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESIDENCY_UNSPECIFIED: _ClassVar[Residency]
    RESIDENCY_RESIDENT: _ClassVar[Residency]
    RESIDENCY_OFFLOADED: _ClassVar[Residency]

class SpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_KIND_UNSPECIFIED: _ClassVar[SpanKind]
    SPAN_KIND_BUSY: _ClassVar[SpanKind]
    SPAN_KIND_WAIT_INPUT: _ClassVar[SpanKind]
    SPAN_KIND_WAIT_LOCK: _ClassVar[SpanKind]
    SPAN_KIND_WAIT_WEIGHTS: _ClassVar[SpanKind]
    SPAN_KIND_WAIT_OUTPUT: _ClassVar[SpanKind]
    SPAN_KIND_ONLOAD: _ClassVar[SpanKind]
    SPAN_KIND_OFFLOAD: _ClassVar[SpanKind]
STAGE_KIND_UNSPECIFIED: StageKind
STAGE_KIND_SOURCE: StageKind
STAGE_KIND_WORK: StageKind
STAGE_KIND_MAP: StageKind
STAGE_KIND_FILTER: StageKind
STAGE_KIND_GATHER: StageKind
STAGE_KIND_BARRIER: StageKind
STAGE_KIND_PUBLISH: StageKind
STAGE_KIND_SINK: StageKind
STAGE_KIND_MERGE: StageKind
STAGE_KIND_JOIN: StageKind
RESIDENCY_UNSPECIFIED: Residency
RESIDENCY_RESIDENT: Residency
RESIDENCY_OFFLOADED: Residency
SPAN_KIND_UNSPECIFIED: SpanKind
SPAN_KIND_BUSY: SpanKind
SPAN_KIND_WAIT_INPUT: SpanKind
SPAN_KIND_WAIT_LOCK: SpanKind
SPAN_KIND_WAIT_WEIGHTS: SpanKind
SPAN_KIND_WAIT_OUTPUT: SpanKind
SPAN_KIND_ONLOAD: SpanKind
SPAN_KIND_OFFLOAD: SpanKind

class Stage(_message.Message):
    __slots__ = ("name", "kind", "group", "method", "by", "to", "expansion", "location", "quota", "after", "order_window", "epochs", "branch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    EXPANSION_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ORDER_WINDOW_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: StageKind
    group: str
    method: str
    by: str
    to: str
    expansion: float
    location: str
    quota: Quota
    after: _containers.RepeatedScalarFieldContainer[str]
    order_window: int
    epochs: int
    branch: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[StageKind, str]] = ..., group: _Optional[str] = ..., method: _Optional[str] = ..., by: _Optional[str] = ..., to: _Optional[str] = ..., expansion: _Optional[float] = ..., location: _Optional[str] = ..., quota: _Optional[_Union[Quota, _Mapping]] = ..., after: _Optional[_Iterable[str]] = ..., order_window: _Optional[int] = ..., epochs: _Optional[int] = ..., branch: _Optional[str] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("count", "carry_surplus")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CARRY_SURPLUS_FIELD_NUMBER: _ClassVar[int]
    count: int
    carry_surplus: bool
    def __init__(self, count: _Optional[int] = ..., carry_surplus: bool = ...) -> None: ...

class Stream(_message.Message):
    __slots__ = ("producer", "consumer", "feedback", "item_bytes", "rounds")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    ITEM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    producer: str
    consumer: str
    feedback: bool
    item_bytes: float
    rounds: float
    def __init__(self, producer: _Optional[str] = ..., consumer: _Optional[str] = ..., feedback: bool = ..., item_bytes: _Optional[float] = ..., rounds: _Optional[float] = ...) -> None: ...

class WorkerGroup(_message.Message):
    __slots__ = ("name", "device_kind", "devices_per_rank", "min_devices", "max_devices", "can_offload", "in_step")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICES_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    MIN_DEVICES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEVICES_FIELD_NUMBER: _ClassVar[int]
    CAN_OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    IN_STEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    device_kind: str
    devices_per_rank: int
    min_devices: int
    max_devices: int
    can_offload: bool
    in_step: bool
    def __init__(self, name: _Optional[str] = ..., device_kind: _Optional[str] = ..., devices_per_rank: _Optional[int] = ..., min_devices: _Optional[int] = ..., max_devices: _Optional[int] = ..., can_offload: bool = ..., in_step: bool = ...) -> None: ...

class WorkflowGraph(_message.Message):
    __slots__ = ("name", "stages", "streams", "groups", "source_items")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ITEMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    streams: _containers.RepeatedCompositeFieldContainer[Stream]
    groups: _containers.RepeatedCompositeFieldContainer[WorkerGroup]
    source_items: int
    def __init__(self, name: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., streams: _Optional[_Iterable[_Union[Stream, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[WorkerGroup, _Mapping]]] = ..., source_items: _Optional[int] = ...) -> None: ...

class GroupPlan(_message.Message):
    __slots__ = ("group", "device_ids", "num_ranks", "residency")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    group: str
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    num_ranks: int
    residency: Residency
    def __init__(self, group: _Optional[str] = ..., device_ids: _Optional[_Iterable[int]] = ..., num_ranks: _Optional[int] = ..., residency: _Optional[_Union[Residency, str]] = ...) -> None: ...

class StagePlan(_message.Message):
    __slots__ = ("stage", "granularity", "position", "hold")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    stage: str
    granularity: int
    position: int
    hold: bool
    def __init__(self, stage: _Optional[str] = ..., granularity: _Optional[int] = ..., position: _Optional[int] = ..., hold: bool = ...) -> None: ...

class EdgePlan(_message.Message):
    __slots__ = ("producer", "consumer", "capacity")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    producer: str
    consumer: str
    capacity: int
    def __init__(self, producer: _Optional[str] = ..., consumer: _Optional[str] = ..., capacity: _Optional[int] = ...) -> None: ...

class ShareGroup(_message.Message):
    __slots__ = ("groups", "device_ids")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, groups: _Optional[_Iterable[str]] = ..., device_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StagePrediction(_message.Message):
    __slots__ = ("stage", "start_s", "end_s", "busy_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    stage: str
    start_s: float
    end_s: float
    busy_s: float
    def __init__(self, stage: _Optional[str] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ..., busy_s: _Optional[float] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("iteration_s", "error_s", "stages", "peak_bytes")
    class PeakBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    ITERATION_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    iteration_s: float
    error_s: float
    stages: _containers.RepeatedCompositeFieldContainer[StagePrediction]
    peak_bytes: _containers.ScalarMap[int, int]
    def __init__(self, iteration_s: _Optional[float] = ..., error_s: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StagePrediction, _Mapping]]] = ..., peak_bytes: _Optional[_Mapping[int, int]] = ...) -> None: ...

class ExecutionPlan(_message.Message):
    __slots__ = ("mode", "groups", "stages", "edges", "share_groups", "staleness", "prediction")
    MODE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    SHARE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    mode: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupPlan]
    stages: _containers.RepeatedCompositeFieldContainer[StagePlan]
    edges: _containers.RepeatedCompositeFieldContainer[EdgePlan]
    share_groups: _containers.RepeatedCompositeFieldContainer[ShareGroup]
    staleness: int
    prediction: Prediction
    def __init__(self, mode: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupPlan, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[StagePlan, _Mapping]]] = ..., edges: _Optional[_Iterable[_Union[EdgePlan, _Mapping]]] = ..., share_groups: _Optional[_Iterable[_Union[ShareGroup, _Mapping]]] = ..., staleness: _Optional[int] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("stage", "group", "rank", "kind", "start_ns", "end_ns", "iteration", "items", "tokens", "device_ids", "inputs", "outputs", "peak_bytes", "output_after_ns")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_AFTER_NS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    group: str
    rank: int
    kind: SpanKind
    start_ns: int
    end_ns: int
    iteration: int
    items: int
    tokens: int
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    inputs: _containers.RepeatedScalarFieldContainer[str]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    peak_bytes: int
    output_after_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stage: _Optional[str] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., kind: _Optional[_Union[SpanKind, str]] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., iteration: _Optional[int] = ..., items: _Optional[int] = ..., tokens: _Optional[int] = ..., device_ids: _Optional[_Iterable[int]] = ..., inputs: _Optional[_Iterable[str]] = ..., outputs: _Optional[_Iterable[str]] = ..., peak_bytes: _Optional[int] = ..., output_after_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...
