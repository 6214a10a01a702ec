from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Device(_message.Message):
    __slots__ = ("id", "node", "kind", "index", "memory_bytes", "labels", "cores")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    id: int
    node: str
    kind: str
    index: int
    memory_bytes: int
    labels: _containers.ScalarMap[str, str]
    cores: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., node: _Optional[str] = ..., kind: _Optional[str] = ..., index: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., cores: _Optional[_Iterable[int]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "address", "devices")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankPlacement]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankPlacement, _Mapping]]] = ...) -> None: ...

class RankPlacement(_message.Message):
    __slots__ = ("device_ids",)
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("id", "hello", "start", "call", "cancel", "stop", "attach", "kill", "peers")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    id: int
    hello: SessionHello
    start: StartWorker
    call: Call
    cancel: CancelCall
    stop: StopWorker
    attach: Attach
    kill: KillWorker
    peers: Peers
    def __init__(self, id: _Optional[int] = ..., hello: _Optional[_Union[SessionHello, _Mapping]] = ..., start: _Optional[_Union[StartWorker, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., cancel: _Optional[_Union[CancelCall, _Mapping]] = ..., stop: _Optional[_Union[StopWorker, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., kill: _Optional[_Union[KillWorker, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("version", "token", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: str
    token: str
    name: str
    def __init__(self, version: _Optional[str] = ..., token: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class StartWorker(_message.Message):
    __slots__ = ("group", "rank", "world_size", "target", "config", "devices", "environment", "run_dir", "attempt", "process", "token", "peers", "host")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class PeersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    world_size: int
    target: str
    config: bytes
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    environment: _containers.ScalarMap[str, str]
    run_dir: str
    attempt: int
    process: int
    token: str
    peers: _containers.ScalarMap[str, str]
    host: str
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., target: _Optional[str] = ..., config: _Optional[bytes] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., environment: _Optional[_Mapping[str, str]] = ..., run_dir: _Optional[str] = ..., attempt: _Optional[int] = ..., process: _Optional[int] = ..., token: _Optional[str] = ..., peers: _Optional[_Mapping[str, str]] = ..., host: _Optional[str] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("group", "ranks", "addresses")
    class AddressesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    group: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    addresses: _containers.ScalarMap[str, str]
    def __init__(self, group: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., addresses: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("group", "ranks", "attached", "method", "arguments")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    group: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    attached: str
    method: str
    arguments: bytes
    def __init__(self, group: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., attached: _Optional[str] = ..., method: _Optional[str] = ..., arguments: _Optional[bytes] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("group", "ranks", "name", "target", "arguments")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    group: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    name: str
    target: str
    arguments: bytes
    def __init__(self, group: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., name: _Optional[str] = ..., target: _Optional[str] = ..., arguments: _Optional[bytes] = ...) -> None: ...

class CancelCall(_message.Message):
    __slots__ = ("call_id", "group", "ranks")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    group: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, call_id: _Optional[int] = ..., group: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class StopWorker(_message.Message):
    __slots__ = ("group", "rank", "grace_s")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    grace_s: float
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., grace_s: _Optional[float] = ...) -> None: ...

class KillWorker(_message.Message):
    __slots__ = ("group", "rank")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("id", "hello", "started", "results", "failure", "log", "stopped")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    id: int
    hello: SessionHello
    started: Started
    results: CallResults
    failure: FailureReport
    log: LogLine
    stopped: Stopped
    def __init__(self, id: _Optional[int] = ..., hello: _Optional[_Union[SessionHello, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., results: _Optional[_Union[CallResults, _Mapping]] = ..., failure: _Optional[_Union[FailureReport, _Mapping]] = ..., log: _Optional[_Union[LogLine, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("pid", "group", "rank", "address", "attempt")
    PID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    pid: int
    group: str
    rank: int
    address: str
    attempt: int
    def __init__(self, pid: _Optional[int] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., address: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class CallResults(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[CallResult]
    def __init__(self, results: _Optional[_Iterable[_Union[CallResult, _Mapping]]] = ...) -> None: ...

class CallResult(_message.Message):
    __slots__ = ("value", "seconds", "timers", "call_id", "rank")
    class TimersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMERS_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    seconds: float
    timers: _containers.ScalarMap[str, float]
    call_id: int
    rank: int
    def __init__(self, value: _Optional[bytes] = ..., seconds: _Optional[float] = ..., timers: _Optional[_Mapping[str, float]] = ..., call_id: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("exit_code", "group", "rank")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    group: str
    rank: int
    def __init__(self, exit_code: _Optional[int] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("group", "rank", "text")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    text: str
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class FailureReport(_message.Message):
    __slots__ = ("group", "rank", "host", "pid", "phase", "cause", "traceback", "time_s", "call_id", "consequence", "attempt")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    CONSEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    host: str
    pid: int
    phase: str
    cause: str
    traceback: str
    time_s: float
    call_id: int
    consequence: bool
    attempt: int
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., phase: _Optional[str] = ..., cause: _Optional[str] = ..., traceback: _Optional[str] = ..., time_s: _Optional[float] = ..., call_id: _Optional[int] = ..., consequence: bool = ..., attempt: _Optional[int] = ...) -> None: ...
