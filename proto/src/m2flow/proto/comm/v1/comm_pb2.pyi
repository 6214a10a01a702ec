from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("version", "peer", "token", "incarnation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    version: str
    peer: str
    token: str
    incarnation: int
    def __init__(self, version: _Optional[str] = ..., peer: _Optional[str] = ..., token: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "version")
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    reason: str
    version: str
    def __init__(self, reason: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("id", "size_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    size_bytes: int
    def __init__(self, id: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("segment", "offset_bytes", "size_bytes")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    segment: int
    offset_bytes: int
    size_bytes: int
    def __init__(self, segment: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("blocks", "abandoned")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    abandoned: bool
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., abandoned: bool = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("data", "block")
    DATA_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    block: Block
    def __init__(self, data: _Optional[bytes] = ..., block: _Optional[_Union[Block, _Mapping]] = ...) -> None: ...

class CallRequest(_message.Message):
    __slots__ = ("service", "method", "args")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    service: str
    method: str
    args: Payload
    def __init__(self, service: _Optional[str] = ..., method: _Optional[str] = ..., args: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class CallResponse(_message.Message):
    __slots__ = ("result", "failure")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    result: Payload
    failure: Failure
    def __init__(self, result: _Optional[_Union[Payload, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("type", "message", "traceback", "peers")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    traceback: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ...) -> None: ...

class Items(_message.Message):
    __slots__ = ("ids", "keys", "weights", "tombstones", "iterations", "producers", "leases", "payloads", "blocks")
    IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedScalarFieldContainer[float]
    tombstones: _containers.RepeatedScalarFieldContainer[str]
    iterations: _containers.RepeatedScalarFieldContainer[int]
    producers: _containers.RepeatedScalarFieldContainer[str]
    leases: _containers.RepeatedScalarFieldContainer[int]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[float]] = ..., tombstones: _Optional[_Iterable[str]] = ..., iterations: _Optional[_Iterable[int]] = ..., producers: _Optional[_Iterable[str]] = ..., leases: _Optional[_Iterable[int]] = ..., payloads: _Optional[_Iterable[bytes]] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class ChannelRequest(_message.Message):
    __slots__ = ("channel", "put", "get", "ack", "end", "close", "stats")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    channel: str
    put: PutRequest
    get: GetRequest
    ack: AckRequest
    end: EndRequest
    close: CloseRequest
    stats: StatsRequest
    def __init__(self, channel: _Optional[str] = ..., put: _Optional[_Union[PutRequest, _Mapping]] = ..., get: _Optional[_Union[GetRequest, _Mapping]] = ..., ack: _Optional[_Union[AckRequest, _Mapping]] = ..., end: _Optional[_Union[EndRequest, _Mapping]] = ..., close: _Optional[_Union[CloseRequest, _Mapping]] = ..., stats: _Optional[_Union[StatsRequest, _Mapping]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("items", "wait")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    items: Items
    wait: bool
    def __init__(self, items: _Optional[_Union[Items, _Mapping]] = ..., wait: bool = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("key", "iteration", "weight", "at_least", "ack", "max_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: str
    iteration: int
    weight: float
    at_least: float
    ack: _containers.RepeatedScalarFieldContainer[int]
    max_bytes: int
    def __init__(self, key: _Optional[str] = ..., iteration: _Optional[int] = ..., weight: _Optional[float] = ..., at_least: _Optional[float] = ..., ack: _Optional[_Iterable[int]] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("leases", "give_back")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    give_back: bool
    def __init__(self, leases: _Optional[_Iterable[int]] = ..., give_back: bool = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("iteration",)
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    def __init__(self, iteration: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChannelResponse(_message.Message):
    __slots__ = ("failure", "items", "stats")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    items: Items
    stats: ChannelStats
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ..., items: _Optional[_Union[Items, _Mapping]] = ..., stats: _Optional[_Union[ChannelStats, _Mapping]] = ...) -> None: ...

class ChannelStats(_message.Message):
    __slots__ = ("queued", "leased", "put", "acked", "dropped", "tombstones", "regiven", "waiting_producers", "waiting_consumers", "queued_weight", "closed")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    REGIVEN_FIELD_NUMBER: _ClassVar[int]
    WAITING_PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    queued: int
    leased: int
    put: int
    acked: int
    dropped: int
    tombstones: int
    regiven: int
    waiting_producers: int
    waiting_consumers: int
    queued_weight: float
    closed: bool
    def __init__(self, queued: _Optional[int] = ..., leased: _Optional[int] = ..., put: _Optional[int] = ..., acked: _Optional[int] = ..., dropped: _Optional[int] = ..., tombstones: _Optional[int] = ..., regiven: _Optional[int] = ..., waiting_producers: _Optional[int] = ..., waiting_consumers: _Optional[int] = ..., queued_weight: _Optional[float] = ..., closed: bool = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: bytes
    def __init__(self, frames: _Optional[bytes] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: bytes
    def __init__(self, frames: _Optional[bytes] = ...) -> None: ...
