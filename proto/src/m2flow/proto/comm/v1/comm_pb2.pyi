from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_BOOL: _ClassVar[Dtype]
    DTYPE_UINT8: _ClassVar[Dtype]
    DTYPE_UINT16: _ClassVar[Dtype]
    DTYPE_UINT32: _ClassVar[Dtype]
    DTYPE_UINT64: _ClassVar[Dtype]
    DTYPE_INT8: _ClassVar[Dtype]
    DTYPE_INT16: _ClassVar[Dtype]
    DTYPE_INT32: _ClassVar[Dtype]
    DTYPE_INT64: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_FLOAT64: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_COMPLEX64: _ClassVar[Dtype]
    DTYPE_COMPLEX128: _ClassVar[Dtype]
    DTYPE_FLOAT8_E4M3FN: _ClassVar[Dtype]
    DTYPE_FLOAT8_E5M2: _ClassVar[Dtype]

class ArrayKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARRAY_KIND_UNSPECIFIED: _ClassVar[ArrayKind]
    ARRAY_KIND_NUMPY: _ClassVar[ArrayKind]
    ARRAY_KIND_TORCH: _ClassVar[ArrayKind]
DTYPE_UNSPECIFIED: Dtype
DTYPE_BOOL: Dtype
DTYPE_UINT8: Dtype
DTYPE_UINT16: Dtype
DTYPE_UINT32: Dtype
DTYPE_UINT64: Dtype
DTYPE_INT8: Dtype
DTYPE_INT16: Dtype
DTYPE_INT32: Dtype
DTYPE_INT64: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_FLOAT64: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_COMPLEX64: Dtype
DTYPE_COMPLEX128: Dtype
DTYPE_FLOAT8_E4M3FN: Dtype
DTYPE_FLOAT8_E5M2: Dtype
ARRAY_KIND_UNSPECIFIED: ArrayKind
ARRAY_KIND_NUMPY: ArrayKind
ARRAY_KIND_TORCH: ArrayKind

class TensorDescriptor(_message.Message):
    __slots__ = ("dtype", "kind", "shape", "device", "segment", "offset_bytes", "size_bytes")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    dtype: Dtype
    kind: ArrayKind
    shape: _containers.RepeatedScalarFieldContainer[int]
    device: str
    segment: str
    offset_bytes: int
    size_bytes: int
    def __init__(self, dtype: _Optional[_Union[Dtype, str]] = ..., kind: _Optional[_Union[ArrayKind, str]] = ..., shape: _Optional[_Iterable[int]] = ..., device: _Optional[str] = ..., segment: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("structure_id", "structure", "scalars", "tensors")
    STRUCTURE_ID_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    structure_id: int
    structure: bytes
    scalars: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[TensorDescriptor]
    def __init__(self, structure_id: _Optional[int] = ..., structure: _Optional[bytes] = ..., scalars: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[TensorDescriptor, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "peer", "capabilities", "token")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    version: str
    peer: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    token: str
    def __init__(self, version: _Optional[str] = ..., peer: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., token: _Optional[str] = ...) -> None: ...

class ChannelRequest(_message.Message):
    __slots__ = ("id", "channel", "hello", "put", "get", "ack", "end", "close", "stats", "cancel", "open")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    id: int
    channel: str
    hello: Hello
    put: PutRequest
    get: GetRequest
    ack: AckRequest
    end: EndRequest
    close: CloseRequest
    stats: StatsRequest
    cancel: CancelRequest
    open: OpenRequest
    def __init__(self, id: _Optional[int] = ..., channel: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., put: _Optional[_Union[PutRequest, _Mapping]] = ..., get: _Optional[_Union[GetRequest, _Mapping]] = ..., ack: _Optional[_Union[AckRequest, _Mapping]] = ..., end: _Optional[_Union[EndRequest, _Mapping]] = ..., close: _Optional[_Union[CloseRequest, _Mapping]] = ..., stats: _Optional[_Union[StatsRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., open: _Optional[_Union[OpenRequest, _Mapping]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("capacity", "roles", "group")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    group: str
    def __init__(self, capacity: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., group: _Optional[str] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("id", "key", "weight", "producer", "payload", "tombstone", "inline_data", "lease", "iteration")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    INLINE_DATA_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    key: str
    weight: float
    producer: str
    payload: Payload
    tombstone: str
    inline_data: bytes
    lease: int
    iteration: int
    def __init__(self, id: _Optional[str] = ..., key: _Optional[str] = ..., weight: _Optional[float] = ..., producer: _Optional[str] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., tombstone: _Optional[str] = ..., inline_data: _Optional[bytes] = ..., lease: _Optional[int] = ..., iteration: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("items", "wait")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Envelope]
    wait: bool
    def __init__(self, items: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ..., wait: bool = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("key", "weight", "max_items", "iteration")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    weight: float
    max_items: int
    iteration: int
    def __init__(self, key: _Optional[str] = ..., weight: _Optional[float] = ..., max_items: _Optional[int] = ..., iteration: _Optional[int] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leases: _Optional[_Iterable[int]] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("iteration",)
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    def __init__(self, iteration: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class ChannelResponse(_message.Message):
    __slots__ = ("id", "error", "message", "items", "stats")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    id: int
    error: str
    message: str
    items: _containers.RepeatedCompositeFieldContainer[Envelope]
    stats: ChannelStats
    def __init__(self, id: _Optional[int] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., items: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ..., stats: _Optional[_Union[ChannelStats, _Mapping]] = ...) -> None: ...

class ChannelStats(_message.Message):
    __slots__ = ("queued", "leased", "put", "acked", "waiting_producers", "waiting_consumers", "queued_weight", "closed")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    WAITING_PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    queued: int
    leased: int
    put: int
    acked: int
    waiting_producers: int
    waiting_consumers: int
    queued_weight: float
    closed: bool
    def __init__(self, queued: _Optional[int] = ..., leased: _Optional[int] = ..., put: _Optional[int] = ..., acked: _Optional[int] = ..., waiting_producers: _Optional[int] = ..., waiting_consumers: _Optional[int] = ..., queued_weight: _Optional[float] = ..., closed: bool = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease", "channel")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    lease: int
    channel: str
    def __init__(self, lease: _Optional[int] = ..., channel: _Optional[str] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: ChannelRequest
    def __init__(self, request: _Optional[_Union[ChannelRequest, _Mapping]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: ChannelResponse
    def __init__(self, response: _Optional[_Union[ChannelResponse, _Mapping]] = ...) -> None: ...
