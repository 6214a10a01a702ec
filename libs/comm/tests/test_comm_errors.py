"""Errors arrive whole where another process raised them: pools of workers pickle what their jobs raise."""

import copy
import pickle
from typing import Any

import pytest

import m2flow.comm
from m2flow.comm import (
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

ERRORS = [
    CommError("words"),
    PayloadError("words"),
    ChannelClosedError("q", "it is drained"),
    ChannelFullError("q"),
    IterationOverError("q", "every producer has ended iteration 3"),
    LeaseLostError("q", "'7'"),
    PeerLostError("worker", "it died"),
    TimeoutError_(channel="q", key="k", peer="host", elapsed_s=1.5),
    RemoteError("worker", "ValueError", "words", "its traceback"),
    IterationEnded("q", 3),
]


def test_every_public_error_is_tried_here() -> None:
    public = [getattr(m2flow.comm, name) for name in m2flow.comm.__all__]
    assert {type(error) for error in ERRORS} == {
        kind for kind in public if isinstance(kind, type) and issubclass(kind, BaseException)
    }


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickle_and_copy(error: Any) -> None:
    error.add_note("a note")
    copies = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for found in (*copies, copy.copy(error), copy.deepcopy(error)):
        assert type(found) is type(error)
        assert (str(found), repr(found), found.args) == (str(error), repr(error), error.args)
        assert vars(found) == vars(error)
