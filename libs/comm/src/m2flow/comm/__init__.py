"""Adaptive communication: channels, calls and weight transfer between the processes of a run."""

from m2flow.comm._calls import Request
from m2flow.comm._lease import Lease
from m2flow.comm.channel import Channel, Put, Stats
from m2flow.comm.endpoint import Endpoint
from m2flow.comm.errors import (
    ChannelClosedError,
    ChannelFullError,
    CommError,
    IterationEnded,
    PayloadError,
    PeerLostError,
    RemoteError,
    TimeoutError_,
)
from m2flow.comm.payload import Encoded, Tree, decode, encode, register
from m2flow.comm.tls import Tls
from m2flow.comm.weights import StagedWeights

__all__ = [
    "Channel",
    "ChannelClosedError",
    "ChannelFullError",
    "CommError",
    "Encoded",
    "Endpoint",
    "IterationEnded",
    "Lease",
    "PayloadError",
    "PeerLostError",
    "Put",
    "RemoteError",
    "Request",
    "StagedWeights",
    "Stats",
    "TimeoutError_",
    "Tls",
    "Tree",
    "decode",
    "encode",
    "register",
]
