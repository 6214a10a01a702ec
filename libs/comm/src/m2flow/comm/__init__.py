"""Adaptive communication: channels, calls and weight transfer between the processes of a run."""

from m2flow.comm._calls import Request
from m2flow.comm._items import Lease, Put
from m2flow.comm.channel import Channel, Stats
from m2flow.comm.collectives import Backend, Handle, RankGroup, move_rows
from m2flow.comm.endpoint import Endpoint
from m2flow.comm.errors import (
    ChannelClosedError,
    ChannelFullError,
    CommError,
    IterationEnded,
    IterationOverError,
    LeaseLostError,
    PayloadError,
    PeerLostError,
    RemoteError,
    TimeoutError_,
)
from m2flow.comm.payload import Encoded, Pickled, Tree, decode, encode, register
from m2flow.comm.resharding import Box, Shard
from m2flow.comm.routing import Address, Route, explain_route, route
from m2flow.comm.tls import Tls
from m2flow.comm.transfer import Prepared, WeightReceiver
from m2flow.comm.weights import StagedWeights

__all__ = [
    "Address",
    "Backend",
    "Box",
    "Channel",
    "ChannelClosedError",
    "ChannelFullError",
    "CommError",
    "Encoded",
    "Endpoint",
    "Handle",
    "IterationEnded",
    "IterationOverError",
    "Lease",
    "LeaseLostError",
    "PayloadError",
    "PeerLostError",
    "Pickled",
    "Prepared",
    "Put",
    "RankGroup",
    "RemoteError",
    "Request",
    "Route",
    "Shard",
    "StagedWeights",
    "Stats",
    "TimeoutError_",
    "Tls",
    "Tree",
    "WeightReceiver",
    "decode",
    "encode",
    "explain_route",
    "move_rows",
    "register",
    "route",
]
